"""Objects that other nodes hold, read through this node's copies.

Law: which content a name stands for is asked of a node that holds it, each time; its bytes are taken from
here where they are here. An answer is of one ETag throughout.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.assembly.elsewhere import Lost, Part
from meshd.assembly.errors import BatchError
from meshd.assembly.memory import Memory
from meshd.service.semantics.found import found_of
from meshd.service.views.dispatch import Assembled
from meshd.store.records import Span
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.service.remote.fetching import Gathered
    from meshd.service.remote.objects import RemoteObjects
    from meshd.service.semantics.found import Found
    from meshd.service.semantics.versions import Versions
    from meshd.store.records import Record
    from meshwire.s3.operations import GetObject

_CHUNK: Final = 4 << 20
_AHEAD: Final = 2


class NearReader:
    """One a worker."""

    def __init__(self, objects: RemoteObjects, versions: Versions) -> None:
        self._objects, self._versions = objects, versions
        self._memory = Memory()

    def __repr__(self) -> str:
        return f"<NearReader {self._memory!r}>"

    def takes(self, operation: GetObject) -> bool:
        """Whether this node keeps copies, and of such as this."""
        plain = operation.version is None and operation.member is None and operation.part_number is None
        return plain and self._objects.near is not None and not self._objects.backs(operation.bucket)

    async def find(self, operation: GetObject) -> Record | None:
        """What there is under the name, by a node that holds it; None where those are to answer themselves:
        there is nothing, or they do not say now."""
        try:
            return await self._objects.find(operation.bucket, operation.key)
        except BatchError:
            return None

    async def opened(self, operation: GetObject, record: Record) -> Assembled:
        """The answer. Raises S3Error NotModified, PreconditionFailed, InvalidRange, SlowDown."""
        bucket, key = operation.bucket, operation.key
        extra = self._versions.expiration(bucket, key, record)
        found = found_of(operation, record, self._versions.name(bucket, record), extra)
        if operation.head or not found.length:
            return Assembled(found, _nothing())
        parts = list(_parts(bucket, key, record, found))
        first = await self._fetched(parts[0][0])
        return Assembled(found, self._groups(parts, first))

    async def _fetched(self, part: Part) -> Gathered:
        gathered = await self._objects.fetch([part], self._memory)
        place = gathered.places[0]
        if isinstance(place, Lost):
            gathered.close()
            raise S3Error("SlowDown", f"The object cannot be read now: {place.message or place.code}.")
        return gathered

    async def _groups(
        self, parts: Sequence[tuple[Part, int, int]], first: Gathered
    ) -> AsyncGenerator[Sequence[Span], None]:
        ahead: list[asyncio.Task[Gathered]] = []
        held, begun = first, 1
        try:
            for _, skip, length in parts:
                while begun < len(parts) and len(ahead) < _AHEAD:
                    ahead.append(asyncio.create_task(self._fetched(parts[begun][0])))
                    begun += 1
                place = held.places[0]
                assert not isinstance(place, Lost)
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


def _parts(bucket: str, key: str, record: Record, found: Found) -> Iterator[tuple[Part, int, int]]:
    """Aligned pieces of the object, and what of each is meant: (part, skip, length)."""
    end = found.offset + found.length
    for start in range(found.offset - found.offset % _CHUNK, end, _CHUNK):
        size = min(_CHUNK, record.size - start)
        skip = max(found.offset - start, 0)
        part = Part(bucket, key, record.etag, record.size, start, size)
        yield part, skip, min(start + size, end) - start - skip


async def _nothing() -> AsyncGenerator[Sequence[Span], None]:
    return
    yield
