"""Readahead: the chunks that one reader of a backed object has cached, in flight or prefetched.

At most `_AHEAD` chunks are in flight for a reader. A chunk whose cached bytes were unreadable is not looked
up in the cache again. Every acquired flight is released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from meshd.core.object_io import TruncationReport
from meshd.origins.cache.cache_store import CHUNK_BYTES

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.in_flight import InFlightPiece
    from meshd.origins.client.origin_api import ObjectFacts
    from meshd.store.records import Record

_AHEAD: Final = 12  # maximum chunks in flight for one reader


class ChunkSource(Protocol):
    """The source of chunks."""

    def cached_chunk(self, bucket: Bucket, key: str, facts: ObjectFacts, number: int) -> Record | None:
        """Return a cached chunk."""
        ...

    async def start_chunk(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        """Start to fetch a chunk."""
        ...


class Readahead:
    """Reads `length` bytes from `offset`. `first`: a chunk already in flight, whose ownership passes to this
    object. `tear`: see TruncationReport."""

    def __init__(
        self,
        chunks: ChunkSource,
        bucket: Bucket,
        key: str,
        facts: ObjectFacts,
        offset: int,
        length: int,
        first: tuple[int, InFlightPiece] | None = None,
        tear: TruncationReport | None = None,
    ) -> None:
        self._chunks, self.bucket, self._key, self._facts = chunks, bucket, key, facts
        self.offset, self.length = offset, length
        self.tear = tear or TruncationReport()
        self.torn = False
        self._spoilt = set[int]()
        self._next = offset // CHUNK_BYTES
        self._last = (offset + length - 1) // CHUNK_BYTES
        self._tasks: deque[tuple[int, asyncio.Task[InFlightPiece]]] = deque()
        self._first = first

    def __repr__(self) -> str:
        return f"<Ahead of {self._key[:80]!r}, {len(self._tasks)} chunks under way>"

    def mark_unreadable(self, number: int) -> None:
        """Note that the cached bytes of this chunk are unreadable."""
        self._spoilt.add(number)

    def record_truncation(self, number: int) -> None:
        """Note that the cached bytes of this chunk ended in the middle of a response."""
        self.mark_unreadable(number)
        self.torn = True

    def cached_chunk(self, number: int) -> Record | None:
        """Return a readable cached chunk."""
        if number in self._spoilt or (self._first is not None and self._first[0] == number):
            return None
        return self._chunks.cached_chunk(self.bucket, self._key, self._facts, number)

    def prefetch_after(self, number: int) -> None:
        """Start to fetch the chunks after chunk `number`."""
        self._next = max(self._next, number + 1)
        while self._tasks and self._tasks[0][0] <= number:
            _let_go(self._tasks.popleft()[1])
        while self._next <= self._last and self._next <= number + _AHEAD:
            if self.cached_chunk(self._next) is None:
                self._tasks.append((self._next, self._fetch(self._next)))
            self._next += 1

    async def chunk_flight(self, number: int) -> InFlightPiece:
        """Return the flight of chunk `number`, which the caller must release. Raises OriginError."""
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
                _let_go(found)
        if task is None:
            task = self._fetch(number)
        self.prefetch_after(number)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _let_go(task)
            raise

    def _fetch(self, number: int) -> asyncio.Task[InFlightPiece]:
        return asyncio.ensure_future(
            self._chunks.start_chunk(self.bucket, self._key, number, self._facts.etag)
        )

    def close(self) -> None:
        """Release all flights. Idempotent."""
        if self._first is not None:
            self._first[1].release()
            self._first = None
        while self._tasks:
            _let_go(self._tasks.popleft()[1])


def _let_go(task: asyncio.Task[InFlightPiece]) -> None:
    def release(done: asyncio.Task[InFlightPiece]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release()

    task.add_done_callback(release)
