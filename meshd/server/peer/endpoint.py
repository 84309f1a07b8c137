"""Endpoint for other nodes under `/-/peer/`: authenticates the caller and checks the body.

Only nodes that know the cluster's secret get in; a node with a different cluster map gets 421. Nothing of a
body is read before the handler asks for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.rpc.peer_client import MAP_HEADER, PEER_KEY, PURPOSE, StaleMapError, peer_secret
from meshd.rpc.peer_rpc import BodyFramingError, FrameDecoder
from meshd.server.proxy.node_headers import stale_map_reply
from meshd.server.request import request_head
from meshd.server.request_body import RequestBody
from meshwire.errors import S3Error
from meshwire.sigv4 import read_claim, verify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
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


PeerHandler = Callable[["MeshRequest", PeerCaller], Awaitable["Reply"]]


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


async def answer_peer(
    request: MeshRequest, authenticator: PeerAuthenticator | None, handler: PeerHandler
) -> Reply:
    """Authenticate a call, run its handler, and answer StaleMapError with 421. Raises S3Error."""
    if authenticator is None:
        raise S3Error("AccessDenied", "This node belongs to no cluster.")
    call = authenticator.authenticate_peer(request)
    request.trace.access_key = PEER_KEY + call.node_id
    try:
        return await handler(request, call)
    except StaleMapError as error:
        return stale_map_reply(error.version, authenticator.now())
