"""Requests to all other nodes at once: for the counters of each, and for the last entries of its audit log.

A node that does not answer in time is left out of the result, which names it.
Audit entries are merged by time; each node reads the end of its own log, if it has one in a file.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from meshd.errors import MeshdError
from meshd.rpc.peer_rpc import PeerCall, handler
from meshd.telemetry.activity import collect_activity
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.telemetry.activity import ActivityHistory
    from meshd.telemetry.audit_tail import AuditTail
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


Request = TypeVar("Request")
Response = TypeVar("Response")


async def ask_other_nodes(
    mesh: ClusterView,
    peers: PeerClient,
    call: PeerCall[Request, Response],
    request: Request,
    patience: float,
) -> dict[str, Response | None]:
    """Return the answers by node id, of all nodes of the map that are not down; None after `patience`
    seconds, or for an error."""
    others = [
        node for node in mesh.current_map().nodes if node.node_id != mesh.node_id and node.state != "down"
    ]

    async def ask(node: Node) -> Response | None:
        try:
            async with timeout(patience):
                return await peers.call_typed(node, call, request)
        except (MeshdError, TimeoutError, OSError):
            return None

    found = await asyncio.gather(*[ask(node) for node in others])
    return {node.node_id: answer for node, answer in zip(others, found, strict=True)}


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
    ) -> None:
        self._mesh, self._peers, self._history, self._clock = mesh, peers, history, clock
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
                self._own = {"time": self._clock.now_ms(), **await asyncio.to_thread(collect_activity)}
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


_AUDIT_PATIENCE: Final = 3.0
NO_FILE: Final = "its audit log is not a file (set audit-log to a path)"


class AuditRequest(msgspec.Struct, frozen=True):
    """At most `limit` entries, whose line contains a text."""

    limit: int
    containing: str = ""


class AuditEntries(msgspec.Struct, frozen=True):
    """The entries, the latest first; `trouble`: why there are none."""

    entries: list[dict[str, Any]]
    trouble: str = ""


AUDIT: Final = PeerCall("/-/peer/audit", AuditRequest, AuditEntries)


class AuditTrail:
    """Reads this node's audit log, and collects those of the others. One per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, tail: AuditTail) -> None:
        self._mesh, self._peers, self._tail = mesh, peers, tail

    def __repr__(self) -> str:
        return f"<AuditTrail of {self._mesh.node_id}, {self._tail!r}>"

    @handler(AUDIT)
    async def report(self, request: AuditRequest, call: CallContext) -> AuditEntries:
        """Answer another node."""
        return await self._of_this_node(request)

    async def _of_this_node(self, request: AuditRequest) -> AuditEntries:
        if not self._tail.is_readable:
            return AuditEntries([], NO_FILE)
        try:
            return AuditEntries(await asyncio.to_thread(self._tail.read, request.limit, request.containing))
        except OSError as error:
            return AuditEntries([], f"its audit log cannot be read: {error.strerror}")

    async def of_all_nodes(self, limit: int, containing: str) -> dict[str, Any]:
        """Return `node` (the one that answers), `entries` (the latest first, each with its `node`), and
        `missing` (why, by the ids of the nodes whose entries are not among them)."""
        request = AuditRequest(limit, containing)
        own, found = await asyncio.gather(
            self._of_this_node(request),
            ask_other_nodes(self._mesh, self._peers, AUDIT, request, _AUDIT_PATIENCE),
        )
        entries, missing = list[dict[str, Any]](), dict[str, str]()
        for node, answer in [(self._mesh.node_id, own), *found.items()]:
            if answer is None or answer.trouble:
                missing[node] = "it does not answer" if answer is None else answer.trouble
            else:
                entries += [{**entry, "node": node} for entry in answer.entries]
        entries.sort(key=lambda entry: str(entry.get("time", "")), reverse=True)
        return {"node": self._mesh.node_id, "entries": entries[:limit], "missing": missing}
