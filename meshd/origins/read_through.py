"""Read-through: serves objects of backed buckets from the cache, revalidates them, and fetches the rest.

A response has one ETag throughout; authorization happens before. A reader waits at most `patience` seconds,
once, for an origin that does not answer; then cached data is served while one revalidation per bucket
continues in the background. Bytes that the cache loses during a response come from the origin.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.core.read_source import FailoverRead
from meshd.objects.object_reader import lookup_result
from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece, cache_name, record_from_facts
from meshd.origins.client.origin_api import (
    OriginChangedError,
    OriginDownError,
    OriginError,
    OriginRangeError,
)
from meshd.origins.read_sources import CachedObjectSource, Readahead, chunk_sources, s3_error_for
from meshd.telemetry import metrics
from meshd.util import failpoints
from meshd.util.async_tasks import BackgroundTasks
from meshd.views.dispatch import AssembledRead
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.cache.in_flight import InFlightPiece
    from meshd.origins.client.origin_api import ObjectFacts
    from meshd.origins.worker_shards import WorkerShards
    from meshd.store.records import Record
    from meshd.store.store import Store
    from meshwire.s3.operations import GetObject


_Task = asyncio.Task["ObjectFacts | OriginError"]


class Revalidator:
    """Revalidates cached objects. One instance per process. `patience` is in seconds."""

    def __init__(self, shards: WorkerShards, patience: float) -> None:
        self._shards, self._patience = shards, patience
        self._silent: dict[str, _Task] = {}  # buckets whose origin is silent, with the pending request
        self._tasks = BackgroundTasks("revalidation")

    def __repr__(self) -> str:
        return f"<Revalidator, {len(self._silent)} origins silent>"

    async def current_facts(self, bucket: Bucket, key: str, held: ObjectFacts | None) -> ObjectFacts:
        """Return the facts at the origin, or the cached ones (`held`) while it is down. Raises
        OriginError."""
        if held is None:
            return await self._shards.worker_for(bucket.name, key).check_origin(bucket, key)
        name = cache_name(bucket)
        behind = self._silent.get(name)
        if behind is not None:
            if behind.done():
                self._silent[name] = self._start_question(bucket, key)
            return _facts_unanswered(held)
        asked = self._start_question(bucket, key)
        await asyncio.wait((asked,), timeout=self._patience)
        if not asked.done():
            self._silent[name] = asked
            return _facts_unanswered(held)
        found = asked.result()
        if isinstance(found, OriginDownError):
            return held
        if isinstance(found, OriginError):
            raise found
        return found

    def _start_question(self, bucket: Bucket, key: str) -> _Task:
        return self._tasks.spawn(self._ask(bucket, key), "question")

    async def _ask(self, bucket: Bucket, key: str) -> ObjectFacts | OriginError:
        try:
            found: ObjectFacts | OriginError = await self._shards.worker_for(bucket.name, key).check_origin(
                bucket, key
            )
        except OriginError as error:
            found = error
        if not isinstance(found, OriginDownError):
            self._silent.pop(cache_name(bucket), None)
        return found

    async def aclose(self) -> None:
        await self._tasks.aclose()


def _facts_unanswered(held: ObjectFacts) -> ObjectFacts:
    metrics.origin_unanswered.inc()
    return held


_FINDS: Final = 4  # looks at an object that changes while it is found


class BackedReader:
    """Reads objects of backed buckets. One instance per process."""

    def __init__(
        self,
        store: Store,
        cache_store: CacheStore,
        shards: WorkerShards,
        manager: CacheManagerClient,
        questions: Revalidator,
    ) -> None:
        self._store, self._cache_store, self._shards, self.cache_manager = store, cache_store, shards, manager
        self._revalidator = questions

    def __repr__(self) -> str:
        return f"<BackedReader of {self._cache_store!r}>"

    def hit_recorder(self, bucket: str, key: str) -> Callable[[], None] | None:
        """Return the function to call if the store can serve the read alone: the bucket has no origin, or the
        object is cached and fresh. None: it cannot. Takes microseconds, and counts nothing yet."""
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None:
            return _count_nothing
        held = self._cache_store.cached_facts(backed, key)
        if held is None or not self._cache_store.is_fresh(backed, key, held.etag):
            return None if self._store.get_stored(bucket, key) is None else _count_nothing
        return partial(self._note, backed, key, held, 0, held.size) if held.size <= CHUNK_BYTES else None

    async def open_object(self, operation: GetObject) -> AssembledRead | None:
        """Open a read; None if the store can serve it. Raises S3Error."""
        bucket = self._cache_store.backed_bucket(operation.bucket)
        if bucket is None:
            return None
        if operation.version not in (None, "null"):
            raise S3Error("NoSuchVersion", extra={"Key": operation.key})
        if self._store.get_stored(bucket.name, operation.key) is not None:
            await failpoints.hit_async("origins.read.kept")
            return None
        try:
            for _ in range(_FINDS - 1):
                try:
                    return await self._open_read(bucket, operation)
                except OriginChangedError:  # nothing has been sent yet
                    await self._shards.worker_for(bucket.name, operation.key).check_origin(
                        bucket, operation.key
                    )
            return await self._open_read(bucket, operation)
        except OriginError as error:
            raise s3_error_for(error, operation.key) from error

    async def _open_read(self, bucket: Bucket, operation: GetObject) -> AssembledRead:
        key, start = operation.key, _begins(operation)
        facts, first = self.known_facts(bucket, key), None
        if (
            facts is None
            and start is not None
            and not operation.head
            and self._cache_store.cached_facts(bucket, key) is None
        ):
            first = await self._first(bucket, key, start // CHUNK_BYTES, "")
            facts = first[1].facts if first else None
        try:
            if facts is None:
                facts = await self.current_facts(bucket, key)
            record = None if first else self._whole(bucket, key, facts)
            found = lookup_result(operation, record or record_from_facts(bucket, facts))
            if operation.head or not found.length:
                return AssembledRead(found, FailoverRead((), found.offset, 0))
            number = found.offset // CHUNK_BYTES
            if record is None and first is None and self.cached_chunk(bucket, key, facts, number) is None:
                first = await self._first(bucket, key, number, facts.etag)
            given, first = first, None
            read = self.open_range(bucket, key, facts, found.offset, found.length, given, record)
            return AssembledRead(found, read)
        finally:
            if first is not None:
                first[1].release()

    async def _first(
        self, bucket: Bucket, key: str, number: int, etag: str
    ) -> tuple[int, InFlightPiece] | None:
        """Fetch a chunk; return it once bytes arrive, or None if the object is shorter. Raises
        OriginError."""
        metrics.cache_reads.labels("miss").inc()
        flight = await self._shards.worker_for(bucket.name, key).fetch_piece(bucket, key, number, etag)
        try:
            await flight.wait_for_facts()
        except OriginRangeError:
            flight.release()
            return None
        except BaseException:
            flight.release()
            raise
        return number, flight

    def known_facts(self, bucket: Bucket, key: str) -> ObjectFacts | None:
        """Return the cached facts if they are fresh. Raises S3Error NoSuchKey."""
        held = self._cache_store.cached_facts(bucket, key)
        if held is not None:
            return held if self._cache_store.is_fresh(bucket, key, held.etag) else None
        if self._cache_store.is_absent(bucket, key):
            raise S3Error("NoSuchKey", extra={"Key": key})
        return None

    async def current_facts(self, bucket: Bucket, key: str) -> ObjectFacts:
        """Return the facts at the origin, or the cached ones while it is down or silent. Raises OriginError,
        S3Error NoSuchKey."""
        known = self.known_facts(bucket, key)
        if known is not None:
            return known
        return await self._revalidator.current_facts(bucket, key, self._cache_store.cached_facts(bucket, key))

    def _whole(self, bucket: Bucket, key: str, facts: ObjectFacts) -> Record | None:
        record = self._cache_store.cached_record(bucket, key)
        return record if record is not None and record.etag == facts.etag else None

    def _note(self, bucket: Bucket, key: str, facts: ObjectFacts, offset: int, length: int) -> None:
        cache_bucket = cache_name(bucket)
        metrics.cache_reads.labels("hit").inc()
        if facts.size <= CHUNK_BYTES:
            self.cache_manager.record_read(Piece(cache_bucket, key, -1, facts.size))
            return
        for number in range(offset // CHUNK_BYTES, (offset + length - 1) // CHUNK_BYTES + 1):
            self.cache_manager.record_read(Piece(cache_bucket, key, number, _length(facts, number)))

    def open_range(
        self,
        bucket: Bucket,
        key: str,
        facts: ObjectFacts,
        offset: int,
        length: int,
        first: tuple[int, InFlightPiece] | None = None,
        record: Record | None = None,
        *,
        resumed: bool = False,
    ) -> FailoverRead:
        """Returns a read of an object of this ETag. `first`: the chunk in which it begins, in flight, given
        away. `record`: the cached object. `resumed`: the cache could not give the byte at `offset`, and a
        response is under way. Its errors are S3Errors."""
        if first is not None and not length:
            first[1].release()
            first = None
        ahead = Readahead(self, bucket, key, facts, offset, length, first)
        if resumed:
            ahead.mark_unreadable(offset // CHUNK_BYTES)
        sources = chunk_sources(self._store, ahead)
        if record is not None:
            hit = partial(self._note, bucket, key, facts, offset, length)
            sources.insert(0, CachedObjectSource(self._store, record, ahead, hit))
        return FailoverRead(sources, offset, length, f"s3://{bucket.name}/{key}", resumed=resumed)

    def cached_chunk(self, bucket: Bucket, key: str, facts: ObjectFacts, number: int) -> Record | None:
        """Return a cached chunk, or the whole of a small object."""
        if facts.size <= CHUNK_BYTES:
            record = self._cache_store.cached_record(bucket, key)
        else:
            record = self._cache_store.cached_chunk(cache_name(bucket), key, facts.etag, number)
        return record if record is not None and record.etag == facts.etag else None

    async def start_chunk(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        """Start to fetch a chunk of exactly this ETag."""
        metrics.cache_reads.labels("miss").inc()
        return await self._shards.worker_for(bucket.name, key).fetch_piece(bucket, key, number, etag)


def _count_nothing() -> None:
    """Count nothing: the read did not come from the cache."""


def _begins(operation: GetObject) -> int | None:
    """Return the first requested byte; None if the size must be known first."""
    if operation.if_range is not None:
        return None
    if operation.part_number is not None or operation.range is None:
        return 0
    start = operation.range.first
    return start if start is not None else None


def _length(facts: ObjectFacts, number: int) -> int:
    return min(CHUNK_BYTES, facts.size - number * CHUNK_BYTES)
