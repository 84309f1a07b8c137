"""Which nodes read snapshots that consist of pages; those of earlier releases read none, or fewer kinds.

Law: a node that does not answer counts as one of an earlier release, unless all nodes of the mesh once read
such pages. So a node that is away during an upgrade finds no snapshot that it cannot read, and afterwards the
same source has the same snapshot whichever node is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.core.peer_messages import READ_PAGED_KINDS, PagedKindsRequest
from meshd.peer_reads.replica_selection import UNREACHABLE_STATES, gather_limited
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshwire.dataset.paged_snapshot import READABLE

if TYPE_CHECKING:
    from collections.abc import Collection

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.paged_kinds import PagedKindTable
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node

_EARLIER: Final = (404, 405)  # answers of nodes of an earlier release
_AT_ONCE: Final = 16


class PagedSnapshotSupport:
    """Asks the other nodes of the mesh, each until it reads the pages of a kind. One per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, recorded: PagedKindTable) -> None:
        self._mesh, self._peers, self._recorded = mesh, peers, recorded
        self._known: dict[tuple[str, int], frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<PagedSnapshotSupport of {len(self._known)} nodes>"

    async def is_everywhere(self, kind: str) -> bool:
        """Return whether every node of the mesh reads pages of this kind, or what else is in READABLE."""
        if self._mesh.single_node:
            return True
        cluster = self._mesh.current_map()
        others = [n for n in cluster.nodes if n.node_id != self._mesh.node_id and n.state != "down"]
        answers = await gather_limited(_AT_ONCE, [self._kinds_of(node, kind) for node in others])
        told = [kinds for kinds in answers if kinds is not None]
        if not all(kind in kinds for kinds in told):
            return False
        if len(told) < len(answers):
            return self._recorded.has(kind)
        await self._recorded.record(set(READABLE).intersection(*told), cluster.version)
        return True

    async def _kinds_of(self, node: Node, kind: str) -> Collection[str] | None:
        """Return the kinds of which a node reads pages, None if it does not answer."""
        known = self._known.get((node.node_id, node.turned), frozenset())
        if kind in known:
            return known
        if node.state in UNREACHABLE_STATES:
            return None
        try:
            answer = await self._peers.call_typed(node, READ_PAGED_KINDS, PagedKindsRequest())
        except PeerRefusedError as error:
            return () if error.status in _EARLIER else None
        except PeerUnreachableError:
            return None
        found = self._known[node.node_id, node.turned] = frozenset(answer.kinds)
        return found
