"""Peer routes: mounts the registered handlers of typed calls as routes of the server.

Everything that the handlers of all calls share is done here, once: read and decode the request, wait for the
caller's cluster map, map errors, encode and frame the response.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from meshd.batches.sample_stream import StreamBody
from meshd.core.api_errors import BatchError
from meshd.core.error_mapping import to_s3_error
from meshd.core.frame_address import Frame
from meshd.rpc.peer_rpc import (
    CallContext,
    NotHereError,
    encode_message,
    registered_handlers,
)
from meshd.server.api.batches import STATUS, send_frame, send_stream, store_batch_error
from meshd.server.peer.endpoint import peer_reply, peer_route, stream_reply
from meshd.server.response import Reply
from meshd.store.errors import StoreError
from meshwire.errors import CODES, S3Error

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_rpc import RegisteredHandler
    from meshd.server.http_server import HttpRoute
    from meshd.server.peer.endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock

_NOT_HERE = 409


def peer_routes(mesh: ClusterView, clock: Clock, *services: object) -> list[HttpRoute]:
    """Return the routes of all calls for which these services have handlers."""
    return [
        peer_route(each.call.method, each.call.path, _TypedRoute(each, mesh, clock).handle)
        for service in services
        for each in registered_handlers(service)
    ]


class _TypedRoute:
    def __init__(self, registered: RegisteredHandler, mesh: ClusterView, clock: Clock) -> None:
        self._call, self._method = registered.call, registered.method
        self._mesh, self._clock = mesh, clock

    async def handle(self, request: MeshRequest, caller: PeerCaller) -> Reply:
        try:
            context = self._context(request, caller)
            message = await self._read_request(request, context)
            if self._call.map_wait and caller.map_version > self._mesh.current_map().version:
                await self._mesh.wait_for_newer_map(caller.map_version - 1, self._call.map_wait)
            return await self._respond(request, self._method(message, context))
        except NotHereError as error:
            return self._refusal(_NOT_HERE, "NotHere", str(error))
        except StoreError as error:
            if self._call.errors == "s3":
                raise to_s3_error(error) from error
            known = store_batch_error(error)
            return self._refusal(STATUS[known.code], known.code, known.message)
        except BatchError as error:
            if self._call.errors == "s3":
                code = error.code if error.code in CODES else "InternalError"
                raise S3Error(code, error.message) from error
            return self._refusal(STATUS[error.code], error.code, error.message)

    def _context(self, request: MeshRequest, caller: PeerCaller) -> CallContext:
        limit = self._call.max_bytes

        async def read_body() -> bytes:
            return await caller.read_body(request, limit)

        return CallContext(caller.node_id, caller.map_version, lambda: caller.iter_body(request), read_body)

    async def _read_request(self, request: MeshRequest, context: CallContext) -> Any:
        """Return the request's message. For a call with a target the body is left to the handler, unless it
        must be empty."""
        call = self._call
        whole = call.target is None or (call.max_bytes == 0 and call.method != "GET")
        return call.decode_request(request.raw_path, await context.read_body() if whole else b"")

    async def _respond(self, request: MeshRequest, result: Any) -> Reply:
        if hasattr(result, "__aiter__"):
            async with aclosing(result) as pieces:
                return await stream_reply(request, pieces, self._now())
        response = await result
        if isinstance(response, Frame):
            return await send_frame(request, response, self._now())
        if isinstance(response, StreamBody):
            return await send_stream(request, response, self._now())
        return peer_reply(encode_message(response), self._now())

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
