"""Fetches pages of snapshots from the nodes that have made them, so that a mesh makes each page once.

Law: the first replica of a shard makes its page, whichever node asks for it; no node waits for a page that
is asked of itself. What a node sends is used only if the caller finds that it is the page.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec import structs

from meshd.core.peer_messages import READ_PAGE
from meshd.errors import MeshdError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.core.peer_messages import PageRequest
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshwire.cluster import Node

_TIMES: Final = 240
"""How often a node is asked again for a page that it still makes, each time for up to five seconds."""


class PeerSnapshotPages:
    """Fetches pages. One per process."""

    def __init__(self, asking: ReplicaSelector) -> None:
        self._asking, self._mesh = asking, asking.mesh

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
                document = await self._asking.peers.call_typed(node, READ_PAGE, request)
                if document:
                    return document
        except MeshdError as error:  # of an earlier release, away, or without the shard
            self._asking.report_unreachable(node, error)
        return None
