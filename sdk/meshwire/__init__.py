"""The contract shared by daemons, SDK and operator: wire formats, documents, and functions that both ends
compute.

Law: pure. This package does no I/O and uses no clock, randomness or logging; it imports only the standard
library, numpy for index arithmetic, and awscrt's checksums. Code that waits, reads a file or opens a socket
belongs in `meshd` or `meshsdk`.
"""
