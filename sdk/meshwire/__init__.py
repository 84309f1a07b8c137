"""The contract both ends compute alike.

Law: pure. No I/O, no clock, no randomness, no logging; the standard library, numpy for index arithmetic, and
awscrt's checksums. Code that waits, reads a file or opens a socket belongs in `meshd` or `meshsdk`.
"""
