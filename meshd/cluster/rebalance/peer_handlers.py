"""Peer handlers for rebalancing: what a node that compares itself with this one asks for.

Law: a caller with a newer map waits until this node has that map too, and from then on no process of this
node writes under an older one: earlier writes appear in the comparison, later ones reach the caller as a
member of the write set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.cluster.rebalance.sync_source import (
    FETCH_ITEMS,
    LIST_DOCUMENTS,
    READ_DIGESTS,
    READ_INVENTORY,
)
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import handler, stream_handler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.sync_source import (
        DigestsRequest,
        DigestsResponse,
        DocumentsRequest,
        FetchRequest,
        InventoryRequest,
        SyncSource,
    )
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.replica.inventory import InventoryPage


class RebalanceHandlers:
    """`source` of this node's store."""

    def __init__(self, source: SyncSource, mesh: ClusterView) -> None:
        self._source, self._mesh = source, mesh

    @handler(READ_DIGESTS)
    async def read_digests(self, wanted: DigestsRequest, context: CallContext) -> DigestsResponse:
        self._require_map(context)
        if not wanted.after:
            await self._source.fence_writes(context.map_version)
        return await self._source.read_digests(wanted)

    @handler(READ_INVENTORY)
    async def read_inventory(self, wanted: InventoryRequest, context: CallContext) -> InventoryPage:
        self._require_map(context)
        return await self._source.read_inventory(wanted)

    @handler(LIST_DOCUMENTS)
    async def list_documents(self, wanted: DocumentsRequest, context: CallContext) -> list[str]:
        self._require_map(context)
        return await self._source.list_documents(wanted)

    @stream_handler(FETCH_ITEMS)
    def fetch_items(self, wanted: FetchRequest, context: CallContext) -> AsyncIterator[bytes]:
        self._require_map(context)
        return self._source.fetch_frames(wanted)

    def _require_map(self, context: CallContext) -> None:
        """Raises StaleMapError while this node has an older map than the caller."""
        version = self._mesh.current_map().version
        if version < context.map_version:
            raise StaleMapError(version)
