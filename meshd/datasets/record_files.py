"""Indexes of JSON Lines and TFRecord files, created once per content and stored by ETag and size.

Law: a file of any size is read in pieces. A malformed file, or one with a record too long for a sample,
is refused by name. A gzip or zstd file is read through its decompressed copy; the sizes of the two must
differ, because a snapshot tells them apart by size.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.core.api_errors import BatchError
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.archive_keys import compression_kind
from meshwire.formats.json_lines import MAX_LINES, LineError, LineIndex, index_lines
from meshwire.formats.record_index import RecordIndex
from meshwire.formats.tfrecord_index import TfrecordError, index_records
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span


def content_name(key: str, record: Record) -> str:
    """Return a name for the content of a file after decompression by its extension."""
    packed = compression_kind(key)
    return f"{record.etag}-{record.size}" + (f".{packed}" if packed else "")


async def decompressed_object(
    archives: DecompressedArchives, bucket: str, key: str, record: Record
) -> Record:
    """Return the object that holds the plain bytes of a file. Raises BatchError BadSample, TooLarge, Busy."""
    if compression_kind(key) is None:
        return record
    plain = await archives.decompressed(bucket, key, record)
    if plain.size == record.size:
        raise BatchError(
            "BadSample",
            f"s3://{bucket}/{key} has {record.size} bytes both compressed and decompressed",
            help="compression saves nothing: store it uncompressed",
            detail={"url": f"s3://{bucket}/{key}"},
        )
    return plain


_PIECE = 4 << 20


class LineIndexer:
    """Indexes JSON Lines files, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        archives: DecompressedArchives,
        objects: RemoteObjects,
        capacity: SnapshotCapacity,
    ) -> None:
        self._capacity = capacity
        self._store, self._catalog, self._archives, self._objects = store, catalog, archives, objects
        self._indexing: SingleFlight[str, LineIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<LineIndexer, {len(self._indexing)} files being indexed>"

    async def index_file(self, bucket: str, key: str, record: Record) -> LineIndex:
        """Return the positions of the lines of a file. Raises BatchError BadSample."""
        name = f"lines/{content_name(key, record)}"
        document = self._catalog.read_document(name)
        if document is not None:
            try:
                return LineIndex.from_bytes(document)
            except ColumnError:  # written by another version: rebuilt below
                pass
        index, _ = await self._indexing.run(name, lambda: self._made(name, bucket, key, record))
        return index

    async def _made(self, name: str, bucket: str, key: str, record: Record) -> LineIndex:
        here = await self._objects.hold_whole(bucket, key, record)
        if here is not None:
            return await self._index(name, bucket, key, here)
        document = await self._objects.fetch_index(bucket, key, record, lines=True)
        await self._catalog.write_document(name, document)
        return LineIndex.from_bytes(document)

    async def _index(self, name: str, bucket: str, key: str, record: Record) -> LineIndex:
        plain, url = await decompressed_object(self._archives, bucket, key, record), f"s3://{bucket}/{key}"
        try:
            with self._store.open_spans(plain, 0, plain.size) as spans:
                most = self._capacity.max_samples(fields=1)
                most = MAX_LINES if most is None else min(MAX_LINES, most)
                index = await asyncio.to_thread(lambda: index_lines(read_pieces(spans), most))
        except LineError as error:
            raise BatchError(
                "BadSample",
                f"{url} is not a valid file of lines: {error}",
                help="split it, or move it out of the source's folder",
                detail={"url": url},
            ) from error
        index = replace(index, size=plain.size)
        await self._catalog.write_document(name, index.to_bytes())
        return index


def read_pieces(spans: Sequence[Span]) -> Iterator[bytes]:
    """Yield the bytes of a stored file in pieces."""
    for span in spans:
        for start in range(0, span.length, _PIECE):
            yield os.pread(span.fd, min(_PIECE, span.length - start), span.offset + start)


class TfrecordIndexer:
    """Indexes TFRecord files, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        archives: DecompressedArchives,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._catalog, self._archives, self._objects = store, catalog, archives, objects
        self._indexing: SingleFlight[str, RecordIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<TfrecordIndexer, {len(self._indexing)} files being indexed>"

    async def index_file(self, bucket: str, key: str, record: Record, features: Sequence[str]) -> RecordIndex:
        """Return the positions of these features in the records of a file. Raises BatchError BadSample."""
        wanted = sorted(set(features))
        digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:32]
        name = f"tfrecords/{content_name(key, record)}-{digest}"
        document = self._catalog.read_document(name)
        if document is not None:
            try:
                return RecordIndex.from_bytes(document)
            except ColumnError:  # written by another version: rebuilt below
                pass
        index, _ = await self._indexing.run(name, lambda: self._made(name, bucket, key, record, wanted))
        return index

    async def _made(
        self, name: str, bucket: str, key: str, record: Record, wanted: Sequence[str]
    ) -> RecordIndex:
        here = await self._objects.hold_whole(bucket, key, record)
        if here is not None:
            return await self._index(name, bucket, key, here, wanted)
        document = await self._objects.fetch_index(bucket, key, record, features=wanted)
        await self._catalog.write_document(name, document)
        return RecordIndex.from_bytes(document)

    async def _index(
        self, name: str, bucket: str, key: str, record: Record, wanted: Sequence[str]
    ) -> RecordIndex:
        plain, url = await decompressed_object(self._archives, bucket, key, record), f"s3://{bucket}/{key}"
        try:
            with self._store.open_spans(plain, 0, plain.size) as spans:
                index = await asyncio.to_thread(lambda: index_records(read_pieces(spans), wanted))
        except TfrecordError as error:
            raise BatchError(
                "BadSample",
                f"{url} is not a valid TFRecord file: {error}",
                help="write it again, or move it out of the source's folder",
                detail={"url": url},
            ) from error
        index = replace(index, size=plain.size)
        await self._catalog.write_document(name, index.to_bytes())
        return index
