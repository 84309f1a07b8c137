"""AWS Signature Version 2 in the query: the presigned URLs that boto3 makes for an endpoint of one's own.

Law: pure; the time and the secret come as arguments. Invariant: nothing that changes what a request means is
believed unsigned: a sub-resource that version 2 does not sign is refused. Where Amazon's own version 2 knows
no limit, an expiry lies at most seven days ahead, as with version 4.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NoReturn

from meshwire import httpdates, percents
from meshwire.s3.errors import S3Error
from meshwire.s3.queries import is_subresource, read_query
from meshwire.sigv4.claims import MAX_EXPIRES, read_payload_hash
from meshwire.sigv4.verifying import MAX_SKEW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshwire.s3.parsing import RequestHead

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
) | frozenset(
    f"response-{name}"
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
)
_NAMES = ("AWSAccessKeyId", "Signature", "Expires")


@dataclass(frozen=True, slots=True)
class OldClaim:
    """Who a version 2 query claims to be. `expires` in seconds since the epoch; `payload_hash` as version 4
    would have it, UNSIGNED-PAYLOAD for what every client sends."""

    access_key: str
    signature: str
    expires: int
    payload_hash: str
    session_token: str | None = None
    presigned: bool = True


def read_old_claim(head: RequestHead) -> OldClaim | None:
    """The claim of a version 2 query, None when there is none.

    Raises S3Error: AccessDenied (parts missing, no valid expiry), InvalidArgument (a bad payload hash),
    InvalidRequest (a sub-resource that would not be signed), InvalidURI.
    """
    if "AWSAccessKeyId=" not in head.raw_query and "Signature=" not in head.raw_query:
        return None
    query = read_query(head.raw_query).values
    if "AWSAccessKeyId" not in query and "Signature" not in query:
        return None
    if any(not query.get(name) for name in _NAMES):
        raise S3Error(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId parameters",
        )
    unsigned = [name for name in query if is_subresource(name) and name not in _SIGNED_RESOURCES]
    if unsigned:
        raise S3Error(
            "InvalidRequest",
            f"Signature version 2 does not sign ?{unsigned[0]}; presign this request with version 4.",
        )
    headers = signed_headers(head, query)
    return OldClaim(
        query["AWSAccessKeyId"],
        query["Signature"].replace(" ", "+"),  # some clients do not escape it
        _expiry(query["Expires"]),
        read_payload_hash(headers.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD"),
        headers.get("x-amz-security-token"),
    )


def verify_old(claim: OldClaim, head: RequestHead, secret_key: str, now: int) -> None:
    """Return if the claim holds at time `now` (seconds since the epoch).

    Raises S3Error: AccessDenied (expired, or valid for too long), SignatureDoesNotMatch.
    """
    if now > claim.expires:
        _refuse_expired(claim, now)
    if claim.expires > now + MAX_EXPIRES + MAX_SKEW:
        raise S3Error(
            "AccessDenied",
            f"A presigned URL lives at most {MAX_EXPIRES} seconds (a week) on this server; make one that "
            "expires sooner.",
        )
    try:
        texts = list(_strings_to_sign(claim, head))
        matches = [matches_old(text, secret_key, claim.signature) for text in texts]
    except percents.PercentError:
        raise S3Error("InvalidURI") from None
    if not any(matches):
        raise _mismatch(claim, texts[0])


def matches_old(text: str, secret_key: str, signature: str) -> bool:
    """Whether `signature` is that of `text`, in constant time. Raises PercentError."""
    return hmac.compare_digest(sign_old(text, secret_key).encode(), percents.to_bytes(signature))


def sign_old(text: str, secret_key: str) -> str:
    """The signature of a string to sign: base64 of its HMAC-SHA1. Raises PercentError."""
    digest = hmac.digest(secret_key.encode(), percents.to_bytes(text), "sha1")
    return base64.b64encode(digest).decode()


def signed_headers(head: RequestHead, query: Mapping[str, str]) -> dict[str, str]:
    """The headers that version 2 signs, with those that a presigned URL carries in its query; a header that
    was really sent wins, as it does when the request is read."""
    hoisted = {name.lower(): value for name, value in query.items() if _is_signed(name.lower())}
    return hoisted | {name: value for name, value in head.headers.items() if _is_signed(name)}


def _is_signed(name: str) -> bool:
    return name.startswith("x-amz-") or name in {"content-md5", "content-type"}


def _strings_to_sign(claim: OldClaim, head: RequestHead) -> Iterator[str]:
    """The strings of one meaning: clients differ in how they escape the path and write an empty value."""
    query = read_query(head.raw_query).values
    headers = signed_headers(head, query)
    lines = [head.method, headers.get("content-md5", ""), headers.get("content-type", ""), str(claim.expires)]
    lines += [f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-amz-")]
    paths = dict.fromkeys(_paths(head))
    named = sorted((name, value) for name, value in query.items() if name in _SIGNED_RESOURCES)
    resources = dict.fromkeys(_resource(named, bare=bare) for bare in (True, False))
    for path, resource in product(paths, resources):
        yield "\n".join([*lines, f"{path}{resource}"])


def _paths(head: RequestHead) -> Iterator[str]:
    """With the bucket, wherever it was named; botocore signs `/bucket/` and sends `/bucket`."""
    bucket = f"/{head.host_bucket}" if head.host_bucket else ""
    for path in (head.raw_path, percents.encode_path(head.raw_path)):
        yield bucket + path
        if "/" not in (bucket + path)[1:]:
            yield f"{bucket}{path}/"


def _resource(named: list[tuple[str, str]], *, bare: bool) -> str:
    """The sub-resources, decoded; `bare`: without the `=` of an empty value."""
    pieces = [name if bare and not value else f"{name}={value}" for name, value in named]
    return f"?{'&'.join(pieces)}" if pieces else ""


def _mismatch(claim: OldClaim, text: str) -> S3Error:
    """As S3 does, say what was signed here; a session token is kept out of it."""
    extra = {"AWSAccessKeyId": claim.access_key[:128], "SignatureProvided": claim.signature[:128]}
    if claim.session_token is None:
        extra["StringToSign"] = text
    return S3Error("SignatureDoesNotMatch", extra=extra)


def _expiry(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise S3Error("AccessDenied", f"Invalid date (should be seconds since epoch): {text[:64]}")
    return int(text)


def _refuse_expired(claim: OldClaim, now: int) -> NoReturn:
    raise S3Error(
        "AccessDenied",
        "Request has expired",
        extra={
            "Expires": httpdates.format_iso(claim.expires * 1000),
            "ServerTime": httpdates.format_iso(now * 1000),
        },
    )
