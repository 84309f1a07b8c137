"""AWS Signature Version 4, for both ends: the SDK signs with it, the daemon verifies with it.

Law: pure; the time is an argument and secrets never leave (no repr, no error message carries one).
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-auth-using-authorization-header.html
"""

from meshwire.sigv4.claims import (
    STREAMING_PAYLOADS,
    UNSIGNED_PAYLOAD,
    V4_ONLY,
    Claim,
    Scope,
    read_claim,
)
from meshwire.sigv4.signing import Credential, presign, sign
from meshwire.sigv4.verifying import Verified, verify

__all__ = [
    "STREAMING_PAYLOADS",
    "UNSIGNED_PAYLOAD",
    "V4_ONLY",
    "Claim",
    "Credential",
    "Scope",
    "Verified",
    "presign",
    "read_claim",
    "sign",
    "verify",
]
