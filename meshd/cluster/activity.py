"""Activity of all nodes: what each node counts about itself, asked of all of them at once.

A node that does not answer in time is missing from the result and named in it; nothing waits for it longer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.cluster.all_nodes import ask_other_nodes
from meshd.rpc.peer_rpc import PeerCall, handler
from meshd.telemetry.activity import collect_activity

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.telemetry.activity import ActivityHistory
    from meshd.util.clock import Clock

_PATIENCE: Final = 1.5
_FRESH: Final = 1.0  # seconds for which a collected document serves all pages


class ActivityRequest(msgspec.Struct, frozen=True):
    """`history`: whether the last hour is wanted, too."""

    history: bool = False


ACTIVITY: Final = PeerCall("/-/peer/activity", ActivityRequest, dict[str, Any])


class ActivityService:
    """Reports this node's activity, and collects that of the others. One per process."""

    def __init__(
        self,
        mesh: ClusterView,
        peers: PeerClient,
        history: ActivityHistory,
        clock: Clock,
        collect: Callable[[], dict[str, Any]] = collect_activity,
    ) -> None:
        self._mesh, self._peers, self._history, self._clock = mesh, peers, history, clock
        self._collect = collect
        self._own: dict[str, Any] = {}
        self._collected = float("-inf")
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ActivityService of {self._mesh.node_id}>"

    async def of_this_node(self, *, history: bool) -> dict[str, Any]:
        """Return this node's document: `time` in milliseconds since 1970, `totals`, `gauges`, `loaders` and,
        if wanted, `history`."""
        async with self._lock:
            if self._clock.monotonic() - self._collected >= _FRESH:
                self._own = {"time": self._clock.now_ms(), **await asyncio.to_thread(self._collect)}
                self._collected = self._clock.monotonic()
        if history:
            return {**self._own, "history": await asyncio.to_thread(self._history.read)}
        return self._own

    @handler(ACTIVITY)
    async def report(self, request: ActivityRequest, call: CallContext) -> dict[str, Any]:
        """Answer another node."""
        return await self.of_this_node(history=request.history)

    async def of_all_nodes(self, *, history: bool) -> dict[str, Any]:
        """Return `node` (the one that answers), `nodes` (documents by node id), and `silent` (ids of the
        nodes without one)."""
        own, others = await asyncio.gather(
            self.of_this_node(history=history),
            ask_other_nodes(self._mesh, self._peers, ACTIVITY, ActivityRequest(history), _PATIENCE),
        )
        answered = {node: document for node, document in others.items() if document is not None}
        return {
            "node": self._mesh.node_id,
            "nodes": {self._mesh.node_id: own} | answered,
            "silent": [node for node, document in others.items() if document is None],
        }
