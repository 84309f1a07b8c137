"""SigV4 signing: canonical requests, signing keys, and the client's `sign` and `presign`.

Law: path and query are signed as sent. Clients differ in which characters they encode, so
`canonical_variants` lists every encoding of the same decoded request; accepting any of them allows no
forgery.
Law: a signing key is valid for one day, region and service; the secret itself is never stored.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshwire.http_values import dates, percent_encoding
from meshwire.s3.request_head import RequestHead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
MAX_EXPIRES = 604_800


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope of a credential. `date` is YYYYMMDD. `str()` returns the credential scope in its signed
    form."""

    date: str
    region: str
    service: str

    def __str__(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/aws4_request"


def hmac_sha256(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


@lru_cache(maxsize=1024)
def signing_key(secret_key: str, date: str, region: str, service: str) -> bytes:
    """Derive SigV4's signing key; `date` is YYYYMMDD."""
    key = hmac_sha256(b"AWS4" + secret_key.encode(), date.encode())
    for text in (region, service, "aws4_request"):
        key = hmac_sha256(key, percent_encoding.to_bytes(text))
    return key


def chunk_signature(key: bytes, timestamp: str, scope: str, previous: str, data_sha256: str) -> str:
    """Return the signature of one chunk of STREAMING-AWS4-HMAC-SHA256-PAYLOAD, chained to the `previous`
    one."""
    text = f"AWS4-HMAC-SHA256-PAYLOAD\n{timestamp}\n{scope}\n{previous}\n{EMPTY_SHA256}\n{data_sha256}"
    return hmac_sha256(key, percent_encoding.to_bytes(text)).hex()


def trailer_signature(key: bytes, timestamp: str, scope: str, previous: str, trailers_sha256: str) -> str:
    """Return the signature of the trailers (`name:value\\n` each) after a signed chunked body."""
    text = f"AWS4-HMAC-SHA256-TRAILER\n{timestamp}\n{scope}\n{previous}\n{trailers_sha256}"
    return hmac_sha256(key, percent_encoding.to_bytes(text)).hex()


ALGORITHM = "AWS4-HMAC-SHA256"
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


def canonical_request(head: RequestHead, signed: tuple[str, ...], payload_hash: str) -> str:
    """Return the canonical request with path and query as sent."""
    query = _query_as_sent(head.raw_query) if head.raw_query else ""
    block = _published_headers(head.headers, signed)
    return f"{head.method}\n{head.raw_path}\n{query}\n{block}\n{';'.join(signed)}\n{payload_hash}"


def canonical_variants(head: RequestHead, signed: tuple[str, ...], payload_hash: str) -> Iterator[str]:
    """Yield other canonical requests with the same meaning, for clients that sign one spelling and send
    another.

    Raises PercentError.
    """
    paths = _distinct(head.raw_path, percent_encoding.encode_path(head.raw_path))
    queries = _distinct(_query_as_sent(head.raw_query), _query_encoded(head.raw_query))
    headers = _distinct(
        *(_headers(head.headers, signed, rule) for rule in (_collapse, str.strip, _collapse_all))
    )
    for path, query, block in product(paths, queries, headers):
        yield _join(head.method, path, query, block, signed, payload_hash)


def string_to_sign(canonical: str, timestamp: str, scope: str) -> str:
    raw = canonical.encode() if canonical.isascii() else percent_encoding.to_bytes(canonical)
    digest = hashlib.sha256(raw).hexdigest()
    return f"{ALGORITHM}\n{timestamp}\n{scope}\n{digest}"


def compute_signature(key: bytes, canonical: str, timestamp: str, scope: str) -> str:
    """Return the hexadecimal signature of a canonical request. Raises PercentError for text that does not
    stand for bytes."""
    states = _keyed_states(key)
    inner, outer = states[0].copy(), states[1].copy()
    text = string_to_sign(canonical, timestamp, scope)
    inner.update(text.encode() if text.isascii() else percent_encoding.to_bytes(text))
    outer.update(inner.digest())
    return outer.hexdigest()


@lru_cache(maxsize=1024)
def _keyed_states(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """Return SHA-256 after the padded key of HMAC, of the inner and the outer hash (RFC 2104 §4): a copy of a
    state costs half of what setting up HMAC does. `key` has at most 64 bytes."""
    padded = key.ljust(64, b"\0")
    return hashlib.sha256(padded.translate(_INNER)), hashlib.sha256(padded.translate(_OUTER))


def _join(
    method: str, path: str, query: str, headers: str, signed: tuple[str, ...], payload_hash: str
) -> str:
    return f"{method}\n{path}\n{query}\n{headers}\n{';'.join(signed)}\n{payload_hash}"


def _headers(headers: Mapping[str, str], signed: tuple[str, ...], rule: Callable[[str], str]) -> str:
    return "".join([f"{name}:{rule(headers.get(name, ''))}\n" for name in signed])


def _published_headers(headers: Mapping[str, str], signed: tuple[str, ...]) -> str:
    """Apply `_headers` with the documented rule; runs of spaces are rare, so search for one only once."""
    get = headers.get
    block = "".join([f"{name}:{get(name, '').strip()}\n" for name in signed])
    return _headers(headers, signed, _collapse) if "  " in block else block


def _collapse(value: str) -> str:
    """Trim, and collapse runs of spaces to one: the documented rule."""
    if "  " in value:
        return " ".join(filter(None, value.split(" ")))
    return value.strip()


def _collapse_all(value: str) -> str:
    """Collapse like botocore, which counts any white space."""
    return " ".join(value.split())


def _query_as_sent(raw_query: str) -> str:
    pairs = []
    for piece in raw_query.split("&"):
        if piece:
            name, _, value = piece.partition("=")
            if name != "X-Amz-Signature":
                pairs.append((name, value))
    pairs.sort()
    return "&".join([f"{name}={value}" for name, value in pairs])


def _query_encoded(raw_query: str) -> str:
    pairs = sorted(
        (percent_encoding.encode(name), percent_encoding.encode(value))
        for name, value in percent_encoding.split_query(raw_query)
        if name != "X-Amz-Signature"
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


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
    """Return the headers to add to a request: x-amz-date, x-amz-content-sha256, authorization (and the
    session token).

    `head.headers` must contain `host` and every x-amz-* header to be sent; `timestamp` is in seconds, or a
    timezone-aware datetime.
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
) -> str:
    """Return `url` with a signature in its query, valid for `expires` seconds from `timestamp`.

    `url` must already be encoded; `headers` (lower-case) must then be sent with exactly these values.
    Raises ValueError for an expiry outside 1–604,800 s.
    """
    if not 1 <= expires <= MAX_EXPIRES:
        raise ValueError(f"a presigned URL can be valid for 1 to {MAX_EXPIRES} seconds, not {expires}")
    parts = urlsplit(url)
    stamp = _stamp(timestamp)
    scope = Scope(stamp[:8], region, "s3")
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
        "X-Amz-Algorithm": ALGORITHM,
        "X-Amz-Credential": f"{credential.access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(expires),
        "X-Amz-SignedHeaders": ";".join(signed),
    }
    if credential.session_token is not None:
        fields["X-Amz-Security-Token"] = credential.session_token
    encoded = "&".join(f"{name}={percent_encoding.encode(value)}" for name, value in fields.items())
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
    request = canonical_request(head, signed, payload_hash)
    return compute_signature(key, request, stamp, str(scope))


def _stamp(timestamp: datetime | int) -> str:
    seconds = int(timestamp.timestamp()) if isinstance(timestamp, datetime) else timestamp
    return dates.format_amz(seconds)
