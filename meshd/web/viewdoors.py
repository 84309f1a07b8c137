"""The door through which nodes have each other make results of views, where the sources' bytes are.

Law: for sources this node reads; of others it says so (409). A result is made once, kept here, and given.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.assembly.errors import BatchError
from meshd.service.remote import wire
from meshd.store.errors import StoreError
from meshd.web.native import STATUS, store_refusal
from meshd.web.peers import peer_reply, peer_route
from meshd.web.replies import Reply
from meshwire.documents import PlanError
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.views.making import ViewMaker
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_PATIENCE: Final = 1.0
_MISDIRECTED: Final = 409


class ViewDoors:
    """One a worker."""

    def __init__(self, maker: ViewMaker, mesh: Mesh, clock: Clock) -> None:
        self._maker, self._mesh, self._clock = maker, mesh, clock

    def __repr__(self) -> str:
        return f"<ViewDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The door."""
        return [peer_route("POST", wire.MADE, self.made)]

    async def made(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        try:
            ask = wire.decode_made(await call.read(request, wire.MAX_ASK_BYTES))
            if call.map_version > self._mesh.map().version:
                await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
            if not self._mesh.is_reader(ask.bucket, ask.key):
                return self._refusal(_MISDIRECTED, "NotHere", f"{self._mesh.node_id} does not read it")
            return peer_reply(await self._maker.asked(ask), self._now())
        except BatchError as error:
            return self._refusal(STATUS[error.code], error.code, error.message)
        except StoreError as error:
            refused = store_refusal(error)
            return self._refusal(STATUS[refused.code], refused.code, refused.message)
        except (msgspec.MsgspecError, PlanError) as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error

    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())
