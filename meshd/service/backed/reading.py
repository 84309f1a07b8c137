"""Reading a backed bucket: from the cache what is there and still so, the rest from the origin as it comes.

Law: an answer is of one ETag throughout. Who may read is asked before. Chunks ahead of the reader are fetched
while it takes those before them; its memory is bounded. While an origin is down or silent what is cached is
served. What the cache cannot give any more in the middle of an answer comes from the origin.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.kit import failpoints
from meshd.origin.errors import (
    OriginChangedError,
    OriginError,
    OriginKeyError,
    OriginMissingError,
    OriginPieceError,
    OriginRangeError,
    OriginRefusedError,
)
from meshd.service.backed.ahead import Ahead
from meshd.service.caching.shelf import CHUNK, Piece, record_of, shelf_name
from meshd.service.semantics.found import found_of
from meshd.service.semantics.tearing import Tear
from meshd.service.views.copies import cut_spans
from meshd.service.views.dispatch import Assembled
from meshd.store.errors import CorruptExtentError, DiskFailedError, ExtentGoneError
from meshd.store.noticing import notice_behind
from meshd.store.records import Span
from meshd.telemetry import metrics
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from meshd.control.buckets import Bucket
    from meshd.origin.interface import Facts
    from meshd.service.backed.asking import Questions
    from meshd.service.backed.sharing import Crew
    from meshd.service.caching.fetching import Keeper
    from meshd.service.caching.flights import Flight
    from meshd.service.caching.shelf import Shelf
    from meshd.service.semantics.found import Found
    from meshd.store.records import Record
    from meshd.store.store import Store
    from meshwire.s3.operations import GetObject

_log = logging.getLogger("meshd.origins")
_STEP: Final = 512 << 10  # bytes a reader is given at a time, after the first
_PIECE: Final = 1 << 20  # bytes that are read at a time
_UNREADABLE: Final = (ExtentGoneError, CorruptExtentError, DiskFailedError)
_LOSSES: Final = 2  # of a chunk on its way, by a disk that fails, until an answer is cut
_PAUSE: Final = 0.2  # seconds before it is asked for again
_FINDS: Final = 4  # looks at an object that changes while it is found


class BackedReader:
    """One a process."""

    def __init__(self, store: Store, shelf: Shelf, crew: Crew, keeper: Keeper, questions: Questions) -> None:
        self._store, self._shelf, self._crew, self.keeper = store, shelf, crew, keeper
        self._questions = questions

    def __repr__(self) -> str:
        return f"<BackedReader of {self._shelf!r}>"

    def leaves(self, bucket: str, key: str) -> Callable[[], None] | None:
        """What is to be called if the store answers by itself: the bucket has no origin, or the object is
        cached and still so. None: it cannot. Microseconds, and nothing is counted yet."""
        backed = self._shelf.backed(bucket)
        if backed is None:
            return _uncounted
        held = self._shelf.held(backed, key)
        if held is None or not self._shelf.is_fresh(backed, key, held.etag):
            return None if self._store.own(bucket, key) is None else _uncounted
        return partial(self._note, backed, key, held, 0, held.size) if held.size <= CHUNK else None

    async def opened(self, operation: GetObject) -> Assembled | None:
        """The answer to a read; None when the store can give it. Raises S3Error."""
        bucket = self._shelf.backed(operation.bucket)
        if bucket is None:
            return None
        if operation.version not in (None, "null"):
            raise S3Error("NoSuchVersion", extra={"Key": operation.key})
        if self._store.own(bucket.name, operation.key) is not None:
            await failpoints.reach("origins.read.kept")
            return None
        try:
            for _ in range(_FINDS - 1):
                try:
                    return await self._opened(bucket, operation)
                except OriginChangedError:  # nothing is sent yet
                    await self._crew.of(bucket.name, operation.key).check(bucket, operation.key)
            return await self._opened(bucket, operation)
        except OriginError as error:
            raise told(error, operation.key) from error

    async def _opened(self, bucket: Bucket, operation: GetObject) -> Assembled:
        key, start = operation.key, _begins(operation)
        facts, first = self.known(bucket, key), None
        if (
            facts is None
            and start is not None
            and not operation.head
            and self._shelf.held(bucket, key) is None
        ):
            first = await self._first(bucket, key, start // CHUNK, "")
            facts = first[1].facts if first else None
        try:
            if facts is None:
                facts = await self.facts(bucket, key)
            record = None if first else self._whole(bucket, key, facts)
            found = found_of(operation, record or record_of(bucket, facts))
            if operation.head or not found.length:
                return Assembled(found, _nothing())
            if record is not None:
                tear = Tear()
                return Assembled(found, self._cached(bucket, facts, record, key, found, tear), tear)
            if first is None and self.chunk(bucket, key, facts, found.offset // CHUNK) is None:
                first = await self._first(bucket, key, found.offset // CHUNK, facts.etag)
            tear = Tear()
            groups = self.groups(bucket, key, facts, found.offset, found.length, first, tear)
            first = None
            return Assembled(found, groups, tear)
        finally:
            if first is not None:
                first[1].release()

    async def _first(self, bucket: Bucket, key: str, number: int, etag: str) -> tuple[int, Flight] | None:
        """A chunk whose bytes begin to come; None when there is nothing at that place. Raises OriginError."""
        metrics.cache_reads.labels("miss").inc()
        flight = await self._crew.of(bucket.name, key).fetch(bucket, key, number, etag)
        try:
            await flight.started()
        except OriginRangeError:
            flight.release()
            return None
        except BaseException:
            flight.release()
            raise
        return number, flight

    def known(self, bucket: Bucket, key: str) -> Facts | None:
        """What is known without asking the origin, if it still counts. Raises S3Error NoSuchKey."""
        held = self._shelf.held(bucket, key)
        if held is not None:
            return held if self._shelf.is_fresh(bucket, key, held.etag) else None
        if self._shelf.is_absent(bucket, key):
            raise S3Error("NoSuchKey", extra={"Key": key})
        return None

    async def facts(self, bucket: Bucket, key: str) -> Facts:
        """What the origin has; what is cached, while it is down or silent. Raises OriginError, S3Error
        NoSuchKey."""
        known = self.known(bucket, key)
        if known is not None:
            return known
        return await self._questions.answered(bucket, key, self._shelf.held(bucket, key))

    def _whole(self, bucket: Bucket, key: str, facts: Facts) -> Record | None:
        record = self._shelf.record(bucket, key)
        return record if record is not None and record.etag == facts.etag else None

    async def _cached(
        self, bucket: Bucket, facts: Facts, record: Record, key: str, found: Found, tear: Tear
    ) -> AsyncGenerator[Sequence[Span], None]:
        """The bytes of what is cached whole, as long as it is, and can be read."""
        self._note(bucket, key, facts, found.offset, found.length)
        sent: int | None = None
        reading = self._store.reading(record, found.offset, found.length)
        with suppress(*_UNREADABLE), reading as spans:  # evicted this moment, say: nothing was given out
            yield spans
            sent = tear.take()
            if sent is None:
                return
            notice_behind(spans, sent)
        offset, length = found.offset + (sent or 0), found.length - (sent or 0)
        ahead = Ahead(self, bucket, key, facts, offset, length, None, tear)
        if sent is not None:
            ahead.tore(offset // CHUNK)
        async for group in self._read(ahead, key):
            yield group

    def _note(self, bucket: Bucket, key: str, facts: Facts, offset: int, length: int) -> None:
        shelf = shelf_name(bucket)
        metrics.cache_reads.labels("hit").inc()
        if facts.size <= CHUNK:
            self.keeper.noted(Piece(shelf, key, -1, facts.size))
            return
        for number in range(offset // CHUNK, (offset + length - 1) // CHUNK + 1):
            self.keeper.noted(Piece(shelf, key, number, _length(facts, number)))

    async def _read(self, ahead: Ahead, key: str) -> AsyncGenerator[Sequence[Span], None]:
        """The bytes, chunk by chunk: cached ones from their files, others from their flights."""
        why = "its client left"
        try:
            end = ahead.offset + ahead.length
            for number in range(ahead.offset // CHUNK, (end - 1) // CHUNK + 1):
                begin = max(ahead.offset - number * CHUNK, 0)
                stop = min(end - number * CHUNK, CHUNK)
                async for group in self._chunk(ahead, number, begin, stop):
                    yield group
            why = ""
        except OriginError as error:
            why = str(error)
            raise told(error, key) from error
        finally:
            ahead.close()
            if ahead.torn:
                _told_of_tear(ahead, key, why)

    def groups(
        self,
        bucket: Bucket,
        key: str,
        facts: Facts,
        offset: int,
        length: int,
        first: tuple[int, Flight] | None = None,
        tear: Tear | None = None,
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Bytes of an object of this ETag, a group of open files at a time. `first`: the chunk they begin in,
        on its way; given away. `tear`: see `Tear`."""
        if not length:
            if first is not None:
                first[1].release()
            return _nothing()
        return self._read(Ahead(self, bucket, key, facts, offset, length, first, tear), key)

    async def pieces(
        self,
        bucket: Bucket,
        key: str,
        facts: Facts,
        offset: int,
        length: int,
        first: tuple[int, Flight] | None = None,
        *,
        torn: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """The same, read: what the cache cannot give comes from the origin. `torn`: it could not give the
        byte at `offset`. Raises S3Error."""
        ahead = Ahead(self, bucket, key, facts, offset, length, first)
        if torn:
            ahead.tore(offset // CHUNK)
        async with aclosing(self._read(ahead, key)) as groups:
            async for spans in groups:
                sent = 0
                for few in cut_spans(spans, _PIECE):
                    data = await asyncio.to_thread(_read_of, few)
                    if data:
                        yield data
                    sent += len(data)
                    if len(data) != sum(span.length for span in few):
                        ahead.tear.met(sent)
                        break

    async def _chunk(
        self, ahead: Ahead, number: int, begin: int, stop: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        record = ahead.cached(number)
        if record is not None:
            with suppress(*_UNREADABLE), self._store.reading(record, begin, stop - begin) as spans:
                ahead.go_on(number)
                yield spans
                sent = ahead.tear.take()
                if sent is None:
                    return
                notice_behind(spans, sent)
                begin += sent
                ahead.tore(number)
            ahead.spoil(number)
        for left in range(_LOSSES, -1, -1):
            flight = await ahead.flight(number)
            try:
                wanted = begin + 1
                while begin < stop:
                    have = min(await flight.reaches(wanted), stop)
                    yield [Span(flight.fd, flight.base + begin, have - begin)]
                    sent = ahead.tear.take()
                    begin = have if sent is None else begin + sent
                    _check(sent)
                    wanted = min(begin + _STEP, stop)
            except OriginPieceError:
                ahead.torn = True
                if not left:
                    raise
                await asyncio.sleep(_PAUSE)  # until whoever keeps it in the cache has noticed, too
            else:
                return
            finally:
                flight.release()

    def chunk(self, bucket: Bucket, key: str, facts: Facts, number: int) -> Record | None:
        """A chunk that is cached, or the whole of a small object."""
        if facts.size <= CHUNK:
            record = self._shelf.record(bucket, key)
        else:
            record = self._shelf.chunk(shelf_name(bucket), key, facts.etag, number)
        return record if record is not None and record.etag == facts.etag else None

    async def begun(self, bucket: Bucket, key: str, number: int, etag: str) -> Flight:
        """A chunk on its way, of exactly this ETag."""
        metrics.cache_reads.labels("miss").inc()
        return await self._crew.of(bucket.name, key).fetch(bucket, key, number, etag)


def told(error: OriginError, key: str) -> S3Error:
    """S3's word for what an origin could not do."""
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
    """Raises OriginPieceError where bytes that came could not all be read."""
    if sent is not None:
        raise OriginPieceError("a disk of the cache's cannot give what came from the origin")


def _told_of_tear(ahead: Ahead, key: str, why: str) -> None:
    """`why` it was cut in the end, if it was."""
    metrics.reads_continued.labels("cut" if why else "origin").inc()
    said = "an answer under way was cut" if why else "an answer under way went on from its origin"
    _log.warning(
        said, extra={"bucket": ahead.bucket.name, "key": key, "why": why or "a disk of the cache failed"}
    )


def _uncounted() -> None:
    """Nothing was read from the cache."""


def _begins(operation: GetObject) -> int | None:
    """The first byte that is asked for; None where the size must be known to say."""
    if operation.if_range is not None:
        return None
    if operation.part_number is not None or operation.range is None:
        return 0
    start = operation.range.first
    return start if start is not None else None


def _length(facts: Facts, number: int) -> int:
    return min(CHUNK, facts.size - number * CHUNK)


def _read_of(spans: Sequence[Span]) -> bytes:
    """Their bytes, as far as they can be read (blocking)."""
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
