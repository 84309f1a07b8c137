"""Sample source of backed buckets: entries, records and bytes by ETag for datasets, batches and gathers.

Content is named by its ETag, so cached content of that ETag is valid at any age, and a different ETag at the
origin is an error. Only a node in the read set of a name queries the origin; other nodes ask that node.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError, busy
from meshd.core.listing_columns import ListingColumns
from meshd.core.peer_messages import to_remote_record
from meshd.core.peer_source import ReadFailure
from meshd.core.read_source import ReadLostError
from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece, cache_name, record_from_facts
from meshd.origins.client.origin_api import (
    OriginChangedError,
    OriginDownError,
    OriginError,
    OriginMissingError,
    OriginRangeError,
)
from meshd.store.records import Page
from meshd.util.async_tasks import CooperativeYield
from meshwire.dataset.archive_paths import pinned_table
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.control.buckets import Bucket
    from meshd.core.listing_columns import KeyFilter
    from meshd.core.peer_messages import RemoteRecord
    from meshd.core.peer_source import ObjectRange
    from meshd.datasets.archives.archive_service import LocalArchives
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.origins.cache.in_flight import InFlightPiece
    from meshd.origins.client.origin_api import ObjectFacts, OriginEntry
    from meshd.store.records import Record
    from meshd.store.store import Store

_PAGE: Final = 1000
_AT_ONCE: Final = 8  # concurrent pieces of one object
_LOOKS: Final = 250  # checks, 20 ms apart, whether the cache has a fetched object
_PAUSE: Final = 0.02


class OriginSampleSource:
    """Reads samples from buckets with origins. One instance per process."""

    def __init__(self, store: Store, backed: BackedBucketService, archives: LocalArchives) -> None:
        self._store, self._backed, self._archives = store, backed, archives

    def __repr__(self) -> str:
        return f"<OriginSampleSource of {self._backed!r}>"

    async def entries(
        self, name: str, prefix: str, plain: KeyFilter | None = None
    ) -> tuple[ListingColumns | list[tuple[str, Record]], object | None]:
        """Return every object under a prefix, in order of UTF-8 bytes, and which listing they are of, as
        `listing_revision` returns it: in columns if `plain` accepts each page, else with records.
        Raises BatchError, and what `plain` raises."""
        bucket = self._bucket(name)
        try:
            found, revision = await self._backed.listings.list_all(bucket, prefix)
        except (OriginError, S3Error) as error:
            raise _batch_error(f"s3://{name}/{prefix}", error) from error
        columns = None if plain is None else await _in_columns(found, plain)
        if columns is not None:
            return columns, revision
        records, turns = list[tuple[str, "Record"]](), CooperativeYield()
        for some in _pages(found):
            records += [(entry.key, _remote_record(bucket, entry.facts())) for entry in some]
            await turns.yield_if_due()
        return records, revision

    async def listing_revision(self, name: str, prefix: str) -> object | None:
        """Return what the last whole listing of a prefix was, if it is still current; see
        `BackedListings.revision`."""
        bucket = self._backed.cache_store.backed_bucket(name)
        return None if bucket is None else await self._backed.listings.revision(bucket, prefix)

    async def page(self, name: str, prefix: str, after: str, limit: int) -> Page:
        """Return a page of the objects under a prefix. Raises BatchError."""
        bucket = self._bucket(name)
        try:
            page = await self._backed.listings.list_page(bucket, prefix, "", after, min(limit, _PAGE))
        except (OriginError, S3Error) as error:
            raise _batch_error(f"s3://{name}/{prefix}", error) from error
        entries = tuple((entry.key, _remote_record(bucket, entry.facts())) for entry in page.entries)
        return Page(entries, (), truncated=bool(page.after), next_after=page.after)

    async def find_record(self, name: str, key: str) -> Record | None:
        """Return the record of the current object. Raises BatchError."""
        try:
            own = self._store.get_stored(name, key)
            if own is not None:
                return to_remote_record(own)
            return _remote_record(
                self._bucket(name), await self._backed.reader.current_facts(self._bucket(name), key)
            )
        except (OriginError, S3Error) as error:
            if isinstance(error, OriginMissingError) or getattr(error, "code", "") == "NoSuchKey":
                return None
            raise _batch_error(f"s3://{name}/{key}", error) from error

    def cached_record(self, name: str, key: str, etag: str) -> Record | None:
        """Return an object of exactly this content, if it is fully cached or not yet at its origin."""
        own = self._store.get_stored(name, key)
        record = own or self._backed.cache_store.cached_record(self._bucket(name), key)
        return record if record is not None and record.etag == etag else None

    def record_use(self, name: str, key: str) -> None:
        """Report a read of a cached object that bypassed the cache."""
        bucket = self._bucket(name)
        held = self._backed.cache_store.cached_facts(bucket, key)
        if held is None:
            return
        cache_bucket, manager = cache_name(bucket), self._backed.cache_manager
        if held.size <= CHUNK_BYTES:
            manager.record_read(Piece(cache_bucket, key, -1, held.size))
            return
        for number in range(-(-held.size // CHUNK_BYTES)):
            manager.record_read(
                Piece(cache_bucket, key, number, min(CHUNK_BYTES, held.size - number * CHUNK_BYTES))
            )

    async def read_range(self, part: ObjectRange) -> bytes | ReadFailure:
        """Return the bytes of a part."""
        try:
            return await self._read(part)
        except (OriginError, S3Error, BatchError, ReadLostError) as error:
            return _read_failure(error)

    async def _read(self, part: ObjectRange) -> bytes:
        own = self._store.get_stored(part.bucket, part.key)
        if own is not None and own.etag == part.etag:
            length = own.size - part.offset if part.length < 0 else part.length
            return await asyncio.to_thread(self._store.read_range, own, part.offset, length)
        bucket, reader = self._bucket(part.bucket), self._backed.reader
        facts = self._backed.cache_store.cached_facts(bucket, part.key)
        first: InFlightPiece | None = None
        if facts is None or facts.etag != part.etag:
            first = await reader.start_chunk(bucket, part.key, part.offset // CHUNK_BYTES, part.etag)
        try:
            facts = facts if first is None else await first.wait_for_facts()
            assert facts is not None
            length = facts.size - part.offset if part.length < 0 else part.length
            if part.size not in (-1, facts.size):
                return await self._read_decompressed(part, facts)
            if facts.etag != part.etag or part.offset + length > facts.size:
                raise OriginChangedError(f"s3://{part.bucket}/{part.key} was replaced")
            flown = None if first is None else (part.offset // CHUNK_BYTES, first.acquire())
        finally:
            if first is not None:
                first.release()
        read = reader.open_range(bucket, part.key, facts, part.offset, length, flown)
        async with aclosing(read.pieces()) as given:
            pieces = [piece async for piece in given]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _read_decompressed(self, part: ObjectRange, facts: ObjectFacts) -> bytes:
        """Return bytes of an archive with compressed members, from its decompressed copy."""
        await self.fetch_into_cache(part.bucket, part.key, part.etag, facts.size)
        record = self.cached_record(part.bucket, part.key, part.etag)
        if record is None:
            raise OriginChangedError(f"s3://{part.bucket}/{part.key} was evicted during the read")
        plain = await self._archives.decompressed(part.bucket, part.key, record, part.size)
        if plain.size != pinned_table(part.size)[1]:
            raise OriginChangedError(f"s3://{part.bucket}/{part.key} has another size")
        return await asyncio.to_thread(self._store.read_range, plain, part.offset, part.length)

    async def fetch_into_cache(self, name: str, key: str, etag: str, size: int) -> None:
        """Fetch all of an object into the cache. Raises BatchError."""
        if self.cached_record(name, key, etag) is not None:
            return
        bucket, slots = self._bucket(name), asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                flight = await self._backed.reader.start_chunk(bucket, key, number, etag)
                try:
                    await flight.wait_until_done()
                finally:
                    flight.release()

        try:
            await asyncio.gather(*[one(number) for number in range(max(1, -(-size // CHUNK_BYTES)))])
        except OriginError as error:
            raise _batch_error(f"s3://{name}/{key}", error) from error
        for _ in range(_LOOKS):
            if self.cached_record(name, key, etag) is not None:
                return
            await asyncio.sleep(_PAUSE)
        raise BatchError(
            "TooLarge",
            f"s3://{name}/{key} must be cached as a whole to be indexed, but the cache does not keep it",
            help="give the node a larger --cache, the bucket a larger --quota, or pin the archive's prefix",
        )

    def _bucket(self, name: str) -> Bucket:
        bucket = self._backed.cache_store.backed_bucket(name)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r} with an origin")
        return bucket


def _pages(entries: Sequence[OriginEntry]) -> Iterator[Sequence[OriginEntry]]:
    return (entries[start : start + _PAGE] for start in range(0, len(entries), _PAGE))


async def _in_columns(entries: Sequence[OriginEntry], plain: KeyFilter) -> ListingColumns | None:
    columns, turns = ListingColumns(), CooperativeYield()
    plain.begin()
    for some in _pages(entries):
        if not plain.accepts([entry.key for entry in some]):
            return None
        columns.extend([(entry.key, entry.etag, entry.size) for entry in some])
        await turns.yield_if_due()
    return columns


def _remote_record(bucket: Bucket, facts: ObjectFacts) -> RemoteRecord:
    found = to_remote_record(record_from_facts(bucket, facts))
    assert found is not None
    return found


def _read_failure(error: Exception) -> ReadFailure:
    cause: BaseException = error.__cause__ if isinstance(error.__cause__, OriginError) else error
    if isinstance(cause, OriginMissingError) or getattr(error, "code", "") == "NoSuchKey":
        return ReadFailure("NoSuchKey")
    if isinstance(cause, OriginChangedError | OriginRangeError):
        return ReadFailure("SnapshotChanged")
    if isinstance(cause, OriginDownError):
        return ReadFailure("Busy", str(cause))
    return ReadFailure("Unreadable", str(cause))


def _batch_error(name: str, error: Exception) -> BatchError:
    lost = _read_failure(error)
    if lost.code == "NoSuchKey":
        return BatchError("NoSuchKey", f"{name} does not exist at its origin")
    if lost.code == "SnapshotChanged":
        return BatchError("SnapshotChanged", f"{name} was replaced at its origin", help="retry the request")
    if lost.code == "Unreadable":
        return BatchError("AccessDenied", f"{name}: {lost.message}")
    return busy(f"{name} cannot be read now: {lost.message}")
