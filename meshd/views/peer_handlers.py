"""Peer handler for view results: made once, on a node that reads the source, and stored there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.core.peer_messages import MAKE_VIEW_RESULT
from meshd.rpc.peer_rpc import NotHereError, handler, malformed_message
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.peer_messages import ViewResultRequest
    from meshd.rpc.peer_rpc import CallContext
    from meshd.views.transform_results import TransformResultMaker


class ViewResultHandlers:
    """Makes view results for other nodes, in a worker."""

    def __init__(self, maker: TransformResultMaker, mesh: ClusterView) -> None:
        self._maker, self._mesh = maker, mesh

    @handler(MAKE_VIEW_RESULT)
    async def make_view_result(self, asked: ViewResultRequest, context: CallContext) -> bytes:
        if not self._mesh.is_reader(asked.bucket, asked.key):
            raise NotHereError(f"{self._mesh.node_id} does not read this object")
        try:
            return await self._maker.make_for_peer(asked)
        except PlanError as error:
            raise malformed_message(error) from error
