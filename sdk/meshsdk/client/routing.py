"""Routing: the cluster map behind an endpoint, failing endpoints, and the choice of node for a request.

Law: routing only saves hops; it is never needed for correctness, because every node answers every request.
Requests for objects go to their replicas by the cluster map, requests for frames to the node that their
address hashes to. The map is requested after the first `x-mesh-map` header, after a failure, or if several
endpoints are configured; a single-node endpoint is never asked for one. Thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from meshsdk.client.fork_safe_lock import ForkSafeLock
from meshsdk.client.settings import parse_endpoint
from meshsdk.errors import ConnectError, MeshError, is_clock_skewed
from meshwire.cluster import parse_map, routes
from meshwire.cluster.routes import batch_nodes, rendezvous_order
from meshwire.http_values import percent_encoding
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.request import Request
    from meshsdk.client.settings import Endpoint
    from meshwire.cluster import ClusterMap, Node


_log = logging.getLogger("meshsdk")
MAP_HEADER: Final = "x-mesh-map"
SHUNNED: Final = 5.0
"""Seconds for which an endpoint is tried last after a failure."""
_OFTEN: Final = 1.0  # seconds between two requests for the map; doubled after each one that failed
_SELDOM: Final = 30.0  # the longest such pause
_MAX_DIGITS: Final = 18  # of a version
_REACHABLE_STATES: Final = ("up", "draining", "joining", "returning")


class ClusterDirectory:
    """The configured endpoints, and the nodes of the mesh behind them.

    `ask` returns the body of `GET /-/map` from an endpoint.
    """

    def __init__(self, configured: tuple[Endpoint, ...], ask: Callable[[Endpoint], bytes]) -> None:
        self.configured = configured
        self._ask = ask
        self._map: ClusterMap | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._failed: dict[Endpoint, float] = {}
        self._heard: dict[Endpoint, float] = {}
        self._again = 0.0
        self._pause = _OFTEN
        self._told = False
        self._version = 0
        self._wanted = 0 if len(configured) == 1 else 1
        self._lock = ForkSafeLock()

    def __repr__(self) -> str:
        known = "no map" if self._map is None else f"map {self._map.version}"
        return f"ClusterDirectory({', '.join(map(str, self.configured))}; {known})"

    @property
    def map(self) -> ClusterMap | None:
        """The newest known cluster map; None if there is a single node or no map is known."""
        return self._map

    @property
    def has_several(self) -> bool:
        """Whether more than one endpoint is known."""
        return self._map is not None or len(self.configured) > 1

    def record_version(self, version: str) -> None:
        """Record the map version that a node reported in `x-mesh-map`."""
        if version.isascii() and version.isdigit() and len(version) <= _MAX_DIGITS:
            self._wanted = max(self._wanted, int(version))

    def current(self) -> ClusterMap | None:
        """Return the map, after a refresh if a node reported a newer version."""
        if self._wanted > self._version:
            self.refresh()
        return self._map

    def refresh(self) -> None:
        """Request the map, unless that was done a moment ago.

        Never raises: without an answer the last map stays in use.
        """
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
            except (PlanError, KeyError, TypeError, RecursionError) as error:
                self._not_understood(endpoint, error)
            except (MeshError, ValueError) as error:
                _log.debug("no map from %s: %s", endpoint, error)
                if isinstance(error, ConnectError):
                    self.mark_failed(endpoint)
            else:
                self._pause = _OFTEN
                return
        self._pause = min(2 * self._pause, _SELDOM)

    def _not_understood(self, endpoint: Endpoint, error: Exception) -> None:
        """Warn once: without a map everything works, but requests use fewer nodes."""
        _log.log(
            logging.DEBUG if self._told else logging.WARNING,
            "ignoring the cluster map of %s, which this SDK cannot parse (%s): upgrade shardmesh on this "
            "machine to the release of the nodes",
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
        """Return all known endpoints; those that failed recently come last."""
        nodes = () if (known_map := self._map) is None else known_map.nodes
        serving = [node for node in nodes if node.state in _REACHABLE_STATES]
        known = [*self.configured, *map(self.endpoint, serving)]
        return sorted(dict.fromkeys(known), key=self.is_shunned)

    def endpoint(self, node: Node) -> Endpoint:
        """Return the endpoint of a node of this map or an earlier one: another thread may have taken over a
        map that lacks it."""
        known = self._endpoints.get(node.node_id)
        return known or parse_endpoint(node.endpoint, self.configured[0].ca_bundle)

    def state(self, endpoint: Endpoint) -> str:
        """Return the map's state of the node at an endpoint; "" if the map does not list it."""
        nodes = () if (known := self._map) is None else known.nodes
        return next((node.state for node in nodes if self.endpoint(node) == endpoint), "")

    # --- failures -------------------------------------------------------------------------------------

    def mark_failed(self, endpoint: Endpoint) -> None:
        """Record that an endpoint did not answer, or broke off its answer."""
        self._failed[endpoint] = time.monotonic()

    def mark_working(self, endpoint: Endpoint) -> None:
        """Record that an endpoint answered."""
        self._heard[endpoint] = time.monotonic()
        if self._failed:
            self._failed.pop(endpoint, None)

    def heard_within(self, endpoint: Endpoint, seconds: float) -> bool:
        """Return whether an endpoint answered a request within the last `seconds`."""
        when = self._heard.get(endpoint)
        return when is not None and time.monotonic() - when < seconds

    def is_shunned(self, endpoint: Endpoint) -> bool:
        """Return whether an endpoint failed within the last `SHUNNED` seconds."""
        when = self._failed.get(endpoint)
        return when is not None and time.monotonic() - when < SHUNNED


RACK_VARIABLE = "MESH_RACK"
_SERVING_STATES = ("up", "draining")


class Router:
    """Chooses the endpoint for each request of a transport."""

    def __init__(self, directory: ClusterDirectory) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Router({self.directory!r})"

    def choose_endpoint(self, request: Request, tried: set[Endpoint]) -> Endpoint:
        """Return the endpoint to try next: the best untried one, else the best of all."""
        found = self.candidates(request)
        return next((endpoint for endpoint in found if endpoint not in tried), found[0])

    def has_untried(self, request: Request, tried: set[Endpoint]) -> bool:
        """Return whether an endpoint is left that is not in `tried`."""
        return any(endpoint not in tried for endpoint in self.candidates(request))

    def candidates(self, request: Request) -> list[Endpoint]:
        """Return all endpoints for a request, best first; those that failed recently come last."""
        directory = self.directory
        cluster = directory.current()
        if cluster is None:
            found = list(directory.configured)
        else:
            known = [directory.endpoint(node) for node in _in_order(cluster, request)]
            found = list(dict.fromkeys([*known, *directory.configured]))
        return sorted(found, key=directory.is_shunned) if len(found) > 1 else found


def mark_failed(
    router: Router, request: Request, tried: set[Endpoint], endpoint: Endpoint | None, error: MeshError
) -> bool:
    """Record a failed endpoint in `tried`, and return whether to try another node at once.

    A refusal because of clock skew counts as such a failure: the node's clock may be the wrong one, so every
    node is tried once.
    """
    if endpoint is None or not (isinstance(error, ConnectError) or is_clock_skewed(error)):
        return False
    tried.add(endpoint)
    router.directory.mark_failed(endpoint)
    if router.directory.has_several:
        router.directory.refresh()
    return router.has_untried(request, tried)


def _in_order(cluster: ClusterMap, request: Request) -> list[Node]:
    """Return the serving nodes; those that can answer without asking another node come first."""
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
    """Return the preferred node for reading an object, or None if no node owns it."""
    readers = routes(cluster, cluster.copies).route_of_key(bucket, key).read_set
    return readers[0] if readers else None


@lru_cache(maxsize=4)
def near_caches(cluster: ClusterMap) -> tuple[Node, ...]:
    """Return the cache-only nodes (they own no data) on this host, else those in this rack (MESH_RACK)."""
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
