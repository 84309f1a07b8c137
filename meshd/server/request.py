"""HTTP requests: the request object with its per-request state, and the request body.

Law: no S3 behaviour in the request object. `100 Continue` goes out when the first byte of the body is
asked for, that is, after the request was admitted. Bodies arrive in bounded pieces; large ones are
hashed in a thread while the next piece arrives. Invariant: `digest` raises unless length, checksums and
chunk signatures were all correct.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from meshd.util.admission import Admission, AdmissionRejectedError, current_tenant
from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.errors import S3Error
from meshwire.sigv4 import STREAMING_PAYLOADS, UNSIGNED_PAYLOAD
from meshwire.sigv4.aws_chunked import ChunkedDecoder
from meshwire.sigv4.parse_authorization import read_payload_hash

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader
    from aiohttp.web_protocol import RequestHandler

    from meshd.auth.authorizer import RequestContext
    from meshd.server.peer.endpoint import PeerAuthenticator
    from meshd.server.proxy.hop_headers import Hop
    from meshd.server.request_trace import RequestTrace
    from meshd.server.s3.authentication import VerifiedSigner
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.s3.parse_request import RequestHead


class MeshRequest(web.BaseRequest):
    """`truncated`: the client ended its side before the body was whole. `continued`: it was told `100
    Continue`.

    `pressed`: answers should not be kept in memory for slow clients just now.

    `verified_body`: a small body that was read and compared with its signed digest before the handler was
    called. `held_body`: the whole body, not verified, read to be passed on. `hop`: the node that passed this
    request on, and what it says of the client. `gate` verifies other nodes' calls. `trace`, `signer`
    (who signed) and `context` (what policies may ask) are there for native requests.
    """

    ATTRS = web.BaseRequest.ATTRS | frozenset(
        {"context", "continued", "gate", "held_body", "hop", "signer", "trace", "verified_body"}
    )

    continued: bool = False
    verified_body: bytes | None = None
    signer: VerifiedSigner | None = None
    context: RequestContext | None = None
    gate: PeerAuthenticator | None = None
    held_body: bytes | None = None
    hop: Hop | None = None
    trace: RequestTrace

    @property
    def truncated(self) -> bool:
        return getattr(self.protocol, "truncated_body", None) is self.content

    @property
    def is_last(self) -> bool:
        return getattr(self.protocol, "at_its_last", False)

    @property
    def pressed(self) -> bool:
        return getattr(self.protocol, "pressed", False)

    async def read(self) -> bytes:
        """The whole body, the verified one where there is one."""
        return await super().read() if self.verified_body is None else self.verified_body


def request_factory() -> Callable[..., MeshRequest]:
    """What the server calls for every request head. Must be made in the running loop."""
    loop = asyncio.get_running_loop()

    def make(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> MeshRequest:
        return MeshRequest(message, payload, protocol, writer, task, loop)

    return make


# Hashing a piece of this size takes about as long as a thread hop costs; smaller ones are hashed in place.
_INLINE = 64 << 10
_PIECE = 256 << 10
LEAST_RATE = 100
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_room: Final = Admission(256 << 20)  # bytes of documents that are being received by this process


class RequestBody:
    """`meshd.core.object_io.Body` over an HTTP request."""

    def __init__(
        self, request: MeshRequest, head: RequestHead, signer: VerifiedSigner, idle_seconds: float
    ) -> None:
        self._request, self._head, self._signer = request, head, signer
        self._idle_seconds = idle_seconds
        payload_hash = _payload_hash(head) if signer.claim is None else signer.claim.payload_hash
        self._payload_hash = payload_hash
        self._chunked = payload_hash in STREAMING_PAYLOADS
        self._expects_continue = head.headers.get("expect", "").lower() == "100-continue"
        self._digest: BodyDigest | None = None
        self.received = 0

    def __repr__(self) -> str:
        return f"<RequestBody of {self.size} bytes, {self.received} received>"

    @property
    def size(self) -> int | None:
        """Length of the payload in bytes, None for a body of HTTP chunks. Raises S3Error InvalidArgument."""
        if not self._chunked:
            return self._request.content_length
        declared = self._head.headers.get("x-amz-decoded-content-length")
        return None if declared is None else _length(declared)

    def require_length(self) -> None:
        """Raise S3Error MissingContentLength unless the client says, one way or another, where its body
        ends. An aws-chunked body says it itself, in its last chunk: its decoded length may be missing."""
        headers = self._head.headers
        if "content-length" not in headers and "transfer-encoding" not in headers:
            raise S3Error("MissingContentLength")

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        """Pieces of at most about 512 KiB. While the caller writes one, a thread hashes it."""
        verifier = BodyVerifier(digests, None if self._chunked else self._payload_hash, extra=also)
        decoder = self._decoder(digests) if self._chunked else None
        payload = self.iter_raw() if decoder is None else _decoded(self.iter_raw(), decoder)
        async for block in hashed_blocks(payload, verifier):
            yield block
        self._digest = self._check(verifier, decoder)

    def digest(self) -> BodyDigest:
        if self._digest is None:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        """All of it. Raises S3Error MaxMessageLengthExceeded as soon as it is known to exceed `limit`
        bytes, SlowDown when too much is being received already."""
        blocks: list[bytes] = []
        with reserve_body_memory(self.size, limit):
            async for block in self.pieces(digests):
                blocks.append(block)
                if sum(map(len, blocks)) > limit:
                    raise S3Error("MaxMessageLengthExceeded")
        return b"".join(blocks)

    def _decoder(self, digests: BodyDigests) -> ChunkedDecoder:
        announced = tuple(f"x-amz-checksum-{algorithm}" for algorithm in digests.trailer)
        return ChunkedDecoder(self._payload_hash, self._signer.verified, announced, self.size)

    def _check(self, verifier: BodyVerifier, decoder: ChunkedDecoder | None) -> BodyDigest:
        trailers = {} if decoder is None else decoder.finish()
        digest = verifier.finish(trailers)
        if self.size is not None and digest.size != self.size:
            raise S3Error("IncompleteBody")
        return digest

    async def iter_raw(self) -> AsyncGenerator[bytes, None]:
        """What arrives, as it arrives, neither decoded nor checked. Raises S3Error IncompleteBody,
        RequestTimeout; ConnectionError when the client goes away in the middle."""
        held = self._request.held_body
        if held is not None:
            self.received = len(held)
            if held:
                yield held
            return
        content = self._request.content
        self._say_continue()
        patience = _MinimumRate(self._idle_seconds)
        try:
            while True:
                data = content.read_nowait() if content.total_bytes > self.received else b""
                if not data:
                    if content.at_eof():
                        break
                    async with asyncio.timeout(self._idle_seconds):
                        data = await content.readany()
                self.received += len(data)
                patience.check(self.received)
                if data:
                    yield data
        except TimeoutError:
            raise S3Error("RequestTimeout") from None
        except RequestPayloadError as error:
            raise S3Error("IncompleteBody") from error
        if self._request.truncated:
            raise S3Error("IncompleteBody")

    def _say_continue(self) -> None:
        """Also for an empty body, and for one that is here already: botocore waits for it before it
        believes that a connection is in order, and misreads the next answer on it otherwise."""
        transport = self._request.transport
        if self._expects_continue and transport is not None:
            transport.write(_CONTINUE)
            self._request.continued = True
        self._expects_continue = False


@contextmanager
def reserve_body_memory(size: int | None, limit: int) -> Iterator[None]:
    """Room for a body of `size` bytes (None: unknown), at most `limit`, while it is received: who sends many
    slowly fills no node, nor takes the others' share. Raises S3Error MaxMessageLengthExceeded, SlowDown."""
    if (size or 0) > limit:
        raise S3Error("MaxMessageLengthExceeded")
    try:
        with _room.hold(current_tenant(), max(1, limit if size is None else size)):
            yield
    except AdmissionRejectedError as error:
        why = "Too many requests with documents are being received; try again."
        raise S3Error("SlowDown", why, headers={"retry-after": "1"}) from error


async def _decoded(source: AsyncIterator[bytes], decoder: ChunkedDecoder) -> AsyncIterator[bytes]:
    async for data in source:
        for piece in decoder.feed(data):
            yield piece


async def hashed_blocks(pieces: AsyncIterator[bytes], verifier: BodyVerifier) -> AsyncGenerator[bytes, None]:
    """The pieces joined to at least 256 KiB. While the consumer writes a block, a thread hashes it."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            block = held[0] if len(held) == 1 else b"".join(held)
            held, size = [], 0
            hashing = asyncio.get_running_loop().run_in_executor(None, verifier.update, block)
            try:
                yield block
            finally:
                await hashing
    if held:
        block = b"".join(held)
        if len(block) <= _INLINE:
            verifier.update(block)
        else:
            await asyncio.get_running_loop().run_in_executor(None, verifier.update, block)
        yield block


class _MinimumRate:
    """Bodies that dribble in: less than LEAST_RATE bytes a second over a whole idle time is as good as
    nothing."""

    __slots__ = ("_loop", "_seconds", "_since", "_then")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._since, self._then = seconds, self._loop.time(), 0

    def check(self, received: int) -> None:
        """Raise TimeoutError if too little came since the last time this was satisfied."""
        passed = self._loop.time() - self._since
        if passed < self._seconds:
            return
        if received - self._then < LEAST_RATE * passed:
            raise TimeoutError
        self._since, self._then = self._loop.time(), received


def _payload_hash(head: RequestHead) -> str:
    """What an unsigned request says of its body: it may be aws-chunked, too. Raises S3Error
    InvalidArgument."""
    return read_payload_hash(head.headers.get("x-amz-content-sha256") or UNSIGNED_PAYLOAD)


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise S3Error("InvalidArgument", "x-amz-decoded-content-length must be a number of bytes.")
    return int(text)
