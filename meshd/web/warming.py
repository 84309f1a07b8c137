"""The doors through which nodes have each other bring objects of origins into their caches, and give what
they have cached.

Law: for names this node answers for; of others it says so, name by name. Outcomes go as they come; when
whoever asked is gone, the work ends.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.service.backed.warmwire import MAX_ASK_BYTES, WARM, decode_ask, framed
from meshd.service.caching import lending
from meshd.service.caching.lending import LEND
from meshd.web.peers import peer_route, stream_reply
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.backed.warming import Warmer
    from meshd.service.backed.warmwire import Outcome
    from meshd.service.caching.lending import Lender
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_PATIENCE: Final = 1.0


class WarmingDoors:
    """One a worker."""

    def __init__(self, warmer: Warmer, lender: Lender, mesh: Mesh, clock: Clock) -> None:
        self._warmer, self._lender, self._mesh, self._clock = warmer, lender, mesh, clock

    def __repr__(self) -> str:
        return f"<WarmingDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The doors."""
        return [peer_route("POST", WARM, self.warm), peer_route("POST", LEND, self.lend)]

    async def lend(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        try:
            ask = lending.decode_ask(await call.read(request, lending.MAX_ASK_BYTES))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
        async with self._lender.given(ask) as pieces, aclosing(_each(pieces)) as given:
            return await stream_reply(request, given, self._clock.now_ms() // 1000)

    async def warm(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        try:
            ask = decode_ask(await call.read(request, MAX_ASK_BYTES))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
        if call.map_version > self._mesh.map().version:
            await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
        async with aclosing(self._warmer.work(ask)) as said, aclosing(_framed(said)) as pieces:
            return await stream_reply(request, pieces, self._clock.now_ms() // 1000)


async def _each(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


async def _framed(said: AsyncGenerator[list[Outcome], None]) -> AsyncGenerator[bytes, None]:
    async for outcomes in said:
        yield b"".join(map(framed, outcomes))
