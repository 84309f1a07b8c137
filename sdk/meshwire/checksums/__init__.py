"""S3 checksums: CRC, SHA, MD5 and XXH digests of bodies, and the verifier of an upload.

Law: the libraries of the algorithms are loaded on first use, never on import.
"""
