"""Indexes of files of lines: made once a content, kept by ETag and size in the reserved bucket.

Law: a file is read in pieces, whatever its size; one with a line too long for a sample is refused by name.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshd.kit.singleflight import SingleFlight
from meshd.service.datasets.unpacking import content_name, unpacked
from meshd.service.remote.wire import FarRecord
from meshwire.columns import ColumnError
from meshwire.lines import MAX_LINES, LineError, LineIndex, index_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.assembly.catalog import Catalog
    from meshd.assembly.sources import PlainArchives
    from meshd.service.datasets.capacity import SnapshotCapacity
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span

_PIECE = 4 << 20


class Lines:
    """One a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        archives: PlainArchives,
        objects: RemoteObjects,
        capacity: SnapshotCapacity,
    ) -> None:
        self._capacity = capacity
        self._store, self._catalog, self._archives, self._objects = store, catalog, archives, objects
        self._indexing: SingleFlight[str, LineIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<Lines, {len(self._indexing)} files being indexed>"

    async def index(self, bucket: str, key: str, record: Record) -> LineIndex:
        """Where the lines of a file lie. Raises BatchError BadSample."""
        name = f"lines/{content_name(key, record)}"
        document = self._catalog.read(name)
        if document is not None:
            try:
                return LineIndex.from_bytes(document)
            except ColumnError:  # written by another version: made anew below
                pass
        index, _ = await self._indexing.run(name, lambda: self._made(name, bucket, key, record))
        return index

    async def _made(self, name: str, bucket: str, key: str, record: Record) -> LineIndex:
        if not isinstance(record, FarRecord):
            return await self._index(name, bucket, key, record)
        await self._objects.bring(bucket, key, record)
        here = self._objects.here(bucket, key, record.etag)
        if here is not None:
            return await self._index(name, bucket, key, here)
        document = await self._objects.archive_index(bucket, key, record, lines=True)
        await self._catalog.write(name, document)
        return LineIndex.from_bytes(document)

    async def _index(self, name: str, bucket: str, key: str, record: Record) -> LineIndex:
        plain, url = await unpacked(self._archives, bucket, key, record), f"s3://{bucket}/{key}"
        try:
            with self._store.reading(plain, 0, plain.size) as spans:
                most = self._capacity.most(fields=1)
                most = MAX_LINES if most is None else min(MAX_LINES, most)
                index = await asyncio.to_thread(lambda: index_lines(pieces_of(spans), most))
        except LineError as error:
            raise BatchError(
                "BadSample",
                f"{url} is no file of lines: {error}",
                help="split it, or leave it out of the source's folder",
                detail={"url": url},
            ) from error
        index = replace(index, size=plain.size)
        await self._catalog.write(name, index.to_bytes())
        return index


def pieces_of(spans: Sequence[Span]) -> Iterator[bytes]:
    """The bytes of a stored file, in pieces."""
    for span in spans:
        for start in range(0, span.length, _PIECE):
            yield os.pread(span.fd, min(_PIECE, span.length - start), span.offset + start)
