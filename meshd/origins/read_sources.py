"""Read sources of backed objects: the cached object, its cached chunks, and chunks in flight.

Law: all sources of a read serve the same ETag. What one of them could not give is not looked up in the cache
again during the read. At most `_AHEAD` chunks are in flight for a reader. Invariant: every acquired flight is
released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from meshd.core.read_source import ReadSource
from meshd.origins.cache.cache_store import CHUNK_BYTES
from meshd.origins.client.origin_api import (
    OriginError,
    OriginKeyError,
    OriginMissingError,
    OriginPieceError,
    OriginRangeError,
    OriginRefusedError,
)
from meshd.store.errors import CorruptExtentError, DiskFailedError, ExtentGoneError
from meshd.store.records import Span
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from meshd.control.buckets import Bucket
    from meshd.origins.cache.in_flight import InFlightPiece
    from meshd.origins.client.origin_api import ObjectFacts
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record

_AHEAD: Final = 12
"""Chunks in flight for one reader."""
_STEP: Final = 512 << 10
"""Bytes that a reader is given at a time, after the first."""
_FLIGHTS: Final = 3
"""Flights of one chunk, if a disk of the cache fails under them, until the read fails."""
_PAUSE_S: Final = 0.2
"""Seconds before another flight."""
_UNREADABLE: Final = (ExtentGoneError, CorruptExtentError, DiskFailedError)


class ChunkSource(Protocol):
    """Where chunks come from."""

    def cached_chunk(self, bucket: Bucket, key: str, facts: ObjectFacts, number: int) -> Record | None:
        """Returns the record of a cached chunk."""
        ...

    async def start_chunk(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        """Returns the flight of a chunk, started if need be."""
        ...


class Readahead:
    """The chunks that one reader has in flight. `offset` and `length`: what is read; `first`: a chunk that
    is in flight already, given away."""

    def __init__(
        self,
        chunks: ChunkSource,
        bucket: Bucket,
        key: str,
        facts: ObjectFacts,
        offset: int,
        length: int,
        first: tuple[int, InFlightPiece] | None = None,
    ) -> None:
        self._chunks, self._bucket, self.key, self._facts = chunks, bucket, key, facts
        self._unreadable = set[int]()
        self._next = offset // CHUNK_BYTES
        self._last = (offset + length - 1) // CHUNK_BYTES
        self._tasks: deque[tuple[int, asyncio.Task[InFlightPiece]]] = deque()
        self._first = first

    def __repr__(self) -> str:
        return f"<Readahead of {self.key[:80]!r}, {len(self._tasks)} chunks in flight>"

    def mark_unreadable(self, number: int) -> None:
        """Records that the cache cannot give this chunk."""
        self._unreadable.add(number)

    def cached_chunk(self, number: int) -> Record | None:
        """Returns the record of a chunk that the cache has."""
        if number in self._unreadable or (self._first is not None and self._first[0] == number):
            return None
        return self._chunks.cached_chunk(self._bucket, self.key, self._facts, number)

    def prefetch_after(self, number: int) -> None:
        """Starts the flights of the chunks that follow chunk `number`."""
        self._next = max(self._next, number + 1)
        while self._tasks and self._tasks[0][0] <= number:
            _release_when_done(self._tasks.popleft()[1])
        while self._next <= self._last and self._next <= number + _AHEAD:
            if self.cached_chunk(self._next) is None:
                self._tasks.append((self._next, self._fetch(self._next)))
            self._next += 1

    async def chunk_flight(self, number: int) -> InFlightPiece:
        """Returns the flight of chunk `number`; the caller releases it. Raises OriginError."""
        if self._first is not None and self._first[0] == number:
            flight = self._first[1]
            self._first = None
            self.prefetch_after(number)
            return flight
        task = None
        while self._tasks and self._tasks[0][0] <= number:
            at, found = self._tasks.popleft()
            if at == number:
                task = found
            else:
                _release_when_done(found)
        if task is None:
            task = self._fetch(number)
        self.prefetch_after(number)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _release_when_done(task)
            raise

    def _fetch(self, number: int) -> asyncio.Task[InFlightPiece]:
        return asyncio.ensure_future(
            self._chunks.start_chunk(self._bucket, self.key, number, self._facts.etag)
        )

    def close(self) -> None:
        """Releases the flights. Idempotent."""
        if self._first is not None:
            self._first[1].release()
            self._first = None
        while self._tasks:
            _release_when_done(self._tasks.popleft()[1])


def _release_when_done(task: asyncio.Task[InFlightPiece]) -> None:
    def release(done: asyncio.Task[InFlightPiece]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release()

    task.add_done_callback(release)


class CachedObjectSource(ReadSource):
    """An object that is cached as a whole. `on_read` is called when its bytes are first read."""

    def __init__(
        self, store: ObjectStore, record: Record, readahead: Readahead, on_read: Callable[[], None]
    ) -> None:
        self._store, self._record, self._readahead = store, record, readahead
        self._on_read = on_read
        self._opened = False

    def __repr__(self) -> str:
        return f"<CachedObjectSource of {self._readahead.key[:80]!r}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        if self._opened:  # it has failed: what is left comes chunk by chunk
            return
        self._opened = True
        self._on_read()
        # An object that was evicted at this moment is not a failure: nothing was sent yet.
        with suppress(*_UNREADABLE), self._store.open_spans(self._record, offset, length) as spans:
            yield spans

    def mark_failed(self, offset: int) -> None:
        self._readahead.mark_unreadable(offset // CHUNK_BYTES)


class CachedChunksSource(ReadSource):
    """The chunks that are cached one after the other; ends at the first that is not."""

    def __init__(self, store: ObjectStore, readahead: Readahead) -> None:
        self._store, self._readahead = store, readahead

    def __repr__(self) -> str:
        return f"<CachedChunksSource of {self._readahead.key[:80]!r}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        end = offset + length
        while offset < end:
            number = offset // CHUNK_BYTES
            record = self._readahead.cached_chunk(number)
            if record is None:
                return
            begin, taken = offset % CHUNK_BYTES, min(end - offset, CHUNK_BYTES - offset % CHUNK_BYTES)
            with suppress(*_UNREADABLE), self._store.open_spans(record, begin, taken) as spans:
                self._readahead.prefetch_after(number)
                yield spans
                offset += taken
                continue
            self._readahead.mark_unreadable(number)

    def mark_failed(self, offset: int) -> None:
        self._readahead.mark_unreadable(offset // CHUNK_BYTES)


class _LostPieceError(S3Error):
    """A disk of the cache failed under a flight; another flight may go through memory."""

    def __init__(self, error: OriginPieceError) -> None:
        super().__init__("ServiceUnavailable", str(error))


class FlightSource(ReadSource):
    """The rest of one chunk, as it comes from the origin or from another node's cache. `pause`: seconds
    before it is requested."""

    label = "origin"
    failures = (_LostPieceError,)

    def __init__(self, readahead: Readahead, pause: float = 0.0) -> None:
        self._readahead, self._pause = readahead, pause

    def __repr__(self) -> str:
        return f"<FlightSource of {self._readahead.key[:80]!r}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        if self._pause:  # until the process that writes to the cache has noticed the failure, too
            await asyncio.sleep(self._pause)
        begin = offset % CHUNK_BYTES
        stop = min(begin + length, CHUNK_BYTES)
        try:
            flight = await self._readahead.chunk_flight(offset // CHUNK_BYTES)
            try:
                wanted = begin + 1
                while begin < stop:
                    have = min(await flight.wait_for_bytes(wanted), stop)
                    yield [Span(flight.fd, flight.base + begin, have - begin)]
                    begin = have
                    wanted = min(begin + _STEP, stop)
            finally:
                flight.release()
        except OriginPieceError as error:
            raise _LostPieceError(error) from error
        except OriginError as error:
            raise s3_error_for(error, self._readahead.key) from error

    def mark_failed(self, offset: int) -> None:
        self._readahead.mark_unreadable(offset // CHUNK_BYTES)

    def close(self) -> None:
        self._readahead.close()


def chunk_sources(store: ObjectStore, readahead: Readahead) -> list[ReadSource]:
    """Returns the ways to an object of which not all is cached."""
    flights = [FlightSource(readahead, _PAUSE_S if number else 0.0) for number in range(_FLIGHTS)]
    return [CachedChunksSource(store, readahead), *flights]


def s3_error_for(error: OriginError, key: str) -> S3Error:
    """Returns S3's error for what an origin could not do."""
    if isinstance(error, OriginMissingError):
        return S3Error("NoSuchKey", extra={"Key": key})
    if isinstance(error, OriginKeyError):
        return S3Error("NotImplemented", str(error))
    if isinstance(error, OriginRangeError):
        return S3Error("InvalidRange")
    if isinstance(error, OriginRefusedError):
        return S3Error("AccessDenied", str(error))
    return S3Error("ServiceUnavailable", str(error))
