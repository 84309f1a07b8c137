"""Endpoint for other nodes under `/-/peer/`: authenticates the caller, checks the body, frames the reply.

Only nodes that know the cluster's secret get in; a node with a different cluster map gets 421. Nothing of a
body is read before the handler asks for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.rpc.peer_client import (
    FRAMED_HEADER,
    MAP_HEADER,
    PEER_KEY,
    PURPOSE,
    StaleMapError,
    peer_secret,
)
from meshd.rpc.peer_rpc import (
    END_MARKER,
    MAX_PIECE_BYTES,
    PREFIX,
    BodyFramingError,
    FrameDecoder,
    frame_body,
    piece_header,
)
from meshd.server.http_server import HttpRoute
from meshd.server.proxy.hop_headers import stale_map_reply
from meshd.server.request import RequestBody
from meshd.server.response import Reply, StreamedReply, connection_header, head_bytes
from meshd.server.s3.authentication import ANONYMOUS, request_head
from meshwire.errors import S3Error
from meshwire.sigv4 import read_claim, verify

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock

_MAX_HEADERS = 64 << 10
_IDLE_SECONDS = 60.0
_TOO_LARGE = "The body is larger than this call allows."


@dataclass(frozen=True, slots=True)
class PeerCaller:
    """The calling node, and the version of the cluster map that it uses."""

    node_id: str
    map_version: int

    async def iter_body(self, request: MeshRequest) -> AsyncIterator[bytes]:
        """Yield the body, verified. Raises S3Error BadDigest, IncompleteBody, RequestTimeout."""
        head = request_head(request, _MAX_HEADERS)
        frames = FrameDecoder()
        try:
            async for data in RequestBody(request, head, ANONYMOUS, _IDLE_SECONDS).iter_raw():
                for piece in frames.feed(data):
                    yield piece
            frames.finish()
        except BodyFramingError as error:
            raise S3Error("BadDigest", str(error)) from error

    async def read_raw_body(self, request: MeshRequest, limit: int) -> bytes:
        """Return the whole body as received, not verified. Raises S3Error as `read_body` does."""
        head, found = request_head(request, _MAX_HEADERS), bytearray()
        async for data in RequestBody(request, head, ANONYMOUS, _IDLE_SECONDS).iter_raw():
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


PeerHandler = Callable[["MeshRequest", PeerCaller], Awaitable["Reply"]]


def peer_route(method: str, prefix: str, handler: PeerHandler) -> HttpRoute:
    """Return a route for other nodes at `prefix` (beginning with `/-/peer/`; everything under it if it ends
    in `/`). The handler may raise S3Error, and StaleMapError if this node uses another map than the caller.
    Typed calls are mounted by `peer_routes`; this is for what they cannot express."""
    if not prefix.startswith(PREFIX):
        raise ValueError(f"{prefix} is not under {PREFIX}")
    return HttpRoute(method, prefix, _PeerHandlerAdapter(handler).handle, auth=False, peer=True)


class _PeerHandlerAdapter:
    """Authenticates a call, runs its handler, and answers StaleMapError with 421."""

    def __init__(self, handler: PeerHandler) -> None:
        self._handler = handler

    async def handle(self, request: MeshRequest) -> Reply:
        gate = request.gate
        if gate is None:
            raise S3Error("AccessDenied", "This node belongs to no cluster.")
        call = gate.authenticate_peer(request)
        request.trace.access_key = PEER_KEY + call.node_id
        try:
            return await self._handler(request, call)
        except StaleMapError as error:
            return stale_map_reply(error.version, gate.now())


class PeerAuthenticator:
    """Authenticates nodes by their signatures. One per process; `derive` is `ClusterSecret.derive_key`."""

    def __init__(self, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._derive, self._clock = derive, clock
        self._secret = ""

    def __repr__(self) -> str:
        return "<PeerAuthenticator>"

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


def peer_reply(body: bytes, now: int, *, status: int = 200) -> Reply:
    """Return a complete response to a node, framed with its checksum."""
    content = frame_body(body)
    return Reply(status, [(FRAMED_HEADER, "1"), ("Content-Length", str(len(content)))], content, now)


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
