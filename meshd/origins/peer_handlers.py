"""Peer handlers for write-back: run it for a name this node owns, and report when this node has finished.

Write-back runs only on the owner of the name; under another map the response is 421, and nothing was done.
The handlers of prefetch, write marks and the peer cache are in their own modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.origins.write_back import IS_FINISHED
from meshd.origins.write_back_routing import WRITE_BACK
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import handler
from meshd.store.errors import NotPrimaryError
from meshd.store.records import WriteContext

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.origins.write_back import HandoverQuery
    from meshd.origins.write_back_routing import WriteBackRequest, WriteBackResult, WriteBackRouter
    from meshd.rpc.peer_rpc import CallContext


class WriteBackHandlers:
    """Handles the calls of other nodes about write-back. One instance per process."""

    def __init__(self, router: WriteBackRouter, mesh: ClusterView) -> None:
        self._router, self._mesh = router, mesh

    @handler(IS_FINISHED)
    async def is_finished(self, asked: HandoverQuery, context: CallContext) -> bool:
        if context.map_version < self._mesh.current_map().version:
            raise StaleMapError(self._mesh.current_map().version)
        return await self._router.is_finished(asked, context.map_version)

    @handler(WRITE_BACK)
    async def write_back(self, asked: WriteBackRequest, context: CallContext) -> WriteBackResult:
        self._mesh.require_primary(asked.bucket, asked.key)
        try:
            return await self._router.execute(asked, WriteContext(context.node_id, context.map_version))
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
