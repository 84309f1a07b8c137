"""HTTP requests: the request object with its per-request state, and the request body.

The request object has no S3 behaviour. `100 Continue` is sent when the first byte of the body is read, that
is, after the request was admitted. Bodies arrive in bounded pieces; large ones are hashed in a thread while
the next piece arrives. `digest` raises unless length, checksums and chunk signatures were all correct.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from meshd.server.body_stream import NO_BODY, MalformedBodyError
from meshd.util.admission import Admission, AdmissionRejectedError, current_tenant
from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.errors import S3Error
from meshwire.sigv4 import STREAMING_PAYLOADS, UNSIGNED_PAYLOAD
from meshwire.sigv4.aws_chunked import ChunkedDecoder
from meshwire.sigv4.parse_authorization import read_payload_hash

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from meshd.auth.identity import RequestContext
    from meshd.server.body_stream import BodyStream
    from meshd.server.connection import Connection
    from meshd.server.http_parser import ParsedHead
    from meshd.server.peer.endpoint import PeerAuthenticator
    from meshd.server.proxy.hop_headers import Hop
    from meshd.server.request_trace import RequestTrace
    from meshd.server.s3.authentication import VerifiedSigner
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.s3.parse_request import RequestHead


class MeshRequest:
    """A request: its parsed head (`headers` by lower-case name), its body as it arrives (`content`), and what
    handlers add to it.

    `continued`: `100 Continue` was sent. `verified_body`: a small body that was read and compared with its
    signed digest before the handler was called. `held_body`: the whole body, not verified, read in order to
    forward it. `hop`: what the node that forwarded this request reports. `gate` verifies calls of other
    nodes. `trace`, `signer` and `context` (the facts for policies) are set for native requests.
    `response_started`: bytes of the response may have been sent.
    """

    __slots__ = (
        "connection",
        "content",
        "content_length",
        "context",
        "continued",
        "gate",
        "head_size",
        "headers",
        "held_body",
        "hop",
        "http_version",
        "keep_alive",
        "method",
        "raw_headers",
        "raw_path",
        "response_started",
        "signer",
        "trace",
        "verified_body",
    )

    trace: RequestTrace

    def __init__(self, connection: Connection, head: ParsedHead, content: BodyStream) -> None:
        self.connection, self.content = connection, content
        (
            self.method,
            self.raw_path,
            self.http_version,
            self.headers,
            self.raw_headers,
            self.head_size,
            self.keep_alive,
            self.content_length,
            _,
        ) = head
        self.continued = self.response_started = False
        self.verified_body: bytes | None = None
        self.held_body: bytes | None = None
        self.signer: VerifiedSigner | None = None
        self.context: RequestContext | None = None
        self.gate: PeerAuthenticator | None = None
        self.hop: Hop | None = None

    def __repr__(self) -> str:
        return f"<MeshRequest {self.method} {self.raw_path[:100]}>"

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection's transport; None once it is closed."""
        return self.connection.transport

    @property
    def remote(self) -> str:
        """The client's address."""
        return self.connection.remote

    @property
    def secure(self) -> bool:
        """Whether the client speaks TLS."""
        return self.connection.secure

    @property
    def path(self) -> str:
        """The target's path, decoded."""
        return unquote(self.raw_path.partition("?")[0])

    @property
    def body_exists(self) -> bool:
        """Whether the head announces a body."""
        return self.content is not NO_BODY

    @property
    def truncated(self) -> bool:
        """Whether the client closed its side before the body was complete."""
        return self.connection.truncated_body is self.content

    @property
    def is_last(self) -> bool:
        """Whether the client sends nothing after this request."""
        return self.connection.at_its_last

    @property
    def pressed(self) -> bool:
        """Whether responses should not be buffered in memory at present."""
        return self.connection.pressed

    async def read(self) -> bytes:
        """Return the whole body; the verified one if there is one."""
        if self.verified_body is not None:
            return self.verified_body
        pieces: list[bytes] = []
        while not self.content.exhausted:
            pieces.append(await self.content.read_available())
        return b"".join(pieces)

    async def drain(self) -> None:
        """Wait until the client has read most of what is queued. Raises ConnectionResetError."""
        await self.connection.drain()


# Hashing a piece of this size costs about as much as a thread switch; smaller ones are hashed in place.
_INLINE = 64 << 10
_PIECE = 256 << 10
LEAST_RATE = 100
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_room: Final = Admission(256 << 20)  # bytes of documents that this process receives concurrently


class RequestBody:
    """The body of an HTTP request, as `meshd.core.object_io.Body`."""

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
        """Bytes of the payload; None for a body of HTTP chunks. Raises S3Error InvalidArgument."""
        if not self._chunked:
            return self._request.content_length
        declared = self._head.headers.get("x-amz-decoded-content-length")
        return None if declared is None else _length(declared)

    def require_length(self) -> None:
        """Raise S3Error MissingContentLength unless the client declares where its body ends. The last chunk
        of an aws-chunked body does, so its decoded length may be missing."""
        headers = self._head.headers
        if "content-length" not in headers and "transfer-encoding" not in headers:
            raise S3Error("MissingContentLength")

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        """Yield pieces of at most about 512 KiB. While the caller writes one, a thread hashes it."""
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
        """Return the whole body. Raises S3Error MaxMessageLengthExceeded as soon as it is known to exceed
        `limit` bytes, SlowDown if too much is being received already."""
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
        """Yield data as it arrives, neither decoded nor verified. Raises S3Error IncompleteBody,
        RequestTimeout; ConnectionError if the client disconnects."""
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
                data = content.read_nowait()
                if not data:
                    if content.exhausted:
                        break
                    async with asyncio.timeout(self._idle_seconds):
                        data = await content.read_available()
                self.received += len(data)
                patience.check(self.received)
                if data:
                    yield data
        except TimeoutError:
            raise S3Error("RequestTimeout") from None
        except MalformedBodyError as error:
            raise S3Error("IncompleteBody") from error
        if self._request.truncated:
            raise S3Error("IncompleteBody")

    def _say_continue(self) -> None:
        """Send `100 Continue`, even for an empty body or one that has arrived: botocore waits for it, and
        otherwise misreads the next response on the connection."""
        transport = self._request.transport
        if self._expects_continue and transport is not None:
            transport.write(_CONTINUE)
            self._request.continued = True
        self._expects_continue = False


@contextmanager
def reserve_body_memory(size: int | None, limit: int) -> Iterator[None]:
    """Reserve memory for a body of `size` bytes (None: unknown), at most `limit`, while it is received, so
    that many slow senders neither fill the node nor take the share of others. Raises S3Error
    MaxMessageLengthExceeded, SlowDown."""
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
    """Join pieces to blocks of at least 256 KiB. While the consumer writes a block, a thread hashes it."""
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
    """Detects bodies that arrive too slowly: less than LEAST_RATE bytes per second over a whole idle time
    counts as silence."""

    __slots__ = ("_loop", "_seconds", "_since", "_then")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._since, self._then = seconds, self._loop.time(), 0

    def check(self, received: int) -> None:
        """Raise TimeoutError if too little arrived since the last successful check."""
        passed = self._loop.time() - self._since
        if passed < self._seconds:
            return
        if received - self._then < LEAST_RATE * passed:
            raise TimeoutError
        self._since, self._then = self._loop.time(), received


def _payload_hash(head: RequestHead) -> str:
    """Return the payload hash of an unsigned request, which may be aws-chunked too. Raises S3Error
    InvalidArgument."""
    return read_payload_hash(head.headers.get("x-amz-content-sha256") or UNSIGNED_PAYLOAD)


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise S3Error("InvalidArgument", "x-amz-decoded-content-length must be a number of bytes.")
    return int(text)
