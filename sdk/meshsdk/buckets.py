"""Buckets with origins, or with a number of copies of their own, as the node's `/-/buckets` has them.

Law: asks and reads; every answer becomes a frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from meshsdk.transport import Request, json_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.transport import Transport

_PREFIX: Final = "/-/buckets/"


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """`origin`: the fields of `meshwire.origins.Origin`, None for a bucket that lives here: then there are
    `copies` of what is in it, and `wanted` are to be."""

    name: str
    created_ms: int
    origin: Mapping[str, Any] | None
    copies: int = 1
    wanted: int = 1


def create_bucket(transport: Transport, name: str, document: Mapping[str, Any]) -> BucketInfo:
    """Make a bucket stand for an origin (`url` and more), or keep so many `copies`. Raises MeshError."""
    return _info(_sent(transport, "PUT", name, document))


def change_bucket(transport: Transport, name: str, changes: Mapping[str, Any]) -> BucketInfo:
    """Change fields of its origin, or its `copies`. Raises MeshError."""
    return _info(_sent(transport, "PATCH", name, changes))


def show_bucket(transport: Transport, name: str) -> BucketInfo:
    """One bucket. Raises MeshError."""
    return _info(transport.json(Request("GET", _path(name))))


def list_buckets(transport: Transport) -> Sequence[BucketInfo]:
    """All of them. Raises MeshError."""
    return [_info(found) for found in transport.json(Request("GET", _PREFIX.rstrip("/")))["buckets"]]


def _sent(transport: Transport, method: str, name: str, document: Mapping[str, Any]) -> Any:
    return transport.json(json_request(method, _path(name), dict(document)))


def _path(name: str) -> str:
    return _PREFIX + quote(name, safe="")


def _info(found: Any) -> BucketInfo:
    copies = found.get("copies", 1)
    return BucketInfo(
        found["name"], found["created_ms"], found["origin"], copies, found.get("wanted", copies)
    )
