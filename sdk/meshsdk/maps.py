"""What the SDK knows of the mesh behind its endpoint: the cluster map, and which endpoints fail now.

Law: nothing is asked of a lone node; that there are more is learned from the first answer that says so
(`x-mesh-map`), from several configured endpoints, or when an endpoint fails. Advice only: what cannot be
routed goes to an endpoint that was configured. Thread-safe.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from meshsdk.errors import MeshError
from meshsdk.settings import parse_endpoint
from meshwire.cluster import parse_map
from meshwire.documents import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.settings import Endpoint
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshsdk")
MAP_HEADER: Final = "x-mesh-map"
SHUNNED: Final = 5.0
"""Seconds for which an endpoint that failed is asked last."""
_OFTEN: Final = 1.0  # seconds between two questions for the map; more after each that nobody answered
_SELDOM: Final = 30.0
_SERVING: Final = ("up", "draining", "joining", "returning")


class Directory:
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

    def heard(self, version: str) -> None:
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
        serving = [node for node in self._map.nodes if node.state in _SERVING] if self._map else []
        known = [*self.configured, *(self._endpoints[node.node_id] for node in serving)]
        return sorted(dict.fromkeys(known), key=self.shunned)

    def endpoint(self, node: Node) -> Endpoint:
        """Where a node of the map is."""
        return self._endpoints[node.node_id]

    def state(self, endpoint: Endpoint) -> str:
        """Of the node at an endpoint, by the map; "" where the map does not say."""
        if self._map is None:
            return ""
        return next((node.state for node in self._map.nodes if self._endpoints[node.node_id] == endpoint), "")

    # --- what fails -----------------------------------------------------------------------------------

    def failed(self, endpoint: Endpoint) -> None:
        """It did not answer, or not to the end."""
        self._failed[endpoint] = time.monotonic()

    def worked(self, endpoint: Endpoint) -> None:
        """It answered."""
        if self._failed:
            self._failed.pop(endpoint, None)

    def shunned(self, endpoint: Endpoint) -> bool:
        """Whether it failed lately."""
        when = self._failed.get(endpoint)
        return when is not None and time.monotonic() - when < SHUNNED
