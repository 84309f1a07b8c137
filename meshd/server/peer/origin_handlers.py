"""Peer handlers for buckets with origins: write-back, write marks, prefetch, peer cache fetch.

Law: write-back runs only on the owner of the name; under another map the reply is 421, and nothing was
done. Prefetch reports, name by name, which names belong to another node; it streams outcomes as they
come and stops when the caller disconnects. A write mark is empty for a bucket that this node does not
know yet.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.origins import write_back, write_back_routing
from meshd.origins.cache import peer_cache
from meshd.origins.cache.peer_cache import PEER_CACHE_PATH
from meshd.origins.listing import WRITE_MARK_PATH
from meshd.origins.prefetch_worker import MAX_ASK_BYTES, PREFETCH_PATH, decode_request, framed
from meshd.origins.write_back import HANDOVER_PATH
from meshd.origins.write_back_routing import WRITE_BACK_PATH
from meshd.rpc.peer_client import StaleMapError
from meshd.server.peer.endpoint import peer_reply, peer_route, stream_reply
from meshd.store.errors import NotPrimaryError
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from aiohttp import web

    from meshd.cluster.cluster_view import ClusterView
    from meshd.origins.cache.peer_cache import PeerCacheServer
    from meshd.origins.listing import WriteMarks
    from meshd.origins.prefetch_worker import PrefetchOutcome, PrefetchWorker
    from meshd.origins.write_back_routing import WriteBackRouter
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock


T = TypeVar("T")
_WRITE_BACK_MAP_WAIT: Final = 1.0  # seconds for the caller's map to arrive here, too


class WriteBackHandlers:
    """One a process."""

    def __init__(self, bringer: WriteBackRouter, mesh: ClusterView, clock: Clock) -> None:
        self._bringer, self._mesh, self._clock = bringer, mesh, clock

    def __repr__(self) -> str:
        return f"<BringingDoors of {self._mesh.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """The doors."""
        return [
            peer_route("POST", WRITE_BACK_PATH, self.write_back),
            peer_route("POST", HANDOVER_PATH, self.handover_barrier),
        ]

    async def handover_barrier(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        asked = _decode_or_refuse(
            write_back.decode_query, await call.read_body(request, write_back.MAX_ASK_BYTES)
        )
        if call.map_version < self._mesh.current_map().version:
            raise StaleMapError(self._mesh.current_map().version)
        quiet = await self._bringer.is_finished(asked, call.map_version)
        return peer_reply(write_back.encode(quiet), self._clock.now_ms() // 1000)

    async def write_back(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        asked = _decode_or_refuse(
            write_back_routing.decode_request, await call.read_body(request, write_back_routing.MAX_ASK_BYTES)
        )
        if call.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(call.map_version - 1, _WRITE_BACK_MAP_WAIT)
        try:
            if not self._mesh.is_primary(asked.bucket, asked.key):
                raise StaleMapError(self._mesh.current_map().version)
            brought = await self._bringer.execute(asked)
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
        return peer_reply(write_back_routing.encode(brought), self._clock.now_ms() // 1000)


def _decode_or_refuse(decode: Callable[[bytes], T], raw: bytes) -> T:
    try:
        return decode(raw)
    except msgspec.MsgspecError as error:
        raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error


_MAX_BUCKET_NAME = 256  # bytes of a bucket's name


def write_mark_routes(marker: WriteMarks, clock: Clock) -> list[HttpRoute]:
    """The door."""

    async def mark(request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        name = (await call.read_body(request, _MAX_BUCKET_NAME)).decode("utf-8", "replace")
        return peer_reply(marker.own_mark(name).encode(), clock.now_ms() // 1000)

    return [peer_route("POST", WRITE_MARK_PATH, mark)]


_PREFETCH_MAP_WAIT: Final = 1.0


class PrefetchHandlers:
    """One a worker."""

    def __init__(
        self, warmer: PrefetchWorker, lender: PeerCacheServer, mesh: ClusterView, clock: Clock
    ) -> None:
        self._warmer, self._lender, self._mesh, self._clock = warmer, lender, mesh, clock

    def __repr__(self) -> str:
        return f"<WarmingDoors of {self._mesh.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """The doors."""
        return [
            peer_route("POST", PREFETCH_PATH, self.prefetch),
            peer_route("POST", PEER_CACHE_PATH, self.peer_cache_fetch),
        ]

    async def peer_cache_fetch(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        try:
            ask = peer_cache.decode_request(await call.read_body(request, peer_cache.MAX_ASK_BYTES))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
        async with self._lender.open_piece(ask) as pieces, aclosing(_as_async(pieces)) as given:
            return await stream_reply(request, given, self._clock.now_ms() // 1000)

    async def prefetch(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        try:
            ask = decode_request(await call.read_body(request, MAX_ASK_BYTES))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
        if call.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(call.map_version - 1, _PREFETCH_MAP_WAIT)
        async with (
            aclosing(self._warmer.run_request(ask)) as said,
            aclosing(_framed_outcomes(said)) as pieces,
        ):
            return await stream_reply(request, pieces, self._clock.now_ms() // 1000)


async def _as_async(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


async def _framed_outcomes(said: AsyncGenerator[list[PrefetchOutcome], None]) -> AsyncGenerator[bytes, None]:
    async for outcomes in said:
        yield b"".join(map(framed, outcomes))
