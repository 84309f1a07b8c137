"""What this node gives others that make copies: a source's facts, its bytes, whether a name is there.

Law: answers only for names whose reader it is; else it says by which map another one is (421).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.net.peers import StaleMapError
from meshd.service.objects.sources import FIND, READ, STAT, SourceAsk
from meshd.service.semantics.translation import store_errors
from meshd.web.peers import peer_reply, peer_route, stream_reply
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.objects.sources import LocalSources
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_MOST = 64 << 10
_PATIENCE = 1.0


class SourceDoors:
    """One a process."""

    def __init__(self, local: LocalSources, mesh: Mesh, clock: Clock) -> None:
        self._local, self._mesh, self._clock = local, mesh, clock

    def __repr__(self) -> str:
        return "<SourceDoors>"

    def routes(self) -> list[NativeRoute]:
        return [
            peer_route("POST", FIND, self._find),
            peer_route("POST", READ, self._read),
            peer_route("POST", STAT, self._stat),
        ]

    async def _ask(self, request: MeshRequest, call: PeerCall) -> SourceAsk:
        try:
            ask = msgspec.msgpack.decode(await call.read(request, _MOST), type=SourceAsk)
        except msgspec.DecodeError as error:
            raise S3Error("BadRequest", f"a source is asked for otherwise: {error}") from error
        if call.map_version > self._mesh.map().version:
            await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
        if not self._mesh.is_reader(ask.bucket, ask.key):
            raise StaleMapError(self._mesh.map().version)
        return ask

    async def _find(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            record = await self._local.find(ask)
        return peer_reply(msgspec.msgpack.encode(record), self._now())

    async def _stat(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            there = self._local.has(ask.bucket, ask.key)
        return peer_reply(b"1" if there else b"", self._now())

    async def _read(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            return await stream_reply(request, self._local.read(ask), self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
