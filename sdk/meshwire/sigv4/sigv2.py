"""AWS Signature Version 2: boto3's presigned URLs for custom endpoints, and old clients' headers.

Law: pure; time and secret are arguments.
Invariant: nothing that changes the meaning of a request is trusted unsigned: a sub-resource that version 2
does not sign is rejected. An expiry is at most seven days ahead, as with version 4.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html
"""

from __future__ import annotations

import base64
import hmac
import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.s3.request_head import (
    RESPONSE_OVERRIDES,
    AuthMechanism,
    is_subresource,
    read_auth_mechanism,
    read_query,
)
from meshwire.sigv4.signer import MAX_EXPIRES
from meshwire.sigv4.verifier import MAX_SKEW, read_payload_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshwire.s3.parse_request import RequestHead

_SIGNED_RESOURCES = frozenset(
    [
        "accelerate",
        "acl",
        "analytics",
        "cors",
        "defaultObjectAcl",
        "delete",
        "inventory",
        "lifecycle",
        "location",
        "logging",
        "metrics",
        "notification",
        "object-lock",
        "partNumber",
        "policy",
        "replication",
        "requestPayment",
        "restore",
        "select",
        "select-type",
        "storageClass",
        "tagging",
        "torrent",
        "uploadId",
        "uploads",
        "versionId",
        "versioning",
        "versions",
        "website",
    ]
).union(RESPONSE_OVERRIDES)
_UTC = re.compile(
    r" (?:[+-]0000|UTC|UT|Z)\Z"
)  # other spellings of GMT in mail dates, which version 2 accepts
_NAMES = ("AWSAccessKeyId", "Signature", "Expires")


@dataclass(frozen=True, slots=True)
class SigV2Claim:
    """The unverified signature of a version 2 request. `expires` in seconds since the epoch, None for a
    header; `payload_hash` as in version 4, UNSIGNED-PAYLOAD unless the client sends one."""

    access_key: str
    signature: str
    expires: int | None
    payload_hash: str
    session_token: str | None = None

    @property
    def presigned(self) -> bool:
        return self.expires is not None


def read_sigv2_claim(head: RequestHead) -> SigV2Claim | None:
    """Return the claim of a version 2 header or query, or None if there is none.

    Raises S3Error: AccessDenied (parts missing, no valid expiry), InvalidArgument (a bad payload hash, an
    invalid header), InvalidRequest (a sub-resource that would not be signed), InvalidURI.
    """
    parameters = read_query(head.raw_query)
    mechanism, query = read_auth_mechanism(head.headers, parameters), parameters.values
    if mechanism is AuthMechanism.HEADER_V2:
        return _read_header(head, query)
    if mechanism is not AuthMechanism.PRESIGNED_V2:
        return None
    if any(not query.get(name) for name in _NAMES):
        raise S3Error(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId parameters",
        )
    signature = query["Signature"].replace(" ", "+")  # some clients do not escape it
    return _claim(head, query, query["AWSAccessKeyId"], signature, _expiry(query["Expires"]))


def _read_header(head: RequestHead, query: Mapping[str, str]) -> SigV2Claim:
    authorization = head.headers["authorization"]
    access_key, colon, signature = authorization.removeprefix("AWS ").strip().rpartition(":")
    if not colon or not access_key:
        raise S3Error(
            "InvalidArgument", "AWS authorization header is invalid. Expected AwsAccessKeyId:signature"
        )
    return _claim(head, query, access_key, signature, None)


def _claim(
    head: RequestHead, query: Mapping[str, str], access_key: str, signature: str, expires: int | None
) -> SigV2Claim:
    unsigned = [name for name in query if is_subresource(name) and name not in _SIGNED_RESOURCES]
    if unsigned:
        raise S3Error(
            "InvalidRequest",
            f"Signature version 2 does not sign ?{unsigned[0]}; sign this request with version 4.",
        )
    headers = signed_headers(head, query if expires is not None else {})
    payload_hash = read_payload_hash(headers.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD")
    return SigV2Claim(access_key, signature, expires, payload_hash, headers.get("x-amz-security-token"))


def verify_sigv2(claim: SigV2Claim, head: RequestHead, secret_key: str, now: int) -> None:
    """Return if the claim is valid at time `now` (seconds since the epoch).

    Raises S3Error: AccessDenied (expired, valid for too long, or without a date), RequestTimeTooSkewed,
    SignatureDoesNotMatch.
    """
    if claim.expires is None:
        _check_date(head, now)
    else:
        _check_expiry(claim.expires, now)
    try:
        texts = list(_strings_to_sign(claim, head))
        matches = [sigv2_signature_matches(text, secret_key, claim.signature) for text in texts]
    except percent_encoding.PercentError:
        raise S3Error("InvalidURI") from None
    if not any(matches):
        raise _mismatch(claim, texts[0])


def sigv2_signature_matches(text: str, secret_key: str, signature: str) -> bool:
    """Whether `signature` is that of `text`, compared in constant time. Raises PercentError."""
    return hmac.compare_digest(sign_sigv2(text, secret_key).encode(), percent_encoding.to_bytes(signature))


def sign_sigv2(text: str, secret_key: str) -> str:
    """Return the signature of a string to sign: base64 of its HMAC-SHA1. Raises PercentError."""
    digest = hmac.digest(secret_key.encode(), percent_encoding.to_bytes(text), "sha1")
    return base64.b64encode(digest).decode()


def signed_headers(head: RequestHead, query: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that version 2 signs, including those that a presigned URL carries in its query; a
    header that was actually sent takes precedence, as when the request is parsed."""
    hoisted = {name.lower(): value for name, value in query.items() if _is_signed(name.lower())}
    return hoisted | {name: value for name, value in head.headers.items() if _is_signed(name)}


def _is_signed(name: str) -> bool:
    return name.startswith("x-amz-") or name in {"content-md5", "content-type"}


def _strings_to_sign(claim: SigV2Claim, head: RequestHead) -> Iterator[str]:
    """Yield the equivalent strings to sign: clients differ in how they escape the path and write an empty
    value."""
    query = read_query(head.raw_query).values
    headers = signed_headers(head, query if claim.presigned else {})
    if claim.presigned:
        date = str(claim.expires)
    else:  # empty if x-amz-date is among the headers, which clients send when they cannot set Date
        date = "" if "x-amz-date" in head.headers else head.headers.get("date", "")
    lines = [head.method, headers.get("content-md5", ""), headers.get("content-type", ""), date]
    lines += [f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-amz-")]
    paths = dict.fromkeys(_paths(head))
    named = sorted((name, value) for name, value in query.items() if name in _SIGNED_RESOURCES)
    resources = dict.fromkeys(_resource(named, bare=bare) for bare in (True, False))
    for path, resource in product(paths, resources):
        yield "\n".join([*lines, f"{path}{resource}"])


def _paths(head: RequestHead) -> Iterator[str]:
    """Yield the possible paths including the bucket; botocore signs `/bucket/` and sends `/bucket`."""
    bucket = f"/{head.host_bucket}" if head.host_bucket else ""
    for path in (head.raw_path, percent_encoding.encode_path(head.raw_path)):
        yield bucket + path
        if "/" not in (bucket + path)[1:]:
            yield f"{bucket}{path}/"


def _resource(named: list[tuple[str, str]], *, bare: bool) -> str:
    """Return the sub-resources, decoded; `bare`: without the `=` of an empty value."""
    pieces = [name if bare and not value else f"{name}={value}" for name, value in named]
    return f"?{'&'.join(pieces)}" if pieces else ""


def _mismatch(claim: SigV2Claim, text: str) -> S3Error:
    """Report what the server signed, as S3 does; a session token is never included."""
    extra = {"AWSAccessKeyId": claim.access_key[:128], "SignatureProvided": claim.signature[:128]}
    if claim.session_token is None:
        extra["StringToSign"] = text
    return S3Error("SignatureDoesNotMatch", extra=extra)


def _expiry(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise S3Error("AccessDenied", f"Invalid date (should be seconds since epoch): {text[:64]}")
    return int(text)


def _check_expiry(expires: int, now: int) -> None:
    if now > expires:
        raise S3Error(
            "AccessDenied",
            "Request has expired",
            extra={
                "Expires": dates.format_iso(expires * 1000),
                "ServerTime": dates.format_iso(now * 1000),
            },
        )
    if expires > now + MAX_EXPIRES + MAX_SKEW:
        raise S3Error(
            "AccessDenied",
            f"This server accepts presigned URLs valid for at most {MAX_EXPIRES} seconds (a week); use one "
            "that expires sooner.",
        )


def _check_date(head: RequestHead, now: int) -> None:
    text = head.headers.get("x-amz-date", head.headers.get("date", ""))
    signed_at = dates.parse_http(_UTC.sub(" GMT", text))
    if signed_at is None:
        raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    if abs(now - signed_at) > MAX_SKEW:
        raise S3Error(
            "RequestTimeTooSkewed",
            extra={
                "RequestTime": text[:64],
                "ServerTime": dates.format_iso(now * 1000),
                "MaxAllowedSkewMilliseconds": str(MAX_SKEW * 1000),
            },
        )
