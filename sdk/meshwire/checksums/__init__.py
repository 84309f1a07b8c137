"""Checksums of S3: CRC, SHA, MD5 and XXH digests of bodies, and the verifier of an upload.

Law: the algorithms' libraries are loaded on first use, never on import.
"""
