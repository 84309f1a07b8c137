"""Which nodes read snapshots that consist of pages; those of earlier releases read none, or fewer kinds.

Law: a node that does not answer counts as one that reads them, or the same source would have another snapshot
whenever a node is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.core.peer_messages import READ_PAGED_KINDS, PagedKindsRequest
from meshd.peer_reads.replica_selection import UNREACHABLE_STATES, gather_limited
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node
    from meshwire.dataset.snapshot import SnapshotKind

_EARLIER: Final = (404, 405)  # answers of nodes of an earlier release
_AT_ONCE: Final = 16


class PageSupport:
    """Asks the other nodes of the mesh, each until it reads the pages of a kind. One per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient) -> None:
        self._mesh, self._peers = mesh, peers
        self._known: dict[tuple[str, int], frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<PageSupport of {len(self._known)} nodes>"

    async def is_everywhere(self, kind: SnapshotKind) -> bool:
        """Return whether every node of the mesh that answers reads pages of this kind."""
        if self._mesh.single_node:
            return True
        nodes = [
            node
            for node in self._mesh.current_map().nodes
            if node.node_id != self._mesh.node_id and node.state not in UNREACHABLE_STATES
        ]
        unsure = [node for node in nodes if kind not in self._known.get((node.node_id, node.turned), ())]
        return all(await gather_limited(_AT_ONCE, [self._ask(node, kind) for node in unsure]))

    async def _ask(self, node: Node, kind: SnapshotKind) -> bool:
        try:
            answer = await self._peers.call_typed(node, READ_PAGED_KINDS, PagedKindsRequest())
        except PeerRefusedError as error:
            return error.status not in _EARLIER
        except PeerUnreachableError:
            return True
        self._known[node.node_id, node.turned] = frozenset(answer.kinds)
        return kind in answer.kinds
