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
from meshd.datasets.index_documents import IndexDocuments
from meshd.datasets.shard_pages import ShardPages, content_name
from meshd.util.page_cache import release_free_memory
from meshwire.dataset.archive_paths import compression_kind
from meshwire.dataset.paged_snapshot import LINE_PARTS
from meshwire.formats.json_lines import (
    MAX_LINES,
    LineError,
    current_line_index,
    index_lines,
    line_page_facts,
    wide_encoding,
)
from meshwire.formats.record_index import RecordIndex
from meshwire.formats.tfrecord_index import TfrecordError, index_records
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.datasets.shard_pages import FetchPage
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.dataset.paged_snapshot import PageFacts, PageParts


def line_index_name(key: str, etag: str, size: int) -> str:
    """Return the name of the document with the index of a file of lines, which is its page in snapshots."""
    return f"lines/{content_name(key, etag, size)}"


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
_LARGE = 4 << 20  # bytes of an index, whose making took several times as many in small pieces


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
        self._store, self._archives, self._objects = store, archives, objects
        self._catalog = catalog
        self._pages = ShardPages(catalog, "lines", "a file of lines", line_page_facts)

    def __repr__(self) -> str:
        return f"<LineIndexer {self._pages}>"

    def page_name(self, key: str, etag: str, size: int, parts: PageParts) -> str:
        """See `PageMaker`."""
        return line_index_name(key, etag, size)

    def facts_of(self, document: bytes, record: Record, parts: PageParts) -> PageFacts:
        """See `PageMaker`."""
        return line_page_facts(document, record.size)

    async def read_page(
        self,
        bucket: str,
        key: str,
        record: Record,
        parts: PageParts = LINE_PARTS,
        fetch: FetchPage | None = None,
        *,
        again: bool = False,
    ) -> PageFacts:
        """See `PageMaker`. All pages of a file are the same."""
        name = line_index_name(key, record.etag, record.size)

        async def make() -> bytes:
            earlier = None if again else await self._convert_earlier(name)
            if earlier is not None:
                return earlier
            here = await self._objects.hold_whole(bucket, key, record)
            if here is None:
                fetched = await self._objects.fetch_index(bucket, key, record, lines=True)
                return await asyncio.to_thread(current_line_index, fetched)
            return await self._index(bucket, key, here)

        return await self._pages.read(name, f"s3://{bucket}/{key}", record, make, fetch, again=again)

    async def _convert_earlier(self, name: str) -> bytes | None:
        """Return the index that an earlier release made, in the present version."""
        try:
            document = self._catalog.read_intact(name)
            found = None if document is None else await asyncio.to_thread(current_line_index, document)
        except ColumnError:
            return None
        return None if found is document else found

    async def _index(self, bucket: str, key: str, record: Record) -> bytes:
        plain, url = await decompressed_object(self._archives, bucket, key, record), f"s3://{bucket}/{key}"
        try:
            with self._store.open_spans(plain, 0, plain.size) as spans:
                most = self._capacity.max_samples(fields=1)
                most = MAX_LINES if most is None else min(MAX_LINES, most)
                index = await asyncio.to_thread(lambda: index_lines(_text_pieces(spans, url), most))
        except LineError as error:
            raise BatchError(
                "BadSample",
                f"{url} is not a valid file of lines: {error}",
                help="split it, or move it out of the source's folder",
                detail={"url": url},
            ) from error
        large = index.offsets.nbytes > _LARGE
        if large:  # the pieces of which it was made, before the document takes as much
            await asyncio.to_thread(release_free_memory)
        document = await asyncio.to_thread(replace(index, size=plain.size).to_bytes)
        if large:
            del index
            await asyncio.to_thread(release_free_memory)
        return document


def _text_pieces(spans: Sequence[Span], url: str) -> Iterator[bytes]:
    """Yield the bytes of a file of lines in pieces. Raises BatchError BadSample for one whose line feeds are
    not single bytes."""
    for number, piece in enumerate(read_pieces(spans)):
        encoding = wide_encoding(piece[:4]) if number == 0 else ""
        if encoding:
            raise BatchError(
                "BadSample",
                f"{url} is not a file of lines in UTF-8: its byte order mark says {encoding}",
                help=f"convert it: iconv -f {encoding} -t UTF-8; or move it out of the source's folder",
                detail={"url": url},
            )
        yield piece


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
        self._store, self._archives, self._objects = store, archives, objects
        self._indexes = IndexDocuments(catalog, "TFRecord", RecordIndex.from_bytes)

    def __repr__(self) -> str:
        return f"<TfrecordIndexer {self._indexes}>"

    async def index_file(self, bucket: str, key: str, record: Record, features: Sequence[str]) -> RecordIndex:
        """Return the positions of these features in the records of a file. Raises BatchError BadSample."""
        wanted = sorted(set(features))
        digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:32]
        name = f"tfrecords/{content_name(key, record.etag, record.size)}-{digest}"

        async def make() -> bytes:
            here = await self._objects.hold_whole(bucket, key, record)
            if here is None:
                return await self._objects.fetch_index(bucket, key, record, features=wanted)
            return await self._index(bucket, key, here, wanted)

        return await self._indexes.read(name, f"s3://{bucket}/{key}", make)

    async def _index(self, bucket: str, key: str, record: Record, wanted: Sequence[str]) -> bytes:
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
        return replace(index, size=plain.size).to_bytes()
