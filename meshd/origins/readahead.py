"""Readahead: the chunks that one reader of a backed object has cached, in flight or prefetched.

Law: at most `_AHEAD` chunks are in flight for a reader. A chunk whose cached bytes were unreadable is
not looked up in the cache again. Invariant: every acquired flight is released.
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

_AHEAD: Final = 12  # chunks of one reader under way


class ChunkSource(Protocol):
    """Where they come from."""

    def cached_chunk(self, bucket: Bucket, key: str, facts: ObjectFacts, number: int) -> Record | None:
        """One that is cached."""
        ...

    async def start_chunk(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        """One on its way."""
        ...


class Readahead:
    """`offset` and `length`: what is read. `first`: a chunk that is on its way already, given away. `tear`:
    see `Tear`."""

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
        """The cache cannot give this chunk."""
        self._spoilt.add(number)

    def record_truncation(self, number: int) -> None:
        """In this chunk the cache ended in the middle of an answer."""
        self.mark_unreadable(number)
        self.torn = True

    def cached_chunk(self, number: int) -> Record | None:
        """A chunk that the cache has."""
        if number in self._spoilt or (self._first is not None and self._first[0] == number):
            return None
        return self._chunks.cached_chunk(self.bucket, self._key, self._facts, number)

    def prefetch_after(self, number: int) -> None:
        """Have what follows chunk `number` fetched."""
        self._next = max(self._next, number + 1)
        while self._tasks and self._tasks[0][0] <= number:
            _let_go(self._tasks.popleft()[1])
        while self._next <= self._last and self._next <= number + _AHEAD:
            if self.cached_chunk(self._next) is None:
                self._tasks.append((self._next, self._fetch(self._next)))
            self._next += 1

    async def chunk_flight(self, number: int) -> InFlightPiece:
        """The flight of chunk `number`, the caller's to release. Raises OriginError."""
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
        """Idempotent."""
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
