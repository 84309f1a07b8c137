"""AWS request signatures for both ends: SigV4, SigV2, signed chunks and form uploads.

Law: the time is an argument, and secrets never leak: no repr and no error message contains one.
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-auth-using-authorization-header.html
"""

from meshwire.sigv4.signer import UNSIGNED_PAYLOAD, Credential, Scope, presign, sign
from meshwire.sigv4.verifier import (
    SIGV4_REQUIRED_MESSAGE,
    STREAMING_PAYLOADS,
    Claim,
    Verified,
    read_claim,
    verify,
)

__all__ = [
    "SIGV4_REQUIRED_MESSAGE",
    "STREAMING_PAYLOADS",
    "UNSIGNED_PAYLOAD",
    "Claim",
    "Credential",
    "Scope",
    "Verified",
    "presign",
    "read_claim",
    "sign",
    "verify",
]
