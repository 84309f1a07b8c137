"""Peer handlers for reads: objects, archive indexes, documents and frames of this node; view results.

Law: parse, call the service, send. Refusals use the batch API's error document; 409 means that this node
does not hold the name. A view result is computed once, on a node that reads its source, and stored
there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core import peer_messages
from meshd.core.api_errors import BatchError
from meshd.reads.peer_read_service import NotHereError
from meshd.server.api.batches import STATUS, send_frame, send_stream, store_batch_error
from meshd.server.peer.endpoint import peer_reply, peer_route
from meshd.server.response import Reply
from meshd.store.errors import StoreError
from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.frame_address import FrameSource
    from meshd.reads.peer_read_service import PeerReadService
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller, PeerHandler
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock
    from meshd.views.transform_results import TransformResultMaker


_NOT_HELD_STATUS: Final = 409
"""Of what this node does not hold: whoever asked asks another."""


def peer_read_routes(holdings: PeerReadService, frames: FrameSource, clock: Clock) -> list[HttpRoute]:
    """The routes under `/-/peer/` of what nodes read of each other."""
    doors = _PeerReadHandlers(holdings, frames, clock)
    return [
        peer_route("POST", peer_messages.READ_PATH, doors.handle_errors(doors.read_stream)),
        peer_route("POST", peer_messages.FIND_PATH, doors.handle_errors(doors.find_record)),
        peer_route("POST", peer_messages.LIST_PATH, doors.handle_errors(doors.list_page)),
        peer_route("POST", peer_messages.INDEX_PATH, doors.handle_errors(doors.read_index)),
        peer_route("POST", peer_messages.FRAMES_PATH, doors.handle_errors(doors.read_frame)),
        peer_route("GET", peer_messages.DOCUMENTS_PATH, doors.handle_errors(doors.read_document)),
        peer_route("PUT", peer_messages.DOCUMENTS_PATH, doors.handle_errors(doors.store_document)),
        peer_route("POST", peer_messages.INVENTORY_PATH, doors.handle_errors(doors.list_documents)),
    ]


class _PeerReadHandlers:
    def __init__(self, holdings: PeerReadService, frames: FrameSource, clock: Clock) -> None:
        self._holdings, self._frames, self._clock = holdings, frames, clock

    def handle_errors(
        self, handler: Callable[[MeshRequest, PeerCaller], Awaitable[web.StreamResponse]]
    ) -> PeerHandler:
        """`handler` with its errors turned into the protocol's documents."""

        async def guard(request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
            try:
                return await handler(request, call)
            except BatchError as error:
                return self._refusal(STATUS[error.code], error.code, error.message)
            except NotHereError as error:
                return self._refusal(_NOT_HELD_STATUS, "NotHere", str(error))
            except StoreError as error:
                refused = store_batch_error(error)
                return self._refusal(STATUS[refused.code], refused.code, refused.message)
            except msgspec.MsgspecError as error:
                return self._refusal(400, "BadRequest", str(error)[:200])

        return guard

    async def read_stream(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        outgoing = await self._holdings.read_parts(
            await call.read_body(request, peer_messages.MAX_REQUEST_BYTES)
        )
        return await send_stream(request, outgoing, self._now())

    async def find_record(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        return self._reply(
            await self._holdings.find_records(await call.read_body(request, peer_messages.MAX_REQUEST_BYTES))
        )

    async def list_page(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        return self._reply(
            self._holdings.list_page(await call.read_body(request, peer_messages.MAX_REQUEST_BYTES))
        )

    async def read_index(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        return self._reply(
            await self._holdings.get_index(await call.read_body(request, peer_messages.MAX_REQUEST_BYTES))
        )

    async def read_frame(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        address = peer_messages.decode_frame_address(
            await call.read_body(request, peer_messages.MAX_REQUEST_BYTES)
        )
        return await send_frame(request, await self._frames.get_frame(address), self._now())

    async def read_document(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        document = self._holdings.get_document(_document_key(request))
        if document is None:
            return self._refusal(404, "NoSuchKey", "it is not here")
        return self._reply(document)

    async def store_document(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        again = request.raw_path.partition("?")[2] == peer_messages.REWRITE_QUERY
        document = await call.read_body(request, peer_messages.MAX_DOCUMENT_BYTES)
        await self._holdings.put_document(_document_key(request), document, again=again)
        return self._reply(b"")

    async def list_documents(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        return self._reply(
            await self._holdings.list_documents(
                await call.read_body(request, peer_messages.MAX_REQUEST_BYTES)
            )
        )

    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    def _reply(self, body: bytes) -> Reply:
        return peer_reply(body, self._now())

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())


def _document_key(request: MeshRequest) -> str:
    raw = request.raw_path.partition("?")[0].removeprefix(peer_messages.DOCUMENTS_PATH)
    return percent_encoding.decode(raw)


_VIEW_MAP_WAIT: Final = 1.0
_NOT_READER_STATUS: Final = 409


class ViewResultHandlers:
    """One a worker."""

    def __init__(self, maker: TransformResultMaker, mesh: ClusterView, clock: Clock) -> None:
        self._maker, self._mesh, self._clock = maker, mesh, clock

    def __repr__(self) -> str:
        return f"<ViewDoors of {self._mesh.node_id}>"

    def routes(self) -> list[HttpRoute]:
        """The door."""
        return [peer_route("POST", peer_messages.VIEW_RESULT_PATH, self.view_result)]

    async def view_result(self, request: MeshRequest, call: PeerCaller) -> web.StreamResponse:
        try:
            ask = peer_messages.decode_view_result_request(
                await call.read_body(request, peer_messages.MAX_REQUEST_BYTES)
            )
            if call.map_version > self._mesh.current_map().version:
                await self._mesh.wait_for_newer_map(call.map_version - 1, _VIEW_MAP_WAIT)
            if not self._mesh.is_reader(ask.bucket, ask.key):
                return self._refusal(_NOT_READER_STATUS, "NotHere", f"{self._mesh.node_id} does not read it")
            return peer_reply(await self._maker.make_for_peer(ask), self._now())
        except BatchError as error:
            return self._refusal(STATUS[error.code], error.code, error.message)
        except StoreError as error:
            refused = store_batch_error(error)
            return self._refusal(STATUS[refused.code], refused.code, refused.message)
        except (msgspec.MsgspecError, PlanError) as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error

    def _now(self) -> int:
        return self._clock.now_ms() // 1000

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())
