"""Calls of other nodes (`/-/peer/`): who may call, and what the handlers of all typed calls share.

Law: only nodes that know the cluster's secret get in; a node with a different cluster map gets 421. Nothing
of a body is read before the handler asks for it. Every typed call is answered here: read and decode the
request, wait for the caller's cluster map, map errors, encode and frame the response.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.batches.sample_responses import StreamBody
from meshd.core.api_errors import BatchError, to_batch_error, to_s3_error
from meshd.core.frame_address import Frame
from meshd.rpc.peer_client import FRAMED_HEADER, MAP_HEADER, PEER_KEY, PURPOSE, StaleMapError, peer_secret
from meshd.rpc.peer_clock import CLOCKS_CODE
from meshd.rpc.peer_rpc import (
    END_MARKER,
    MAX_PIECE_BYTES,
    PREFIX,
    BodyFramingError,
    CallContext,
    FrameDecoder,
    NotHereError,
    encode_message,
    frame_body,
    piece_header,
    registered_handlers,
)
from meshd.server.api.batches import send_frames, send_stream
from meshd.server.api.json_api import STATUS
from meshd.server.http_route import HttpRoute
from meshd.server.proxy.hops import stale_map_reply
from meshd.server.request import request_head
from meshd.server.request_body import RequestBody
from meshd.server.response import Reply, StreamedReply, connection_header, head_bytes
from meshd.store.errors import ClocksDifferError, StoreError
from meshwire.errors import CODES, S3Error
from meshwire.sigv4 import read_claim, verify

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_rpc import RegisteredHandler
    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock

PeerHandler = Callable[["MeshRequest", "PeerCaller"], Awaitable["Reply"]]

_MAX_HEADERS = 64 << 10
_IDLE_SECONDS = 60.0
_TOO_LARGE = "The body is larger than this call allows."
_NOT_HERE = 409
_UNAVAILABLE = 503


class PeerCaller(msgspec.Struct, frozen=True):
    """The calling node, and the version of the cluster map that it uses."""

    node_id: str
    map_version: int

    async def iter_body(self, request: MeshRequest) -> AsyncIterator[bytes]:
        """Yield the body, verified. Raises S3Error BadDigest, IncompleteBody, RequestTimeout."""
        head = request_head(request, _MAX_HEADERS)
        frames = FrameDecoder()
        try:
            async for data in RequestBody(request, head, _IDLE_SECONDS).iter_raw():
                for piece in frames.feed(data):
                    yield piece
            frames.finish()
        except BodyFramingError as error:
            raise S3Error("BadDigest", str(error)) from error

    async def read_raw_body(self, request: MeshRequest, limit: int) -> bytes:
        """Return the whole body as received, not verified. Raises S3Error as `read_body` does."""
        head, found = request_head(request, _MAX_HEADERS), bytearray()
        async for data in RequestBody(request, head, _IDLE_SECONDS).iter_raw():
            found += data
            if len(found) > limit:
                raise S3Error("EntityTooLarge", _TOO_LARGE)
        return bytes(found)

    async def read_body(self, request: MeshRequest, limit: int | None) -> bytes:
        """Return the whole body, of at most `limit` bytes; None: of any length. Raises as `iter_body` does,
        and S3Error EntityTooLarge."""
        found: list[bytes] = []
        size = 0
        async for piece in self.iter_body(request):
            found.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                raise S3Error("EntityTooLarge", _TOO_LARGE)
        return b"".join(found)


class PeerAuthenticator:
    """Authenticates nodes by their signatures. One per process; `derive` is `ClusterSecret.derive_key`."""

    def __init__(self, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._derive, self._clock = derive, clock
        self._secret = ""

    def now(self) -> int:
        """Seconds since the epoch."""
        return self._clock.now_ms() // 1000

    def authenticate_peer(self, request: MeshRequest) -> PeerCaller:
        """Return the caller. Raises S3Error AccessDenied, SignatureDoesNotMatch and others."""
        head = request_head(request, _MAX_HEADERS)
        claim = read_claim(head)
        version = head.headers.get(MAP_HEADER, "")
        if claim is None or not claim.access_key.startswith(PEER_KEY) or claim.presigned:
            raise S3Error("AccessDenied", "Only nodes of this cluster may call this.")
        if MAP_HEADER not in claim.signed_headers or not (version.isascii() and version.isdigit()):
            raise S3Error("AccessDenied", f"A node must sign the version of its cluster map ({MAP_HEADER}).")
        self._secret = self._secret or peer_secret(self._derive(PURPOSE))
        verify(claim, head, self._secret, self.now())
        return PeerCaller(claim.access_key.removeprefix(PEER_KEY), int(version))

    async def answer(self, request: MeshRequest, handler: PeerHandler) -> Reply:
        """Authenticate a call, run its handler, and answer StaleMapError with 421. Raises S3Error."""
        call = self.authenticate_peer(request)
        request.trace.access_key = PEER_KEY + call.node_id
        try:
            return await handler(request, call)
        except StaleMapError as error:
            return stale_map_reply(error.version, self.now())


def peer_route(method: str, prefix: str, handler: PeerHandler) -> HttpRoute:
    """Return a route for other nodes at `prefix` (beginning with `/-/peer/`; everything under it if it ends
    in `/`). The handler may raise S3Error, and StaleMapError if this node uses another map than the caller.
    Typed calls are mounted by `peer_routes`; this is for what they cannot express."""
    if not prefix.startswith(PREFIX):
        raise ValueError(f"{prefix} is not under {PREFIX}")
    return HttpRoute(method, prefix, handler, access="peer")


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
        except ClocksDifferError as error:
            return self._refusal(_UNAVAILABLE, CLOCKS_CODE, str(error))
        except StoreError as error:
            if self._call.errors == "s3":
                raise to_s3_error(error) from error
            known = to_batch_error(error)
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
            return await send_frames(request, [response], self._now())
        if isinstance(response, StreamBody):
            return await send_stream(request, response, self._now())
        return peer_reply(encode_message(response), self._now())

    def _refusal(self, status: int, code: str, message: str) -> Reply:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(status, headers, body, self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000


def peer_reply(body: bytes, now: int) -> Reply:
    """Return a complete response to a node, framed with its checksum."""
    content = frame_body(body)
    return Reply(200, [(FRAMED_HEADER, "1"), ("Content-Length", str(len(content)))], content, now)


async def stream_reply(request: MeshRequest, pieces: AsyncIterable[bytes], now: int) -> StreamedReply:
    """Send a response to a node while it is produced, each piece with its checksum. An error before the first
    piece is raised; a later one closes the connection."""
    transport, keep_alive = request.transport, request.keep_alive
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the peer closed the connection")
    headers = [(FRAMED_HEADER, "1"), ("Transfer-Encoding", "chunked")]
    head = head_bytes(200, headers, now, connection=connection_header(request, keep_alive))
    try:
        async for piece in pieces:
            for start in range(0, len(piece), MAX_PIECE_BYTES):
                part = piece[start : start + MAX_PIECE_BYTES]
                announced = piece_header(part)
                transport.write(head + b"%x\r\n%b" % (len(part) + len(announced), announced))
                head = b""
                transport.write(part)
                transport.write(b"\r\n")
            await request.drain()
    except Exception as error:
        if head:
            raise
        transport.abort()
        raise ConnectionAbortedError(f"a response in progress cannot be finished: {error}") from error
    transport.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(END_MARKER), END_MARKER))
    await request.drain()
    return StreamedReply(200, keep_alive=keep_alive)
