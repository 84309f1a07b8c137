"""What this node lists for another one that merges.

Law: answers by exactly the map the caller goes by, or says which one it goes by itself (421).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.service.remote.merged import LISTING, Listing
from meshd.service.semantics.translation import store_errors
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.remote.merged import LocalLister
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_MOST = 64 << 10
_PATIENCE = 1.0


def listing_routes(local: LocalLister, mesh: Mesh, clock: Clock) -> list[NativeRoute]:
    """The door."""

    async def answer(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        try:
            asked = msgspec.msgpack.decode(await call.read(request, _MOST), type=Listing)
        except msgspec.DecodeError as error:
            raise S3Error("BadRequest", f"a listing is asked for otherwise: {error}") from error
        if call.map_version > mesh.map().version:
            await mesh.newer_than(call.map_version - 1, _PATIENCE)
        with store_errors():
            page = local.page(asked, call.map_version)
        return peer_reply(msgspec.msgpack.encode(page), clock.now_ms() // 1000)

    return [peer_route("POST", LISTING, answer)]
