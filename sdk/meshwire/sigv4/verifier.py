"""SigV4 verification: check a parsed claim against the secret key and the current time.

Law: secret and time are arguments; the result is what verifying a chunked body needs next, or an S3Error.
Invariant: nothing unsigned is trusted: the host and every `x-amz-*` header must be signed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hmac import compare_digest
from typing import TYPE_CHECKING

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.sigv4 import signer
from meshwire.sigv4.signer import signing_key

if TYPE_CHECKING:
    from meshwire.s3.parse_request import RequestHead
    from meshwire.sigv4.parse_authorization import Claim

MAX_SKEW = 900


@dataclass(frozen=True, slots=True)
class Verified:
    """The values that the signatures of a chunked body chain to. `scope` is
    date/region/service/aws4_request."""

    signing_key: bytes = field(repr=False)
    seed_signature: str
    scope: str
    timestamp: str


def verify(claim: Claim, head: RequestHead, secret_key: str, now: int) -> Verified:
    """Verify the claim at time `now` (seconds since the epoch).

    Raises S3Error: RequestTimeTooSkewed, AccessDenied (presigned request expired or not yet valid; unsigned
    headers that must be signed), SignatureDoesNotMatch.
    """
    _check_time(claim, now)
    _check_signed_headers(claim, head)
    scope = str(claim.scope)
    try:
        key = signing_key(secret_key, claim.scope.date, claim.scope.region, claim.scope.service)
        signature = _matching(claim, head, key, scope)
    except percent_encoding.PercentError:
        raise S3Error("InvalidURI") from None
    if signature is None:
        raise _mismatch(claim, head, scope)
    return Verified(key, signature, scope, claim.timestamp)


def _matching(claim: Claim, head: RequestHead, key: bytes, scope: str) -> str | None:
    """Return the signature if any spelling of the request yields it."""
    signed, given = claim.signed_headers, claim.signature
    request = signer.canonical_request(head, signed, claim.payload_hash)
    computed = signer.compute_signature(key, request, claim.timestamp, scope)
    if compare_digest(computed, given):
        return computed
    for request in signer.canonical_variants(head, signed, claim.payload_hash):
        computed = signer.compute_signature(key, request, claim.timestamp, scope)
        if compare_digest(computed, given):
            return computed
    return None


def _check_time(claim: Claim, now: int) -> None:
    signed_at = dates.parse_amz(claim.timestamp)
    if signed_at is None:
        raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    if claim.expires is None:
        if abs(now - signed_at) > MAX_SKEW:
            raise S3Error(
                "RequestTimeTooSkewed",
                extra={
                    "RequestTime": claim.timestamp,
                    "ServerTime": dates.format_iso(now * 1000),
                    "MaxAllowedSkewMilliseconds": str(MAX_SKEW * 1000),
                },
            )
    elif now > signed_at + claim.expires:
        raise S3Error(
            "AccessDenied",
            "Request has expired",
            extra={
                "X-Amz-Expires": str(claim.expires),
                "Expires": dates.format_iso((signed_at + claim.expires) * 1000),
                "ServerTime": dates.format_iso(now * 1000),
            },
        )
    elif signed_at > now + MAX_SKEW:
        raise S3Error("AccessDenied", "Request is not valid yet")


def _check_signed_headers(claim: Claim, head: RequestHead) -> None:
    signed = claim.signed_headers
    unsigned = [name for name in head.headers if name.startswith("x-amz-") and name not in signed]
    if "host" not in signed:
        unsigned.append("host")
    if unsigned:
        raise S3Error(
            "AccessDenied",
            "There were headers present in the request which were not signed",
            extra={"HeadersNotSigned": ", ".join(sorted(unsigned))},
        )


def _mismatch(claim: Claim, head: RequestHead, scope: str) -> S3Error:
    """Report what the server signed, as S3 does: without it a client's mistake cannot be found. A session
    token is never included."""
    extra = {"AWSAccessKeyId": claim.access_key, "SignatureProvided": claim.signature}
    if claim.session_token is None:
        request = signer.canonical_request(head, claim.signed_headers, claim.payload_hash)
        extra["StringToSign"] = signer.string_to_sign(request, claim.timestamp, scope)
        extra["CanonicalRequest"] = request
    return S3Error("SignatureDoesNotMatch", extra=extra)
