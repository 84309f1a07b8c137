"""Read-through: serves objects of backed buckets from the cache, revalidates them, and fetches the rest.

A response has one ETag throughout; authorization happens before. A reader waits at most `patience` seconds,
once, for an origin that does not answer; then cached data is served while one revalidation per bucket
continues in the background. Bytes that the cache loses during a response come from the origin.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.core.object_io import TruncationReport, lookup_result
from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece, cache_name, record_from_facts
from meshd.origins.client.origin_api import (
    OriginChangedError,
    OriginDownError,
    OriginError,
    OriginKeyError,
    OriginMissingError,
    OriginPieceError,
    OriginRangeError,
    OriginRefusedError,
)
from meshd.origins.readahead import Readahead
from meshd.store.errors import CorruptExtentError, DiskFailedError, ExtentGoneError
from meshd.store.integrity.verification import report_unsent_spans
from meshd.store.records import Span
from meshd.telemetry import metrics
from meshd.util import failpoints
from meshd.util.async_tasks import BackgroundTasks
from meshd.views.copy_out import split_spans
from meshd.views.dispatch import AssembledRead
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from meshd.control.buckets import Bucket
    from meshd.core.object_io import LookupResult
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.cache.fetcher import CacheManagerApi
    from meshd.origins.cache.in_flight import InFlightPiece
    from meshd.origins.client.origin_api import ObjectFacts
    from meshd.origins.worker_shards import WorkerShards
    from meshd.store.records import Record
    from meshd.store.store import Store
    from meshwire.s3.operations import GetObject


_Task = asyncio.Task["ObjectFacts | OriginError"]


class Revalidator:
    """Revalidates cached objects. One instance per process. `patience` is in seconds."""

    def __init__(self, crew: WorkerShards, patience: float) -> None:
        self._shards, self._patience = crew, patience
        self._silent: dict[str, _Task] = {}  # buckets whose origin is silent, with the pending request
        self._tasks = BackgroundTasks("asking")

    def __repr__(self) -> str:
        return f"<Questions, {len(self._silent)} origins silent>"

    async def current_facts(self, bucket: Bucket, key: str, held: ObjectFacts | None) -> ObjectFacts:
        """Return the facts at the origin, or the cached ones (`held`) while it is down. Raises
        OriginError."""
        if held is None:
            return await self._shards.worker_for(bucket.name, key).check_origin(bucket, key)
        name = cache_name(bucket)
        behind = self._silent.get(name)
        if behind is not None:
            if behind.done():
                self._silent[name] = self._asked(bucket, key)
            return _unanswered(held)
        asked = self._asked(bucket, key)
        await asyncio.wait((asked,), timeout=self._patience)
        if not asked.done():
            self._silent[name] = asked
            return _unanswered(held)
        found = asked.result()
        if isinstance(found, OriginDownError):
            return held
        if isinstance(found, OriginError):
            raise found
        return found

    def _asked(self, bucket: Bucket, key: str) -> _Task:
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


def _unanswered(held: ObjectFacts) -> ObjectFacts:
    metrics.origin_unanswered.inc()
    return held


_log = logging.getLogger("meshd.origins")
_STEP: Final = 512 << 10  # bytes that a reader gets at a time, after the first
_PIECE: Final = 1 << 20  # bytes per read
_UNREADABLE: Final = (ExtentGoneError, CorruptExtentError, DiskFailedError)
_LOSSES: Final = 2  # failed fetches of a chunk, by a failing disk, before a response is cut
_PAUSE: Final = 0.2  # seconds before it is requested again
_FINDS: Final = 4  # lookups of an object that keeps changing


class BackedReader:
    """Reads objects of backed buckets. One instance per process."""

    def __init__(
        self,
        store: Store,
        shelf: CacheStore,
        crew: WorkerShards,
        keeper: CacheManagerApi,
        questions: Revalidator,
    ) -> None:
        self._store, self._cache_store, self._shards, self.cache_manager = store, shelf, crew, keeper
        self._revalidator = questions

    def __repr__(self) -> str:
        return f"<BackedReader of {self._cache_store!r}>"

    def hit_recorder(self, bucket: str, key: str) -> Callable[[], None] | None:
        """Return the function to call if the store can serve the read alone: the bucket has no origin, or the
        object is cached and fresh. None: it cannot. Takes microseconds, and counts nothing yet."""
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None:
            return _uncounted
        held = self._cache_store.cached_facts(backed, key)
        if held is None or not self._cache_store.is_fresh(backed, key, held.etag):
            return None if self._store.get_stored(bucket, key) is None else _uncounted
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
                    return await self._opened(bucket, operation)
                except OriginChangedError:  # nothing has been sent yet
                    await self._shards.worker_for(bucket.name, operation.key).check_origin(
                        bucket, operation.key
                    )
            return await self._opened(bucket, operation)
        except OriginError as error:
            raise s3_error_for(error, operation.key) from error

    async def _opened(self, bucket: Bucket, operation: GetObject) -> AssembledRead:
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
                return AssembledRead(found, _nothing())
            if record is not None:
                tear = TruncationReport()
                return AssembledRead(found, self._cached(bucket, facts, record, key, found, tear), tear)
            if first is None and self.cached_chunk(bucket, key, facts, found.offset // CHUNK_BYTES) is None:
                first = await self._first(bucket, key, found.offset // CHUNK_BYTES, facts.etag)
            tear = TruncationReport()
            groups = self.span_groups(bucket, key, facts, found.offset, found.length, first, tear)
            first = None
            return AssembledRead(found, groups, tear)
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

    async def _cached(
        self,
        bucket: Bucket,
        facts: ObjectFacts,
        record: Record,
        key: str,
        found: LookupResult,
        tear: TruncationReport,
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Yield the bytes of a fully cached object; the rest is fetched if they become unreadable."""
        self._note(bucket, key, facts, found.offset, found.length)
        sent: int | None = None
        reading = self._store.open_spans(record, found.offset, found.length)
        with suppress(*_UNREADABLE), reading as spans:  # e.g. just evicted: nothing was sent
            yield spans
            sent = tear.take_truncation()
            if sent is None:
                return
            report_unsent_spans(spans, sent)
        offset, length = found.offset + (sent or 0), found.length - (sent or 0)
        ahead = Readahead(self, bucket, key, facts, offset, length, None, tear)
        if sent is not None:
            ahead.record_truncation(offset // CHUNK_BYTES)
        async for group in self._read(ahead, key):
            yield group

    def _note(self, bucket: Bucket, key: str, facts: ObjectFacts, offset: int, length: int) -> None:
        shelf = cache_name(bucket)
        metrics.cache_reads.labels("hit").inc()
        if facts.size <= CHUNK_BYTES:
            self.cache_manager.record_read(Piece(shelf, key, -1, facts.size))
            return
        for number in range(offset // CHUNK_BYTES, (offset + length - 1) // CHUNK_BYTES + 1):
            self.cache_manager.record_read(Piece(shelf, key, number, _length(facts, number)))

    async def _read(self, ahead: Readahead, key: str) -> AsyncGenerator[Sequence[Span], None]:
        """Yield the bytes, chunk by chunk: cached ones from their files, others from their flights."""
        why = "the client disconnected"
        try:
            end = ahead.offset + ahead.length
            for number in range(ahead.offset // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
                begin = max(ahead.offset - number * CHUNK_BYTES, 0)
                stop = min(end - number * CHUNK_BYTES, CHUNK_BYTES)
                async for group in self._chunk(ahead, number, begin, stop):
                    yield group
            why = ""
        except OriginError as error:
            why = str(error)
            raise s3_error_for(error, key) from error
        finally:
            ahead.close()
            if ahead.torn:
                _log_truncation(ahead, key, why)

    def span_groups(
        self,
        bucket: Bucket,
        key: str,
        facts: ObjectFacts,
        offset: int,
        length: int,
        first: tuple[int, InFlightPiece] | None = None,
        tear: TruncationReport | None = None,
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Yield the bytes of an object of this ETag, a group of open files at a time. `first`: the chunk with
        the first byte, already in flight; its ownership passes on. `tear`: see TruncationReport."""
        if not length:
            if first is not None:
                first[1].release()
            return _nothing()
        return self._read(Readahead(self, bucket, key, facts, offset, length, first, tear), key)

    async def read_pieces(
        self,
        bucket: Bucket,
        key: str,
        facts: ObjectFacts,
        offset: int,
        length: int,
        first: tuple[int, InFlightPiece] | None = None,
        *,
        torn: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """Like `span_groups`, yielding bytes: what the cache cannot read comes from the origin. `torn`: the
        cache could not read the byte at `offset`. Raises S3Error."""
        ahead = Readahead(self, bucket, key, facts, offset, length, first)
        if torn:
            ahead.record_truncation(offset // CHUNK_BYTES)
        async with aclosing(self._read(ahead, key)) as groups:
            async for spans in groups:
                sent = 0
                for few in split_spans(spans, _PIECE):
                    data = await asyncio.to_thread(_read_of, few)
                    if data:
                        yield data
                    sent += len(data)
                    if len(data) != sum(span.length for span in few):
                        ahead.tear.record_truncation(sent)
                        break

    async def _chunk(
        self, ahead: Readahead, number: int, begin: int, stop: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        record = ahead.cached_chunk(number)
        if record is not None:
            with suppress(*_UNREADABLE), self._store.open_spans(record, begin, stop - begin) as spans:
                ahead.prefetch_after(number)
                yield spans
                sent = ahead.tear.take_truncation()
                if sent is None:
                    return
                report_unsent_spans(spans, sent)
                begin += sent
                ahead.record_truncation(number)
            ahead.mark_unreadable(number)
        for left in range(_LOSSES, -1, -1):
            flight = await ahead.chunk_flight(number)
            try:
                wanted = begin + 1
                while begin < stop:
                    have = min(await flight.wait_for_bytes(wanted), stop)
                    yield [Span(flight.fd, flight.base + begin, have - begin)]
                    sent = ahead.tear.take_truncation()
                    begin = have if sent is None else begin + sent
                    _check(sent)
                    wanted = min(begin + _STEP, stop)
            except OriginPieceError:
                ahead.torn = True
                if not left:
                    raise
                await asyncio.sleep(_PAUSE)  # until the process that caches it has noticed too
            else:
                return
            finally:
                flight.release()

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


def s3_error_for(error: OriginError, key: str) -> S3Error:
    """Translate an origin's error into an S3Error."""
    if isinstance(error, OriginMissingError):
        return S3Error("NoSuchKey", extra={"Key": key})
    if isinstance(error, OriginKeyError):
        return S3Error("NotImplemented", str(error))
    if isinstance(error, OriginRangeError):
        return S3Error("InvalidRange")
    if isinstance(error, OriginRefusedError):
        return S3Error("AccessDenied", str(error))
    return S3Error("ServiceUnavailable", str(error))


def _check(sent: int | None) -> None:
    """Raise OriginPieceError if received bytes could not all be read."""
    if sent is not None:
        raise OriginPieceError("a disk of the cache cannot read data fetched from the origin")


def _log_truncation(ahead: Readahead, key: str, why: str) -> None:
    """Log a truncated read; `why` it was cut in the end, if it was."""
    metrics.reads_continued.labels("cut" if why else "origin").inc()
    said = "a response was cut off" if why else "a response continued from its origin"
    _log.warning(
        said, extra={"bucket": ahead.bucket.name, "key": key, "why": why or "a disk of the cache failed"}
    )


def _uncounted() -> None:
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


def _read_of(spans: Sequence[Span]) -> bytes:
    """Read the bytes of the spans, up to the first unreadable one (blocking)."""
    found = bytearray()
    for span in spans:
        try:
            data = os.pread(span.fd, span.length, span.offset)
        except OSError:
            break
        found += data
        if len(data) != span.length:
            break
    return bytes(found)


async def _nothing() -> AsyncGenerator[Sequence[Span], None]:
    none: tuple[Sequence[Span], ...] = ()
    for group in none:
        yield group
