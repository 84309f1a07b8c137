"""The body of an HTTP request: read at the client's pace, decoded, hashed and verified.

`100 Continue` is sent when the first byte of the body is read, that is, after the request was admitted.
Bodies arrive in bounded pieces; large ones are hashed in a thread while the next piece arrives. `digest`
raises unless length, checksums and chunk signatures were all correct.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from meshd.server.body_stream import MalformedBodyError
from meshd.util.tenant_limits import Admission, AdmissionRejectedError, current_tenant
from meshd.util.timeouts import timeout
from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.errors import S3Error
from meshwire.sigv4 import STREAMING_PAYLOADS, UNSIGNED_PAYLOAD
from meshwire.sigv4.aws_chunked import ChunkedDecoder
from meshwire.sigv4.verifier import read_payload_hash

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from meshd.server.request import MeshRequest
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.s3.parse_request import RequestHead
    from meshwire.sigv4 import Claim, Verified
    from meshwire.sigv4.sigv2 import SigV2Claim


HASHED_INLINE: Final = 64 << 10
"""Hashing as many bytes costs about as much as a thread switch; smaller pieces are hashed in place."""
_PIECE = 256 << 10
LEAST_RATE = 100
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_room: Final = Admission(256 << 20)  # bytes of documents that this process receives concurrently


class RequestBody:
    """The body of an HTTP request, as `meshd.core.object_io.Body`. `claim` and `verified`: its signature;
    None if it has none, or as long as nobody has verified it."""

    def __init__(
        self,
        request: MeshRequest,
        head: RequestHead,
        idle_seconds: float,
        claim: Claim | SigV2Claim | None = None,
        verified: Verified | None = None,
    ) -> None:
        self._request, self._head, self._verified = request, head, verified
        self._idle_seconds = idle_seconds
        payload_hash = _payload_hash(head) if claim is None else claim.payload_hash
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
        payload = self.iter_raw() if decoder is None else _decode(self.iter_raw(), decoder)
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
        return ChunkedDecoder(self._payload_hash, self._verified, announced, self.size)

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
                    async with timeout(self._idle_seconds):
                        data = await content.read_available()
                self.received += len(data)
                patience.check(self.received)
                if data:
                    yield data
        except TimeoutError:
            raise S3Error("RequestTimeout") from None
        except MalformedBodyError as error:
            raise S3Error("IncompleteBody") from error
        if content.truncated:
            raise S3Error("IncompleteBody")

    def _say_continue(self) -> None:
        """Send `100 Continue`, even for an empty body or one that has arrived: botocore waits for it, and
        otherwise misreads the next response on the connection."""
        transport = self._request.transport
        if self._expects_continue and transport is not None and not self._request.continued:
            transport.write(CONTINUE)
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


async def _decode(source: AsyncIterator[bytes], decoder: ChunkedDecoder) -> AsyncIterator[bytes]:
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
        if len(block) <= HASHED_INLINE:
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
