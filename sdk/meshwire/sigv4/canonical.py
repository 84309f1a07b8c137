"""Canonical requests: the text both ends hash.

Law: the path and query are taken as sent, since clients differ in which characters they encode, and only then
re-encoded as the SigV4 text asks. Every variant describes the same decoded request, so trying them forges
nothing.
"""

from __future__ import annotations

import hashlib
from itertools import product
from typing import TYPE_CHECKING

from meshwire import percents
from meshwire.sigv4.keys import hmac_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from meshwire.s3.parsing import RequestHead

ALGORITHM = "AWS4-HMAC-SHA256"


def canonical_request(head: RequestHead, signed: tuple[str, ...], payload_hash: str) -> str:
    """The canonical request with path and query as sent."""
    query = _query_as_sent(head.raw_query) if head.raw_query else ""
    block = _published_headers(head.headers, signed)
    return _join(head.method, head.raw_path, query, block, signed, payload_hash)


def variants(head: RequestHead, signed: tuple[str, ...], payload_hash: str) -> Iterator[str]:
    """Other canonical requests of the same meaning, for clients that sign one spelling and send another.

    Raises PercentError.
    """
    paths = _distinct(head.raw_path, percents.encode_path(head.raw_path))
    queries = _distinct(_query_as_sent(head.raw_query), _query_encoded(head.raw_query))
    headers = _distinct(
        *(_headers(head.headers, signed, rule) for rule in (_collapse, str.strip, _collapse_all))
    )
    for path, query, block in product(paths, queries, headers):
        yield _join(head.method, path, query, block, signed, payload_hash)


def string_to_sign(canonical: str, timestamp: str, scope: str) -> str:
    digest = hashlib.sha256(percents.to_bytes(canonical)).hexdigest()
    return f"{ALGORITHM}\n{timestamp}\n{scope}\n{digest}"


def signature(key: bytes, canonical: str, timestamp: str, scope: str) -> str:
    """Hexadecimal signature of a canonical request. Raises PercentError for text that never was bytes."""
    return hmac_sha256(key, percents.to_bytes(string_to_sign(canonical, timestamp, scope))).hex()


def _join(
    method: str, path: str, query: str, headers: str, signed: tuple[str, ...], payload_hash: str
) -> str:
    return f"{method}\n{path}\n{query}\n{headers}\n{';'.join(signed)}\n{payload_hash}"


def _headers(headers: Mapping[str, str], signed: tuple[str, ...], rule: Callable[[str], str]) -> str:
    return "".join([f"{name}:{rule(headers.get(name, ''))}\n" for name in signed])


def _published_headers(headers: Mapping[str, str], signed: tuple[str, ...]) -> str:
    """`_headers` by the published rule; a run of spaces anywhere is rare enough to look for once."""
    get = headers.get
    block = "".join([f"{name}:{get(name, '').strip()}\n" for name in signed])
    return _headers(headers, signed, _collapse) if "  " in block else block


def _collapse(value: str) -> str:
    """Trimmed, runs of spaces as one: the published rule."""
    if "  " in value:
        return " ".join(filter(None, value.split(" ")))
    return value.strip()


def _collapse_all(value: str) -> str:
    """As botocore does it: any white space counts."""
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
        (percents.encode(name), percents.encode(value))
        for name, value in percents.split_query(raw_query)
        if name != "X-Amz-Signature"
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def _distinct(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
