"""Signing requests: the client's end.

Law: the caller has encoded path and query already; they are signed as they will be sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshwire import httpdates, percents
from meshwire.s3.requestheads import RequestHead
from meshwire.sigv4 import canonical
from meshwire.sigv4.claims import MAX_EXPIRES, UNSIGNED_PAYLOAD, Scope
from meshwire.sigv4.keys import signing_key

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: Mapping[str, str] = MappingProxyType({})
_SIGNED = frozenset(
    {"host", "content-type", "content-md5", "range", "if-match", "if-none-match", "x-mesh-map"}
)


@dataclass(frozen=True, slots=True)
class Credential:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def sign(
    head: RequestHead,
    credential: Credential,
    *,
    region: str,
    service: str = "s3",
    timestamp: datetime | int,
    payload_hash: str,
) -> dict[str, str]:
    """Headers to add to a request: x-amz-date, x-amz-content-sha256, authorization (and the session token).

    `head.headers` must hold `host` and everything that goes out under x-amz-*; `timestamp` is in seconds, or
    aware.
    """
    stamp = _stamp(timestamp)
    added = {"x-amz-date": stamp, "x-amz-content-sha256": payload_hash}
    if credential.session_token is not None:
        added["x-amz-security-token"] = credential.session_token
    headers = {**head.headers, **added}
    signed = tuple(sorted(name for name in headers if name in _SIGNED or name.startswith("x-amz-")))
    scope = Scope(stamp[:8], region, service)
    request = RequestHead(head.method, head.raw_path, head.raw_query, headers)
    signature = _sign(request, credential, scope, signed, stamp, payload_hash)
    added["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential.access_key}/{scope}, "
        f"SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
    return added


def presign(
    method: str,
    url: str,
    credential: Credential,
    *,
    region: str,
    expires: int,
    timestamp: datetime | int,
    headers: Mapping[str, str] = _NOTHING,
    service: str = "s3",
) -> str:
    """`url` with a signature in its query, good for `expires` seconds from `timestamp`.

    `url` is encoded already; `headers` (lower-case) must then be sent with exactly these values. Raises
    ValueError for an expiry outside 1–604,800 s.
    """
    if not 1 <= expires <= MAX_EXPIRES:
        raise ValueError(f"a presigned URL lives 1 to {MAX_EXPIRES} seconds, not {expires}")
    parts = urlsplit(url)
    stamp = _stamp(timestamp)
    scope = Scope(stamp[:8], region, service)
    wire_headers = {"host": parts.netloc.rpartition("@")[2], **headers}
    signed = tuple(sorted(wire_headers))
    query = _presigned_query(parts.query, credential, scope, stamp, expires, signed)
    head = RequestHead(method, parts.path or "/", query, wire_headers)
    signature = _sign(head, credential, scope, signed, stamp, UNSIGNED_PAYLOAD)
    return f"{parts.scheme}://{parts.netloc}{parts.path or '/'}?{query}&X-Amz-Signature={signature}"


def _presigned_query(
    query: str, credential: Credential, scope: Scope, stamp: str, expires: int, signed: tuple[str, ...]
) -> str:
    fields = {
        "X-Amz-Algorithm": canonical.ALGORITHM,
        "X-Amz-Credential": f"{credential.access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(expires),
        "X-Amz-SignedHeaders": ";".join(signed),
    }
    if credential.session_token is not None:
        fields["X-Amz-Security-Token"] = credential.session_token
    encoded = "&".join(f"{name}={percents.encode(value)}" for name, value in fields.items())
    return f"{query}&{encoded}" if query else encoded


def _sign(
    head: RequestHead,
    credential: Credential,
    scope: Scope,
    signed: tuple[str, ...],
    stamp: str,
    payload_hash: str,
) -> str:
    key = signing_key(credential.secret_key, scope.date, scope.region, scope.service)
    request = canonical.canonical_request(head, signed, payload_hash)
    return canonical.signature(key, request, stamp, str(scope))


def _stamp(timestamp: datetime | int) -> str:
    seconds = int(timestamp.timestamp()) if isinstance(timestamp, datetime) else timestamp
    return httpdates.format_amz(seconds)
