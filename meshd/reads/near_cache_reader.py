"""Near-cache reader: serves objects of other nodes through this node's cached copies.

Every request asks a replica which content the name has; bytes that are cached here are served from here.
One response carries one ETag throughout.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import ObjectRange, ReadFailure
from meshd.objects.object_reader import lookup_result
from meshd.store.records import Span
from meshd.views.dispatch import AssembledRead
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.core.object_io import LookupResult
    from meshd.objects.version_lookup import VersionLookup
    from meshd.peer_reads.fetch import FetchedParts
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.s3.operations import GetObject

_CHUNK: Final = 4 << 20
_AHEAD: Final = 2


class NearCacheReader:
    """Reads of objects of other nodes through the near cache. One instance per worker."""

    def __init__(self, objects: RemoteObjects, versions: VersionLookup) -> None:
        self._objects, self._versions = objects, versions
        self._memory = MemoryAccount()

    def __repr__(self) -> str:
        return f"<NearReader {self._memory!r}>"

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
        """Return the response. Raises S3Error NotModified, PreconditionFailed, InvalidRange, SlowDown."""
        bucket, key = operation.bucket, operation.key
        extra = self._versions.expiration_headers(bucket, key, record)
        found = lookup_result(operation, record, self._versions.version_header(bucket, record), extra)
        if operation.head or not found.length:
            return AssembledRead(found, _nothing())
        parts = list(_parts(bucket, key, record, found))
        first = await self._fetched(parts[0][0])
        return AssembledRead(found, self._groups(parts, first))

    async def _fetched(self, part: ObjectRange) -> FetchedParts:
        gathered = await self._objects.fetch_parts([part], self._memory)
        place = gathered.places[0]
        if isinstance(place, ReadFailure):
            gathered.close()
            raise S3Error("SlowDown", f"The object cannot be read now: {place.message or place.code}.")
        return gathered

    async def _groups(
        self, parts: Sequence[tuple[ObjectRange, int, int]], first: FetchedParts
    ) -> AsyncGenerator[Sequence[Span], None]:
        ahead: list[asyncio.Task[FetchedParts]] = []
        held, begun = first, 1
        try:
            for _, skip, length in parts:
                while begun < len(parts) and len(ahead) < _AHEAD:
                    ahead.append(asyncio.create_task(self._fetched(parts[begun][0])))
                    begun += 1
                place = held.places[0]
                assert not isinstance(place, ReadFailure)
                yield [Span(held.fd, place.offset + skip, length)]
                if ahead:
                    held.close()
                    held = await ahead.pop(0)
        finally:
            held.close()
            for task in ahead:
                task.cancel()
            for result in await asyncio.gather(*ahead, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result.close()


def _parts(
    bucket: str, key: str, record: Record, found: LookupResult
) -> Iterator[tuple[ObjectRange, int, int]]:
    """Yield aligned pieces of the object with the bytes requested of each: (part, skip, length)."""
    end = found.offset + found.length
    for start in range(found.offset - found.offset % _CHUNK, end, _CHUNK):
        size = min(_CHUNK, record.size - start)
        skip = max(found.offset - start, 0)
        part = ObjectRange(bucket, key, record.etag, record.size, start, size)
        yield part, skip, min(start + size, end) - start - skip


async def _nothing() -> AsyncGenerator[Sequence[Span], None]:
    return
    yield
