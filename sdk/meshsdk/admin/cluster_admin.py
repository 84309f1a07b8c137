"""Cluster administration: node states, buckets with origins or copy counts, and node metrics.

Law: the server decides whether a change is allowed; responses become frozen values. `/metrics` is read
once, unsigned, and unreadable lines are skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from meshsdk.client.http_connection import Connection
from meshsdk.client.request import Request, json_request
from meshsdk.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshsdk.client.settings import Endpoint
    from meshsdk.client.transport import Transport


def cluster_status(transport: Transport) -> dict[str, Any]:
    """Return the document of `GET /-/cluster`. Raises ServerError (AccessDenied: root only)."""
    answer: dict[str, Any] = transport.json(Request("GET", "/-/cluster"))
    return answer


def change_node(transport: Transport, node_id: str, action: str, **rest: Any) -> dict[str, Any]:
    """Apply an action such as "drain" to a node, and return its state afterwards. Raises ServerError with
    the reason of a rejection."""
    place = f"/-/cluster/nodes/{quote(node_id, safe='')}"
    answer: dict[str, Any] = transport.json(json_request("POST", place, {"action": action, **rest}))
    return answer


def split_slots(transport: Transport, slots: int) -> dict[str, Any]:
    """Split the slots of the cluster map until there are so many. Raises ServerError with the reason of a
    rejection."""
    answer: dict[str, Any] = transport.json(json_request("POST", "/-/cluster/slots", {"slots": slots}))
    return answer


_PREFIX: Final = "/-/buckets/"


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """A bucket. `origin`: the fields of `meshwire.origin.Origin`, or None for a bucket stored in the mesh,
    which has `copies` of each object; `wanted` is the target number. `decoded_quota`: bytes that results of
    its samples may take in each node's decoded cache, None without a quota."""

    name: str
    created_ms: int
    origin: Mapping[str, Any] | None
    copies: int = 1
    wanted: int = 1
    decoded_quota: int | None = None


def create_bucket(transport: Transport, name: str, document: Mapping[str, Any]) -> BucketInfo:
    """Create a bucket with an origin (`url` and more) or a number of `copies`. Raises MeshError."""
    return _info(_send(transport, "PUT", name, document))


def change_bucket(transport: Transport, name: str, changes: Mapping[str, Any]) -> BucketInfo:
    """Change fields of the origin, or `copies`; `decoded_quota` (bytes, or None) alone or with them. Raises
    MeshError."""
    return _info(_send(transport, "PATCH", name, changes))


def show_bucket(transport: Transport, name: str) -> BucketInfo:
    """Return one bucket. Raises MeshError."""
    return _info(transport.json(Request("GET", _path(name))))


def list_buckets(transport: Transport) -> Sequence[BucketInfo]:
    """Return all buckets with an origin or a number of copies. Raises MeshError."""
    return [_info(found) for found in transport.json(Request("GET", _PREFIX.rstrip("/")))["buckets"]]


def _send(transport: Transport, method: str, name: str, document: Mapping[str, Any]) -> Any:
    return transport.json(json_request(method, _path(name), dict(document)))


def _path(name: str) -> str:
    return _PREFIX + quote(name, safe="")


def _info(found: Any) -> BucketInfo:
    copies = found.get("copies", 1)
    return BucketInfo(
        found["name"],
        found["created_ms"],
        found["origin"],
        copies,
        found.get("wanted", copies),
        found.get("decoded_quota"),
    )


_LINE: Final = re.compile(r"([a-z_]+)(?:\{([^}]*)\})? ([0-9.e+-]+|NaN|[+-]Inf)")
_LABEL: Final = re.compile(r'([a-z_]+)="([^"]*)"')
_LONGEST: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metric values by name, then by labels: a tuple of (label, value), in order."""

    values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    def sum_of(self, name: str, **labels: str) -> float:
        """Return the sum over all series that have these labels; 0 if there are none."""
        wanted = set(labels.items())
        return sum(value for have, value in self.values.get(name, {}).items() if wanted <= set(have))

    def sum_by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of one label, over all series that have the other labels."""
        found: dict[str, float] = {}
        wanted = set(labels.items())
        for have, value in self.values.get(name, {}).items():
            if not wanted <= set(have):
                continue
            key = dict(have).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def scrape(endpoint: Endpoint, timeout: float = 5.0) -> Scrape:
    """Fetch the current metrics of a node. Raises ConnectError."""
    connection = Connection(endpoint, timeout, timeout)
    try:
        connection.send([f"GET /metrics HTTP/1.1\r\nhost: {endpoint.authority}\r\n\r\n".encode()])
        response = connection.receive()
        if response.status != 200:
            raise ConnectError(
                f"{endpoint} answered {response.status} for /metrics; check that the endpoint is a meshd"
            )
        return parse_metrics(response.read(_LONGEST).decode("utf-8", "replace"))
    finally:
        connection.close()


def parse_metrics(text: str) -> Scrape:
    """Parse Prometheus' text format."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, labels, value in _lines(text):
        values.setdefault(name, {})[labels] = value
    return Scrape(values)


def _lines(text: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            yield found[1], tuple(sorted(_LABEL.findall(found[2] or ""))), float(found[3])
