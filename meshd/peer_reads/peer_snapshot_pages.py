"""Pages of snapshots in a mesh: which nodes read them, and fetching them from the nodes that have made them.

Law: a node that does not answer counts as one of an earlier release, unless all nodes of the mesh once read
such pages. So a node that is away during an upgrade finds no snapshot that it cannot read, and afterwards the
same source has the same snapshot whichever node is away.
Law: the first replica of a shard makes its page, whichever node asks for it; no node waits for a page that
is asked of itself. What a node sends is used only if the caller finds that it is the page.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec import structs

from meshd.core.peer_messages import READ_PAGE, READ_PAGED_KINDS, PagedKindsRequest
from meshd.errors import MeshdError
from meshd.peer_reads.replica_selection import UNREACHABLE_STATES, gather_limited
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshd.telemetry import metrics
from meshwire.dataset.paged_snapshot import READABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.paged_kinds import PagedKindTable
    from meshd.core.peer_messages import PageRequest
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node

_EARLIER: Final = (404, 405)  # answers of nodes of an earlier release
_AT_ONCE: Final = 16
_TIMES: Final = 240
"""How often a node is asked again for a page that it still makes, each time for up to five seconds."""


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


class PeerSnapshotPages:
    """Fetches pages. One per process."""

    def __init__(self, selector: ReplicaSelector) -> None:
        self._selector, self._mesh = selector, selector.mesh

    def __repr__(self) -> str:
        return f"<PeerSnapshotPages of {self._mesh.node_id}>"

    async def fetch_page(
        self, request: PageRequest, is_page: Callable[[bytes], bool], *, anywhere: bool
    ) -> bytes | None:
        """Return the document of a page from the first replica of its shard, which makes it if it has to, or,
        if it may be `anywhere`, from another replica that has it. None if this node is to make it."""
        for node, asked in self._places(request, anywhere=anywhere):
            document = await self._ask(node, asked)
            if document is not None and await asyncio.to_thread(is_page, document):
                metrics.snapshot_pages.labels("fetched").inc()
                return document
        return None

    def _places(self, request: PageRequest, *, anywhere: bool) -> list[tuple[Node, PageRequest]]:
        if self._mesh.single_node:
            return []
        readers = self._mesh.route_for(request.bucket, request.key).read_set
        only_finished = structs.replace(request, finished=True)
        asked = [(node, only_finished if number else request) for number, node in enumerate(readers)]
        there = [(node, each) for node, each in asked if node.node_id != self._mesh.node_id]
        return there if anywhere else [each for each in there if not each[1].finished]

    async def _ask(self, node: Node, request: PageRequest) -> bytes | None:
        try:
            for _ in range(_TIMES):
                document = await self._selector.peers.call_typed(node, READ_PAGE, request)
                if document:
                    return document
        except MeshdError as error:  # of an earlier release, away, or without the shard
            self._selector.report_unreachable(node, error)
        return None
