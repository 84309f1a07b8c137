"""Routing: the cluster map behind an endpoint, failing endpoints, and the choice of node for a request.

Law: routing is a preference, never a condition, because every node answers every request. Objects go to
their replicas by the map, frames to the node their address hashes to. A single-node endpoint is never
asked for a map; the first `x-mesh-map` header, several configured endpoints or a failure reveals the
others. Thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from meshsdk.client.settings import parse_endpoint
from meshsdk.errors import MeshError
from meshwire.cluster import parse_map, routes
from meshwire.cluster.routes import batch_nodes, rendezvous_order
from meshwire.http_values import percent_encoding
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.settings import Endpoint
    from meshsdk.client.transport import Request
    from meshwire.cluster import ClusterMap, Node


_log = logging.getLogger("meshsdk")
MAP_HEADER: Final = "x-mesh-map"
SHUNNED: Final = 5.0
"""Seconds for which an endpoint that failed is asked last."""
_OFTEN: Final = 1.0  # seconds between two questions for the map; more after each that nobody answered
_SELDOM: Final = 30.0
_REACHABLE_STATES: Final = ("up", "draining", "joining", "returning")


class ClusterDirectory:
    """Configured endpoints and the nodes behind them. `ask` gives the body of `GET /-/map` of an endpoint."""

    def __init__(self, configured: tuple[Endpoint, ...], ask: Callable[[Endpoint], bytes]) -> None:
        self.configured = configured
        self._ask = ask
        self._map: ClusterMap | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._failed: dict[Endpoint, float] = {}
        self._again = 0.0
        self._pause = _OFTEN
        self._told = False
        self._version = 0
        self._wanted = 0 if len(configured) == 1 else 1
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        known = "no map" if self._map is None else f"map {self._map.version}"
        return f"Directory({', '.join(map(str, self.configured))}; {known})"

    @property
    def map(self) -> ClusterMap | None:
        """The newest map known, None where there is one node, or none is known."""
        return self._map

    def record_version(self, version: str) -> None:
        """An answer said by which map its node goes (its `x-mesh-map`)."""
        if version.isascii() and version.isdigit():
            self._wanted = max(self._wanted, int(version))

    def current(self) -> ClusterMap | None:
        """The map, asked for anew first when a newer one was heard of."""
        if self._wanted > self._version:
            self.refresh()
        return self._map

    def refresh(self) -> None:
        """Ask for the map, unless that was done a moment ago. Never raises: without an answer the last map
        stays."""
        if time.monotonic() < self._again or not self._lock.acquire(blocking=False):
            return
        try:
            self._refresh()
        finally:
            self._again = time.monotonic() + self._pause
            self._lock.release()

    def _refresh(self) -> None:
        for endpoint in self._everybody():
            try:
                self._take(json.loads(self._ask(endpoint))["map"])
            except (PlanError, KeyError, TypeError) as error:
                self._not_understood(endpoint, error)
            except (MeshError, ValueError) as error:
                _log.debug("no map from %s: %s", endpoint, error)
            else:
                self._pause = _OFTEN
                return
        self._pause = min(2 * self._pause, _SELDOM)

    def _not_understood(self, endpoint: Endpoint, error: Exception) -> None:
        """Told once: everything works without a map, but by way of fewer nodes."""
        _log.log(
            logging.DEBUG if self._told else logging.WARNING,
            "the map of %s is not understood (%s) and not followed: upgrade shardmesh here to the release of "
            "the nodes",
            endpoint,
            error,
        )
        self._told = True

    def _take(self, document: dict[str, object]) -> None:
        found = parse_map(document)
        bundle = self.configured[0].ca_bundle
        self._endpoints = {node.node_id: parse_endpoint(node.endpoint, bundle) for node in found.nodes}
        self._map = found if len(found.nodes) > 1 else None
        self._version = self._wanted = found.version

    def _everybody(self) -> list[Endpoint]:
        """Whom to ask: who did not fail lately first."""
        serving = [node for node in self._map.nodes if node.state in _REACHABLE_STATES] if self._map else []
        known = [*self.configured, *(self._endpoints[node.node_id] for node in serving)]
        return sorted(dict.fromkeys(known), key=self.is_shunned)

    def endpoint(self, node: Node) -> Endpoint:
        """Where a node of the map is."""
        return self._endpoints[node.node_id]

    def state(self, endpoint: Endpoint) -> str:
        """Of the node at an endpoint, by the map; "" where the map does not say."""
        if self._map is None:
            return ""
        return next((node.state for node in self._map.nodes if self._endpoints[node.node_id] == endpoint), "")

    # --- what fails -----------------------------------------------------------------------------------

    def mark_failed(self, endpoint: Endpoint) -> None:
        """It did not answer, or not to the end."""
        self._failed[endpoint] = time.monotonic()

    def mark_working(self, endpoint: Endpoint) -> None:
        """It answered."""
        if self._failed:
            self._failed.pop(endpoint, None)

    def is_shunned(self, endpoint: Endpoint) -> bool:
        """Whether it failed lately."""
        when = self._failed.get(endpoint)
        return when is not None and time.monotonic() - when < SHUNNED


RACK_VARIABLE = "MESH_RACK"
_SERVING_STATES = ("up", "draining")


class Router:
    """One a transport."""

    def __init__(self, directory: ClusterDirectory) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Router({self.directory!r})"

    def choose_endpoint(self, request: Request, tried: set[Endpoint]) -> Endpoint:
        """Whom to ask next; of those `tried` nobody as long as there are others."""
        found = self.candidates(request)
        return next((endpoint for endpoint in found if endpoint not in tried), found[0])

    def has_untried(self, request: Request, tried: set[Endpoint]) -> bool:
        """Whether there is somebody to ask who was not."""
        return any(endpoint not in tried for endpoint in self.candidates(request))

    def candidates(self, request: Request) -> list[Endpoint]:
        """Everybody who may be asked, best first; who failed lately comes last."""
        directory = self.directory
        cluster = directory.current()
        if cluster is None:
            found = list(directory.configured)
        else:
            known = [directory.endpoint(node) for node in _in_order(cluster, request)]
            found = list(dict.fromkeys([*known, *directory.configured]))
        return sorted(found, key=directory.is_shunned) if len(found) > 1 else found


def _in_order(cluster: ClusterMap, request: Request) -> list[Node]:
    """Nodes that answer, those first that need ask nobody else."""
    serving = [node for node in cluster.nodes if node.state in _SERVING_STATES]
    near = near_caches(cluster)
    if request.toward:
        first = [node for node in serving if node.node_id == request.toward]
    elif request.meets:
        first = list(rendezvous_order(near or batch_nodes(cluster), request.meets))
    else:
        first = _replica_nodes(cluster, request)
        if (request.method in ("GET", "HEAD") and first) or request.path == "/-/gather":
            first = [*near, *first]
    rest = rendezvous_order(tuple(serving), request.path)
    return list(dict.fromkeys([*first, *rest]))


def _replica_nodes(cluster: ClusterMap, request: Request) -> list[Node]:
    bucket, _, key = request.path[1:].partition("/")
    if not key or bucket == "-" or "--" in bucket:
        return []
    route = routes(cluster, cluster.copies).route_of_key(
        percent_encoding.decode(bucket), percent_encoding.decode(key)
    )
    if request.method in ("GET", "HEAD"):
        return list(route.read_set)
    return [] if route.primary is None else [route.primary]


def replica_node(cluster: ClusterMap, bucket: str, key: str) -> Node | None:
    """Who is asked first for an object."""
    readers = routes(cluster, cluster.copies).route_of_key(bucket, key).read_set
    return readers[0] if readers else None


@lru_cache(maxsize=4)
def near_caches(cluster: ClusterMap) -> tuple[Node, ...]:
    """Nodes that only cache (they own nothing) on this host, else on this rack (MESH_RACK)."""
    caches = [
        node
        for node in cluster.nodes
        if "cache" in node.roles and not node.stores and node.state in _SERVING_STATES
    ]
    if not caches:
        return ()
    own = _own_names()
    here = tuple(node for node in caches if _host(node) in own)
    rack = os.environ.get(RACK_VARIABLE, "")
    return here or tuple(node for node in caches if rack and node.rack == rack)


def _host(node: Node) -> str:
    return node.endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    name = socket.gethostname()
    names = {name, name.partition(".")[0], "localhost", "127.0.0.1", "::1"}
    with contextlib.suppress(OSError):
        names |= {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return frozenset(names)
