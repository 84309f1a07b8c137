"""The door through which another node gets the rest of an answer whose bytes end there.

Law: parse, ask the service, send. Only peers get in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.service.remote.wire import REST
from meshd.web.peers import peer_route, stream_reply
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.remote.continuing import Rests
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_LIMIT: Final = 64 << 10


def rest_routes(rests: Rests, clock: Clock) -> list[NativeRoute]:
    """The route under `/-/peer/` of this."""

    async def rest(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        try:
            pieces = rests.rest(await call.read(request, _LIMIT))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidRequest", f"A peer of another version: {error}") from error
        return await stream_reply(request, pieces, clock.now_ms() // 1000)

    return [peer_route("POST", REST, rest)]
