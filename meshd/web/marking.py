"""The door through which other nodes learn whether a bucket with an origin was written to here.

Law: the body is the bucket's name, the answer its mark; empty for a bucket that is not known here yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.service.caching.marks import MARK
from meshd.web.peers import peer_reply, peer_route

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.caching.marks import Marker
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_MOST = 256  # bytes of a bucket's name


def marking_routes(marker: Marker, clock: Clock) -> list[NativeRoute]:
    """The door."""

    async def mark(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        name = (await call.read(request, _MOST)).decode("utf-8", "replace")
        return peer_reply(marker.own(name).encode(), clock.now_ms() // 1000)

    return [peer_route("POST", MARK, mark)]
