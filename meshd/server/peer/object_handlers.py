"""Peer handlers for objects and buckets: change notices, listings, copy sources, resumed reads.

Law: a listing is answered under exactly the caller's map version, a copy source only for names that this
node reads; otherwise the reply is 421 with this node's version. A bucket change is acknowledged once
this process knows as much as the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.error_mapping import store_errors
from meshd.core.peer_messages import RESUME_PATH
from meshd.peer_reads.listing import LISTING_PATH, ListingRequest
from meshd.reads.copy_source import FIND_SOURCE_PATH, READ_SOURCE_PATH, SOURCE_EXISTS_PATH, CopySourceRequest
from meshd.rpc.peer_client import StaleMapError
from meshd.server.peer.endpoint import peer_reply, peer_route, stream_reply
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.cluster_view import ClusterView
    from meshd.peer_reads.listing import LocalListings
    from meshd.peer_reads.resume_read import ResumeSource
    from meshd.reads.copy_source import LocalCopySources
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock


_MAX_RESUME_MESSAGE: Final = 64 << 10


def resume_read_routes(rests: ResumeSource, clock: Clock) -> list[HttpRoute]:
    """The route under `/-/peer/` of this."""

    async def rest(request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        try:
            pieces = rests.read_rest(await call.read_body(request, _MAX_RESUME_MESSAGE))
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidRequest", f"A peer of another version: {error}") from error
        return await stream_reply(request, pieces, clock.now_ms() // 1000)

    return [peer_route("POST", RESUME_PATH, rest)]


_MAX_LISTING_MESSAGE = 64 << 10
_LISTING_MAP_WAIT = 1.0


def listing_peer_routes(local: LocalListings, mesh: ClusterView, clock: Clock) -> list[HttpRoute]:
    """The door."""

    async def answer(request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        try:
            asked = msgspec.msgpack.decode(
                await call.read_body(request, _MAX_LISTING_MESSAGE), type=ListingRequest
            )
        except msgspec.DecodeError as error:
            raise S3Error("BadRequest", f"a listing is asked for otherwise: {error}") from error
        if call.map_version > mesh.current_map().version:
            await mesh.wait_for_newer_map(call.map_version - 1, _LISTING_MAP_WAIT)
        with store_errors():
            page = local.list_page(asked, call.map_version)
        return peer_reply(msgspec.msgpack.encode(page), clock.now_ms() // 1000)

    return [peer_route("POST", LISTING_PATH, answer)]


_MAX_SOURCE_MESSAGE = 64 << 10
_SOURCE_MAP_WAIT = 1.0


class CopySourceHandlers:
    """One a process."""

    def __init__(self, local: LocalCopySources, mesh: ClusterView, clock: Clock) -> None:
        self._local, self._mesh, self._clock = local, mesh, clock

    def __repr__(self) -> str:
        return "<SourceDoors>"

    def routes(self) -> list[HttpRoute]:
        return [
            peer_route("POST", FIND_SOURCE_PATH, self._find),
            peer_route("POST", READ_SOURCE_PATH, self._read),
            peer_route("POST", SOURCE_EXISTS_PATH, self._stat),
        ]

    async def _ask(self, request: MeshRequest, call: PeerCaller) -> CopySourceRequest:
        try:
            ask = msgspec.msgpack.decode(
                await call.read_body(request, _MAX_SOURCE_MESSAGE), type=CopySourceRequest
            )
        except msgspec.DecodeError as error:
            raise S3Error("BadRequest", f"a source is asked for otherwise: {error}") from error
        if call.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(call.map_version - 1, _SOURCE_MAP_WAIT)
        if not self._mesh.is_reader(ask.bucket, ask.key):
            raise StaleMapError(self._mesh.current_map().version)
        return ask

    async def _find(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            record = await self._local.find_source(ask)
        return peer_reply(msgspec.msgpack.encode(record), self._now())

    async def _stat(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            there = self._local.has_versions(ask.bucket, ask.key)
        return peer_reply(b"1" if there else b"", self._now())

    async def _read(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        ask = await self._ask(request, call)
        with store_errors():
            return await stream_reply(request, self._local.read_source(ask), self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
