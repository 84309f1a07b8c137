"""Pieces in flight from an origin, and the spool files or memory that receive their bytes.

Every reader acquires the flight and releases it; a piece that is not cached is freed with its last reader.
Each byte is written once. Other processes of the node read the same file through its descriptor. `have`
only grows until the flight finishes or fails, and counts only bytes that are in the file.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.origins.client.origin_api import OriginDownError
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.client.origin_api import ObjectFacts, OriginResponse
    from meshd.store.engine.writer import DiskObjectWriter


class InFlightPiece:
    """A piece in flight. `fd` holds `have` of `length` bytes, from `base` on; -1 until the origin answers."""

    __slots__ = ("_holders", "_waiters", "base", "done", "error", "facts", "fd", "have", "length")

    def __init__(self) -> None:
        self.fd, self.base = -1, 0
        self.facts: ObjectFacts | None = None
        self.length, self.have = -1, 0
        self.done = False
        self.error: Exception | None = None
        self._holders = 1
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        how = " done" if self.done else ""
        return f"<InFlightPiece {self.have} of {self.length}{how} {self.error or ''}>"

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    # --- the fetcher's side

    def set_response(self, facts: ObjectFacts, length: int, place: tuple[int, int] | None = None) -> None:
        """Set facts and length. `place`: a file, which the flight then owns, and the offset of the bytes in
        it; None: memory."""
        self.fd, self.base = place or (os.memfd_create("flight", os.MFD_CLOEXEC), 0)
        self.facts, self.length = facts, length
        self._wake()

    def append_bytes(self, data: bytes) -> None:
        """Append bytes to a flight in memory; this never waits for a disk."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self.fd, view, self.have)
            self.have += written
            view = view[written:]
        self._wake()

    def extend_to(self, have: int) -> None:
        """Record that another process or a thread has written the first `have` bytes."""
        self.have = have
        self._wake()

    def check(self) -> None:
        """Raise OriginDownError if bytes are missing."""
        if self.have != self.length:
            raise OriginDownError("the origin sent fewer bytes than it announced")

    def finish(self) -> None:
        self.done = True
        self._wake()

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error
        self._wake()

    # --- the readers' side

    def acquire(self) -> InFlightPiece:
        self._holders += 1
        return self

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    async def wait_for_facts(self) -> ObjectFacts:
        """Wait for the origin's facts of the object. Raises OriginError."""
        while self.facts is None and not self.done:
            await self._change()
        if self.facts is None:
            raise self.error or OriginDownError("the origin did not answer")
        return self.facts

    async def wait_for_bytes(self, wanted: int) -> int:
        """Wait for at least `wanted` bytes and return how many have arrived. Raises OriginError."""
        while self.have < wanted and not self.done:
            await self._change()
        if self.have < wanted:
            raise self.error or OriginDownError("the origin sent fewer bytes than it announced")
        return self.have

    async def wait_until_done(self) -> None:
        """Wait until all bytes have arrived. Raises OriginError."""
        while not self.done:
            await self._change()
        if self.error is not None:
            raise self.error

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


_STEP: Final = 1 << 20  # bytes that are written at a time, after the first write
_STILL: Final = 8.0  # seconds without a byte after which the rest is requested again


class FetchSpool:
    """Receives the bytes of one flight. `in_memory`: nothing is written to disks until its end."""

    def __init__(self, flight: InFlightPiece, *, in_memory: bool = False) -> None:
        self.flight, self._in_memory = flight, in_memory
        self._writer: DiskObjectWriter | None = None
        self._gathered = 0

    def __repr__(self) -> str:
        return f"<FetchSpool of {self.flight!r} {'in memory' if self._writer is None else self._writer}>"

    async def begin_spool(
        self, cache_store: CacheStore, bucket: Bucket, key: str, number: int, reply: OriginResponse
    ) -> None:
        """Prepare a file or memory for the bytes, once the origin has answered."""
        writer = cache_store.open_writer(bucket, key, number, reply.facts, reply.length)
        try:
            place = None if self._in_memory else await writer.share_file()
        except StoreError:  # a full disk: the piece is received in memory and not cached
            place = None
        if place is None:
            await writer.abort()
        else:
            self._writer = writer
        self.flight.set_response(reply.facts, reply.length, place)

    async def receive(self, reply: OriginResponse) -> None:
        """Receive all bytes of a response. Raises OriginError; OriginDownError also if it stalls;
        StoreError."""
        loop, left = asyncio.get_running_loop(), reply.length
        try:
            async with aclosing(reply.pieces) as pieces, timeout(_STILL) as patience:
                async for piece in pieces:
                    patience.reschedule(loop.time() + _STILL)
                    await self._take(piece if len(piece) <= left else piece[:left])
                    left -= len(piece)
                    if left <= 0:
                        return
        except TimeoutError:
            metrics.origin_errors.inc()
            raise OriginDownError(f"the origin sent nothing for {_STILL:g} seconds") from None
        finally:
            await self._flush()  # a retry continues after the bytes received so far

    async def _take(self, piece: bytes) -> None:
        if self._writer is None:
            self.flight.append_bytes(piece)
            return
        await self._writer.write(piece)
        self._gathered += len(piece)
        if self._gathered >= _STEP or not self.flight.have:
            await self._flush()

    async def _flush(self) -> None:
        if self._writer is not None:
            self._gathered = 0
            self.flight.extend_to(await self._writer.flushed_bytes())

    async def finished_writer(
        self, cache_store: CacheStore, bucket: Bucket, key: str, number: int
    ) -> DiskObjectWriter:
        """Return a writer that has all bytes of the flight. Raises StoreError."""
        flight, writer = self.flight, self._writer
        if writer is None:
            assert flight.facts is not None
            writer = self._writer = cache_store.open_writer(bucket, key, number, flight.facts, flight.length)
            if flight.length:
                await writer.write(os.pread(flight.fd, flight.length, flight.base))
        return writer

    async def aclose(self) -> None:
        """Discard the file unless it was cached."""
        if self._writer is not None:
            await self._writer.abort()
