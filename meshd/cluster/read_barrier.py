"""Read barrier: confirms that this node's cluster map is current before it serves reads or accepts writes.

Law: while the node holds its lease and has seen the newest map since it acquired it, the map is
current; no node is removed from the map for silence before its lease runs out. Otherwise the node asks
the other owners of the name for their map version; without an answer from one of them it accepts no
write. The only owner that is available by its map asks no other node: a returning owner compares with
it first. Invariant: an answer counts only for callers that waited before the question was sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.cluster.peer_checks import probe_map_version
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

ANSWER_VALID_SECONDS: Final = 1.0
"""Seconds for which the owners' answers suffice to act as primary. A node is removed from the map only after
a probe that waits longer (`peer_checks.PROBE_TIMEOUT`). So an owner that answered is not removed within this
time, even if it has been suspended since."""
_TIMEOUT: Final = 5.0
_PAUSE: Final = 0.3


class ReadBarrier:
    """Confirms that the map is current. One per process."""

    def __init__(
        self,
        mesh: ClusterView,
        clock: Clock,
        ask: Callable[[Node], Awaitable[int | None]] = probe_map_version,
    ) -> None:
        self._mesh, self._clock, self._ask = mesh, clock, ask
        self._in_flight: dict[str, asyncio.Task[int | None]] = {}
        self._next: dict[str, asyncio.Task[int | None]] = {}

    def __repr__(self) -> str:
        return f"<ReadBarrier of {self._mesh.node_id}: {'open' if self._mesh.lease_valid else 'asks owners'}>"

    async def wait_until_current(self, bucket: str, key: str, max_wait: float = _TIMEOUT) -> str:
        """Waits until this process's map is known to be current for a name. Returns "" then, otherwise the
        reason for the failure, as a phrase about this node."""
        deadline = self._clock.monotonic() + max_wait
        while True:
            version, route = self._mesh.current_map().version, self._mesh.route_for(bucket, key)
            if self._mesh.lease_valid:
                return ""
            others = {node.node_id: node for node in (*route.read_set, *route.write_set)}
            others.pop(self._mesh.node_id, None)
            found = await asyncio.gather(*[self._ask_version(node) for node in others.values()])
            silent = [node_id for node_id, theirs in zip(others, found, strict=True) if theirs is None]
            newest = max((theirs for theirs in found if theirs is not None), default=0)
            newest = max(newest, self._mesh.newest_version)
            metrics.cluster_read_barrier_checks.labels(
                "silent" if silent else "newer" if newest > version else "none"
            ).inc()
            if not silent and newest <= version:
                return ""
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return _reason(silent, dict(zip(others, found, strict=True)), newest)
            await self._mesh.wait_for_newer_map(version, min(left, _PAUSE if silent else 2.0))

    async def _ask_version(self, node: Node) -> int | None:
        """Asks a node for its map version. Callers that wait at the same time share one question, but only
        one sent after they began to wait: an earlier answer may be older than their request."""
        task = self._next.get(node.node_id)
        if task is None:
            before = self._in_flight.get(node.node_id)
            task = self._next[node.node_id] = asyncio.ensure_future(self._ask_after(node, before))
        return await asyncio.shield(task)

    async def _ask_after(self, node: Node, before: asyncio.Task[int | None] | None) -> int | None:
        if before is not None:
            await asyncio.wait((before,))
        task = self._in_flight[node.node_id] = self._next.pop(node.node_id)
        try:
            return await self._ask(node)
        finally:
            if self._in_flight.get(node.node_id) is task:
                del self._in_flight[node.node_id]


def _reason(silent: list[str], versions: Mapping[str, int | None], newest: int) -> str:
    """Returns why the map could not be confirmed, as a phrase about this node."""
    if silent:
        return f"reaches neither the control store nor {', '.join(silent)}"
    another = "another process of this node"
    newer = next((node_id for node_id, version in versions.items() if version == newest), another)
    return f"does not reach the control store, and {newer} uses a newer cluster map ({newest})"
