"""Near-cache reader: serves objects of other nodes through this node's cached copies.

Every request asks a replica which content the name has; bytes that are cached here are served from here.
One response carries one ETag throughout.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import ObjectRange, ReadFailure
from meshd.core.read_source import FailoverRead, ReadSource
from meshd.objects.object_reader import lookup_result
from meshd.store.records import Span
from meshd.views.dispatch import AssembledRead
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.objects.object_reader import VersionLookup
    from meshd.peer_reads.peer_fetcher import FetchedParts
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.s3.operations import GetObject

_PART: Final = 4 << 20
_AHEAD: Final = 2


class NearCacheReader:
    """Reads of objects of other nodes through the near cache. One instance per worker."""

    def __init__(self, objects: RemoteObjects, versions: VersionLookup) -> None:
        self._objects, self._versions = objects, versions
        self._memory = MemoryAccount()

    def __repr__(self) -> str:
        return f"<NearCacheReader {self._memory!r}>"

    def handles(self, operation: GetObject) -> bool:
        """Whether this node has a near cache, and the request is one that it can answer."""
        plain = operation.version is None and operation.member is None and operation.part_number is None
        return (
            plain and self._objects.near_cache is not None and not self._objects.has_origin(operation.bucket)
        )

    async def find_record(self, operation: GetObject) -> Record | None:
        """Return the current record from a node that holds the name. None if there is no object or no node
        answers now: then the request is forwarded to them."""
        try:
            return await self._objects.find(operation.bucket, operation.key)
        except BatchError:
            return None

    async def open_object(self, operation: GetObject, record: Record) -> AssembledRead:
        """Return the response. Raises S3Error NotModified, PreconditionFailed, InvalidRange."""
        bucket, key = operation.bucket, operation.key
        extra = self._versions.expiration_headers(bucket, key, record)
        found = lookup_result(operation, record, self._versions.version_header(bucket, record), extra)
        source = NearCacheSource(self._objects, self._memory, bucket, key, record)
        return AssembledRead(
            found, FailoverRead([source], found.offset, found.length, f"s3://{bucket}/{key}")
        )


class NearCacheSource(ReadSource):
    """One content of an object of other nodes, through the near cache: aligned parts, two ahead. What the
    cache lacks comes from the replicas, verified, so no other source follows."""

    def __init__(
        self, objects: RemoteObjects, memory: MemoryAccount, bucket: str, key: str, record: Record
    ) -> None:
        self._objects, self._memory, self._bucket, self._key = objects, memory, bucket, key
        self._record = record

    def __repr__(self) -> str:
        return f"<NearCacheSource of {self._record.size} bytes>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        """Yield the bytes; see `ReadSource`. Raises S3Error SlowDown."""
        parts, begun = list(self._parts(offset, length)), 0
        ahead: deque[asyncio.Task[FetchedParts]] = deque()
        try:
            for _, skip, taken in parts:
                while begun < len(parts) and len(ahead) <= _AHEAD:
                    ahead.append(asyncio.create_task(self._fetch(parts[begun][0])))
                    begun += 1
                held = await ahead[0]
                place = held.places[0]
                assert not isinstance(place, ReadFailure)
                yield [Span(held.fd, place.offset + skip, taken)]
                ahead.popleft()
                held.close()
        finally:
            for task in ahead:
                task.cancel()
            for result in await asyncio.gather(*ahead, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result.close()

    async def _fetch(self, part: ObjectRange) -> FetchedParts:
        fetched = await self._objects.fetch_parts([part], self._memory)
        place = fetched.places[0]
        if isinstance(place, ReadFailure):
            fetched.close()
            raise S3Error("SlowDown", f"The object cannot be read now: {place.message or place.code}.")
        return fetched

    def _parts(self, offset: int, length: int) -> Iterator[tuple[ObjectRange, int, int]]:
        """Yield aligned parts of the object with the bytes requested of each: (part, skip, length)."""
        record, end = self._record, offset + length
        for start in range(offset - offset % _PART, end, _PART):
            size = min(_PART, record.size - start)
            skip = max(offset - start, 0)
            part = ObjectRange(self._bucket, self._key, record.etag, record.size, start, size)
            yield part, skip, min(start + size, end) - start - skip
