"""The doors through which other nodes read what this one holds: objects, archive indexes, documents, frames.

Law: parse, ask the service, send; a refusal is the native protocol's document. Only peers get in here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.assembly.errors import BatchError
from meshd.service.cluster.holdings import NotHereError
from meshd.service.remote import wire
from meshd.store.errors import StoreError
from meshd.web.native import STATUS, send_frame, send_stream, store_refusal
from meshd.web.peers import peer_reply, peer_route
from meshd.web.replies import Reply
from meshwire import percents

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from meshd.assembly.addressing import FrameSource
    from meshd.kit.clock import Clock
    from meshd.service.cluster.holdings import Holdings
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall, PeerHandler
    from meshd.web.server import NativeRoute

_MISDIRECTED: Final = 409
"""Of what this node does not hold: whoever asked asks another."""


def holding_routes(holdings: Holdings, frames: FrameSource, clock: Clock) -> list[NativeRoute]:
    """The routes under `/-/peer/` of what nodes read of each other."""
    doors = _Doors(holdings, frames, clock)
    return [
        peer_route("POST", wire.READ, doors.refusing(doors.read)),
        peer_route("POST", wire.FIND, doors.refusing(doors.find)),
        peer_route("POST", wire.LIST, doors.refusing(doors.page)),
        peer_route("POST", wire.INDEX, doors.refusing(doors.index)),
        peer_route("POST", wire.FRAMES, doors.refusing(doors.frame)),
        peer_route("GET", wire.DOCUMENTS, doors.refusing(doors.document)),
        peer_route("PUT", wire.DOCUMENTS, doors.refusing(doors.keep)),
        peer_route("POST", wire.KEPT, doors.refusing(doors.kept)),
    ]


class _Doors:
    def __init__(self, holdings: Holdings, frames: FrameSource, clock: Clock) -> None:
        self._holdings, self._frames, self._clock = holdings, frames, clock

    def refusing(
        self, handler: Callable[[MeshRequest, PeerCall], Awaitable[web.StreamResponse]]
    ) -> PeerHandler:
        """`handler` with its errors turned into the protocol's documents."""

        async def guard(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
            try:
                return await handler(request, call)
            except BatchError as error:
                return self._refusal(STATUS[error.code], error.code, error.message)
            except NotHereError as error:
                return self._refusal(_MISDIRECTED, "NotHere", str(error))
            except StoreError as error:
                refused = store_refusal(error)
                return self._refusal(STATUS[refused.code], refused.code, refused.message)
            except msgspec.MsgspecError as error:
                return self._refusal(400, "BadRequest", str(error)[:200])

        return guard

    async def read(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        outgoing = await self._holdings.read(await call.read(request, wire.MAX_ASK_BYTES))
        return await send_stream(request, outgoing, self._now())

    async def find(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        return self._reply(await self._holdings.find(await call.read(request, wire.MAX_ASK_BYTES)))

    async def page(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        return self._reply(self._holdings.page(await call.read(request, wire.MAX_ASK_BYTES)))

    async def index(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        return self._reply(await self._holdings.index(await call.read(request, wire.MAX_ASK_BYTES)))

    async def frame(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        address = wire.decode_address(await call.read(request, wire.MAX_ASK_BYTES))
        return await send_frame(request, await self._frames.frame(address), self._now())

    async def document(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        document = self._holdings.document(_key(request))
        if document is None:
            return self._refusal(404, "NoSuchKey", "it is not here")
        return self._reply(document)

    async def keep(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        again = request.raw_path.partition("?")[2] == wire.AGAIN
        document = await call.read(request, wire.MAX_DOCUMENT_BYTES)
        await self._holdings.keep(_key(request), document, again=again)
        return self._reply(b"")

    async def kept(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        return self._reply(await self._holdings.kept(await call.read(request, wire.MAX_ASK_BYTES)))

    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    def _reply(self, body: bytes) -> Reply:
        return peer_reply(body, self._now())

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())


def _key(request: MeshRequest) -> str:
    raw = request.raw_path.partition("?")[0].removeprefix(wire.DOCUMENTS)
    return percents.decode(raw)
