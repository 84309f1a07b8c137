"""The server's side of SigV4: parse the claim of a request, then check it against the key and the time.

Law: parsing (`read_claim`) needs neither a secret nor a clock; for `verify` both are arguments, and its
result is what verifying a chunked body needs next, or an S3Error.
Invariant: the scope is for the expected service (`s3`) and ends in `aws4_request`. Any region is accepted,
because the signature covers it. Nothing unsigned is trusted: the host and every `x-amz-*` header must be
signed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hmac import compare_digest
from typing import TYPE_CHECKING, NamedTuple

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.s3.request_head import AuthMechanism, read_auth_mechanism, read_query
from meshwire.sigv4 import signer
from meshwire.sigv4.signer import EMPTY_SHA256, MAX_EXPIRES, UNSIGNED_PAYLOAD, Scope, signing_key

if TYPE_CHECKING:
    from meshwire.s3.parse_request import RequestHead
    from meshwire.s3.request_head import Query

STREAMING_PAYLOADS = frozenset(
    {
        "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    }
)
MAX_SKEW = 900

_PAYLOAD_HASH = re.compile(r"[0-9a-f]{64}\Z")
_SIGNATURE = re.compile(r"[0-9a-fA-F]{64}\Z")
_SIGNED_HEADERS = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+(?:;[!#$%&'*+.^_`|~0-9a-z-]+)*\Z")
_QUERY_FIELDS = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")
_MALFORMED = "AuthorizationHeaderMalformed"
_QUERY_ERROR = "AuthorizationQueryParametersError"
SIGV4_REQUIRED_MESSAGE = (
    "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256 "
    "(signature version s3v4 in most clients)."
)


class Claim(NamedTuple):
    """The unverified signature of a request. `payload_hash` is 64 hexadecimal digits, UNSIGNED-PAYLOAD or
    one of STREAMING_PAYLOADS; `timestamp` is in SigV4's form; `expires` (seconds) is set for presigned
    requests only."""

    access_key: str
    scope: Scope
    signed_headers: tuple[str, ...]
    signature: str
    timestamp: str
    payload_hash: str
    presigned: bool = False
    expires: int | None = None
    session_token: str | None = None


def read_claim(head: RequestHead, *, service: str = "s3", payload_hash: str = "") -> Claim | None:
    """Return the claim of a request, or None if it is anonymous or signed with version 2
    (`meshwire.sigv4.sigv2`). `service`: the one that the scope must name. `payload_hash`: the digest of the
    body, for services whose clients sign it without a header.

    Raises S3Error: AuthorizationHeaderMalformed, AuthorizationQueryParametersError, AccessDenied (no date),
    InvalidArgument (two mechanisms, an unknown one, a bad payload hash, a parameter that is repeated or
    only allowed in a presigned URL), InvalidRequest (no payload hash), InvalidURI.
    """
    if not head.raw_query:
        authorization = head.headers.get("authorization")
        if authorization is None or authorization.startswith("AWS "):
            return None
        return _read_header(head, authorization, service, payload_hash)
    query = read_query(head.raw_query)
    mechanism = read_auth_mechanism(head.headers, query)
    if mechanism is AuthMechanism.PRESIGNED_V4:
        return _read_query(head, query, service)
    if mechanism is not AuthMechanism.HEADER_V4:
        return None
    return _read_header(head, head.headers["authorization"], service, payload_hash)


# --- Authorization header ---------------------------------------------------------------------------


# The form that every SDK sends; anything else (other order, more blanks, errors) is parsed field by field.
_USUAL_HEADER = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^,\s=]+), ?SignedHeaders=([^,\s=]+), ?Signature=([0-9a-f]{64})\Z"
)


def _read_header(head: RequestHead, authorization: str, service: str, payload_hash: str) -> Claim:
    match = _USUAL_HEADER.match(authorization)
    credential, signed, signature = _split_header(authorization) if match is None else match.groups()
    access_key, scope = read_credential(credential, _MALFORMED, service)
    return Claim(
        access_key,
        scope,
        _signed_headers(signed, _MALFORMED),
        signature,
        _header_timestamp(head, scope),
        payload_hash or _header_payload_hash(head),
        session_token=head.headers.get("x-amz-security-token"),
    )


def _split_header(authorization: str) -> tuple[str, str, str]:
    """Return (credential, signed headers, signature) in any order and spacing."""
    mechanism, _, rest = authorization.strip().partition(" ")
    if mechanism != "AWS4-HMAC-SHA256":
        if mechanism.startswith("AWS4-"):
            raise S3Error("InvalidRequest", SIGV4_REQUIRED_MESSAGE)
        raise S3Error("InvalidArgument", "Unsupported Authorization Type")
    fields: dict[str, str] = {}
    for piece in rest.split(","):
        name, equals, value = piece.strip().partition("=")
        if not equals or name in fields:
            raise S3Error(_MALFORMED)
        fields[name] = value
    signature = _field(fields, "Signature")
    if _SIGNATURE.match(signature) is None:
        raise S3Error(
            _MALFORMED, "The authorization header is malformed; the Signature is not 64 hexadecimal digits."
        )
    return _field(fields, "Credential"), _field(fields, "SignedHeaders"), signature


def _field(fields: dict[str, str], name: str) -> str:
    value = fields.get(name)
    if not value:
        raise S3Error(_MALFORMED, f"The authorization header is malformed; missing {name}.")
    return value


def _header_timestamp(head: RequestHead, scope: Scope) -> str:
    timestamp = head.headers.get("x-amz-date")
    if timestamp is None or dates.parse_amz(timestamp) is None:
        # SigV4 also allows an HTTP date in either header.
        seconds = dates.parse_http(timestamp or head.headers.get("date", ""))
        if seconds is None:
            raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
        timestamp = dates.format_amz(seconds)
    if timestamp[:8] != scope.date:
        raise S3Error(
            _MALFORMED,
            f'The authorization header is malformed; Invalid credential date "{scope.date}". This date is '
            f'not the same as X-Amz-Date: "{timestamp[:8]}".',
        )
    return timestamp


def _header_payload_hash(head: RequestHead) -> str:
    value = head.headers.get("x-amz-content-sha256")
    if value == EMPTY_SHA256:
        return value
    if value is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    return read_payload_hash(value)


def read_payload_hash(value: str) -> str:
    """Return `value` if it is a valid x-amz-content-sha256. Raises S3Error InvalidArgument,
    NotImplemented."""
    if value == UNSIGNED_PAYLOAD or _PAYLOAD_HASH.match(value) or value in STREAMING_PAYLOADS:
        return value
    if value.startswith("STREAMING-AWS4-ECDSA-"):
        raise S3Error("NotImplemented", "SigV4A (ECDSA) payloads are not implemented; use AWS4-HMAC-SHA256.")
    raise S3Error(
        "InvalidArgument",
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER, or a valid "
        "sha256 value.",
    )


# --- presigned query ----------------------------------------------------------------------------------


def _read_query(head: RequestHead, query: Query, service: str) -> Claim:
    fields = _query_fields(query)
    if fields["Algorithm"] != "AWS4-HMAC-SHA256":
        raise S3Error(_QUERY_ERROR, 'X-Amz-Algorithm only supports "AWS4-HMAC-SHA256".')
    access_key, scope = read_credential(fields["Credential"], _QUERY_ERROR, service)
    timestamp = fields["Date"]
    if dates.parse_amz(timestamp) is None:
        raise S3Error(_QUERY_ERROR, "X-Amz-Date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"")
    if timestamp[:8] != scope.date:
        raise S3Error(
            _QUERY_ERROR,
            f'Invalid credential date "{scope.date}". This date is not the same as X-Amz-Date: '
            f'"{timestamp[:8]}".',
        )
    if _SIGNATURE.match(fields["Signature"]) is None:
        raise S3Error(_QUERY_ERROR, "X-Amz-Signature must be 64 hexadecimal digits.")
    return Claim(
        access_key,
        scope,
        _signed_headers(fields["SignedHeaders"], _QUERY_ERROR),
        fields["Signature"],
        timestamp,
        read_payload_hash(
            head.headers.get("x-amz-content-sha256") or fields.get("Content-Sha256") or UNSIGNED_PAYLOAD
        ),
        presigned=True,
        expires=_expires(fields["Expires"]),
        session_token=fields.get("Security-Token"),
    )


def _query_fields(query: Query) -> dict[str, str]:
    """Return the X-Amz-* parameters without that prefix."""
    fields = {name[6:]: value for name, value in query.values.items() if name.startswith("X-Amz-")}
    if any(not fields.get(name) for name in _QUERY_FIELDS):
        raise S3Error(
            _QUERY_ERROR,
            "Query-string authentication version 4 requires the X-Amz-Algorithm, X-Amz-Credential, "
            "X-Amz-Signature, X-Amz-Date, X-Amz-SignedHeaders, and X-Amz-Expires parameters.",
        )
    return fields


def _expires(text: str) -> int:
    if not (text.isascii() and text.removeprefix("-").isdigit()) or len(text) > 18:
        raise S3Error(_QUERY_ERROR, "X-Amz-Expires should be a number")
    seconds = int(text)
    if seconds > MAX_EXPIRES:
        raise S3Error(
            _QUERY_ERROR,
            "X-Amz-Expires must be less than a week (in seconds); that is, the given X-Amz-Expires must "
            f"be less than {MAX_EXPIRES} seconds",
        )
    if seconds < 1:
        raise S3Error(_QUERY_ERROR, "X-Amz-Expires must be at least 1 second")
    return seconds


# --- common to both -------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def read_credential(text: str, code: str, expected: str = "s3") -> tuple[str, Scope]:
    pieces = text.rsplit("/", 4)
    if len(pieces) != 5 or not all(pieces):
        raise S3Error(
            code, 'The Credential is malformed; expecting "<YOUR-AKID>/YYYYMMDD/REGION/SERVICE/aws4_request".'
        )
    access_key, date, region, service, terminator = pieces
    if re.fullmatch(r"[0-9]{8}", date) is None:
        raise S3Error(code, f'Invalid credential date format "{date}"; it should be in "yyyyMMdd".')
    if service != expected:
        raise S3Error(
            code,
            f'The Credential is malformed; incorrect service "{service}". This endpoint belongs to '
            f'"{expected}".',
        )
    if terminator != "aws4_request":
        raise S3Error(
            code,
            f'The Credential is malformed; incorrect terminal "{terminator}". This endpoint uses '
            f'"aws4_request".',
        )
    return access_key, Scope(date, region, service)


@lru_cache(maxsize=1024)
def _signed_headers(text: str, code: str) -> tuple[str, ...]:
    if _SIGNED_HEADERS.match(text) is None:
        raise S3Error(code, "SignedHeaders must be lower-case header names separated by semicolons.")
    return tuple(text.split(";"))


# --- verification -----------------------------------------------------------------------------------------


class Verified(NamedTuple):
    """The values that the signatures of a chunked body chain to. `scope` is
    date/region/service/aws4_request."""

    signing_key: bytes
    seed_signature: str
    scope: str
    timestamp: str

    def __repr__(self) -> str:  # never the key
        return f"<Verified {self.scope} {self.timestamp}>"


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
