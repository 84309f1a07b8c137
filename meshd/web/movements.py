"""The doors through which nodes compare themselves with this one, and fetch what they lack.

Law: says what `cluster.offers` says; a caller that goes by a newer map than this node waits until this one
has it too, and no process of this node decides by an older one from then on: what one decided before is
compared, what one decides later the caller gets as a writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.cluster.offers import DigestsWanted, DocumentsWanted, FetchWanted, InventoryWanted, encode
from meshd.net.peers import StaleMapError
from meshd.web.peers import peer_reply, peer_route, stream_reply
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.cluster.offers import Offers
    from meshd.kit.clock import Clock
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_LIMIT: Final = 4 << 20
_PATIENCE: Final = 5.0
W = TypeVar("W")


class MovementDoors:
    """`offers` of this node's store."""

    def __init__(self, offers: Offers, mesh: Mesh, clock: Clock) -> None:
        self._offers, self._mesh, self._clock = offers, mesh, clock

    def routes(self) -> list[NativeRoute]:
        return [
            peer_route("POST", "/-/peer/moves/digests", self._digests),
            peer_route("POST", "/-/peer/moves/inventory", self._inventory),
            peer_route("POST", "/-/peer/moves/documents", self._documents),
            peer_route("POST", "/-/peer/moves/fetch", self._fetch),
        ]

    async def _wanted(self, request: MeshRequest, call: PeerCall, kind: type[W]) -> W:
        known = self._mesh.map().version
        if known < call.map_version and not await self._mesh.newer_than(call.map_version - 1, _PATIENCE):
            raise StaleMapError(self._mesh.map().version)
        try:
            return msgspec.msgpack.decode(await call.read(request, _LIMIT), type=kind)
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidRequest", f"A peer of another version: {error}") from error

    @property
    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    async def _digests(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        wanted = await self._wanted(request, call, DigestsWanted)
        if not wanted.after:
            await self._offers.fence(call.map_version)
        return peer_reply(encode(await self._offers.digests(wanted)), self._now)

    async def _inventory(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        wanted = await self._wanted(request, call, InventoryWanted)
        return peer_reply(encode(await self._offers.inventory(wanted)), self._now)

    async def _documents(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        wanted = await self._wanted(request, call, DocumentsWanted)
        return peer_reply(encode(await self._offers.documents(wanted)), self._now)

    async def _fetch(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        wanted = await self._wanted(request, call, FetchWanted)
        return await stream_reply(request, self._offers.frames(wanted), self._now)
