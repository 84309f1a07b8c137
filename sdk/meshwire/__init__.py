"""The contract of daemons, SDK and operator: wire formats, documents, and functions both ends compute.

Law: pure. No I/O, clock, randomness or logging; only the standard library, numpy for index arithmetic,
and awscrt's checksums. Code that waits, reads a file or opens a socket belongs in `meshd` or `meshsdk`.
"""
