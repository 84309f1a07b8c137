"""Last audit entries of all nodes, merged by time.

Each node reads the end of its own log; a node without an answer, or without a log in a file, is named.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.cluster.all_nodes import ask_other_nodes
from meshd.rpc.peer_rpc import PeerCall, handler

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.telemetry.audit_tail import AuditTail

_PATIENCE: Final = 3.0
NO_FILE: Final = "it has no audit log in a file"


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
            self._of_this_node(request), ask_other_nodes(self._mesh, self._peers, AUDIT, request, _PATIENCE)
        )
        entries, missing = list[dict[str, Any]](), dict[str, str]()
        for node, answer in [(self._mesh.node_id, own), *found.items()]:
            if answer is None or answer.trouble:
                missing[node] = "it does not answer" if answer is None else answer.trouble
            else:
                entries += [{**entry, "node": node} for entry in answer.entries]
        entries.sort(key=lambda entry: str(entry.get("time", "")), reverse=True)
        return {"node": self._mesh.node_id, "entries": entries[:limit], "missing": missing}
