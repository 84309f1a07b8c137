"""Buckets with origins, as the node's `/-/buckets` has them.

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
    """`origin`: the fields of `meshwire.origins.Origin`."""

    name: str
    created_ms: int
    origin: Mapping[str, Any]


def create_bucket(transport: Transport, name: str, origin: Mapping[str, Any]) -> BucketInfo:
    """Make a bucket stand for an origin. Raises MeshError."""
    return _info(_sent(transport, "PUT", name, origin))


def change_bucket(transport: Transport, name: str, changes: Mapping[str, Any]) -> BucketInfo:
    """Change fields of its origin. Raises MeshError."""
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
    return BucketInfo(found["name"], found["created_ms"], found["origin"])
