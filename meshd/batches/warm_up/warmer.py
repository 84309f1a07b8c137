"""The warm-up sessions of a node, in its coordinator; and how other processes and nodes reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.batches.warm_up.messages import WARM_UP, WARM_UP_HERE, WarmUpRequest, WarmUpStatus
from meshd.batches.warm_up.session import WarmUpSession
from meshd.core.node_sessions import RPC_ERRORS, NodeSessions
from meshd.rpc.peer_rpc import handler
from meshd.rpc.process_client import ProcessClient

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.batches.warm_up.session import WarmUpContext
    from meshd.rpc.peer_rpc import CallContext

Warmer = NodeSessions[WarmUpRequest, WarmUpStatus]


def warmer(context: WarmUpContext) -> Warmer:
    """Return the sessions of a node."""
    return Warmer(lambda request: WarmUpSession(context, request), WarmUpStatus(done=True), WARM_UP_HERE)


class WarmUpHandlers:
    """Passes the calls of other nodes on to the coordinator behind `socket`. One instance per process."""

    def __init__(self, socket: Path) -> None:
        self._client = ProcessClient(socket, RPC_ERRORS)

    @handler(WARM_UP)
    async def warm_up(self, request: WarmUpRequest, context: CallContext) -> WarmUpStatus:
        del context
        return await self._client.call(WARM_UP_HERE, request)
