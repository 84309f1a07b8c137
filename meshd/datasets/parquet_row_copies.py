"""Parquet files: rows are converted once per content into a copy from which samples are read.

Law: value positions are stored by the ETag of the file, so they are known without the copy. The copy may
be evicted at any time; recreating it gives the same bytes. An unreadable file is refused by name, with
the cause.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from meshd.datasets.index_documents import IndexDocuments, read_copy_document, split_copy_document
from meshwire.dataset.archive_paths import copy_kind
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.parquet_rows import FOOTER_BYTES, RowLengths, column_fields, lengths_range
from meshwire.frame.columns import ColumnError
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.formats.record_index import RecordIndex


class ParquetRows(NamedTuple):
    """The rows of a file: the size of its copy and the lengths of its values; `document` has both encoded."""

    size: int
    lengths: RowLengths
    document: bytes


class ParquetFiles:
    """Indexes Parquet files, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        archives: DecompressedArchives,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._archives, self._objects = store, archives, objects
        self._indexes = IndexDocuments(catalog, "Parquet", _parse_rows)

    def __repr__(self) -> str:
        return f"<ParquetFiles {self._indexes}>"

    async def require_columns(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> None:
        """Raise PlanError for a field whose column the first file does not have or that is not supported;
        BatchError BadSample, TooLarge, NotImplemented."""
        first = (await self.read_rows(source.bucket, *listing[0])).lengths
        for name, spec in fields.items():
            if spec.column is not None:
                _check_column(name, spec.column, first, listing[0][0])

    async def index_file(self, bucket: str, key: str, record: Record, columns: Sequence[str]) -> RecordIndex:
        """Return the positions of these columns in the rows of a file. Raises BatchError BadSample, TooLarge,
        NotImplemented."""
        rows = await self.read_rows(bucket, key, record)
        return await asyncio.to_thread(rows.lengths.choose, columns, rows.size)

    async def guess_fields(
        self, listing: Sequence[tuple[str, Record]], source: Source
    ) -> dict[str, dict[str, str]]:
        """Return a field for each column of the first file. Raises EmptySnapshotError; BatchError BadSample,
        TooLarge, NotImplemented."""
        if not listing:
            raise _without(source)
        return column_fields(list((await self.read_rows(source.bucket, *listing[0])).lengths.columns))

    async def read_rows(self, bucket: str, key: str, record: Record) -> ParquetRows:
        """Return the row lengths of a file. Raises BatchError BadSample, TooLarge, NotImplemented."""

        async def make() -> bytes:
            here = await self._objects.hold_whole(bucket, key, record)
            if here is None:
                return await self._objects.fetch_index(bucket, key, record, rows=True)
            copy = await self._archives.decompressed(bucket, key, here)
            return await asyncio.to_thread(read_copy_document, self._store, copy, FOOTER_BYTES, lengths_range)

        return await self._indexes.read(f"parquet/{record.etag}-{record.size}", f"s3://{bucket}/{key}", make)


def parquet_files(listing: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the entries of a listing that are nonempty Parquet files."""
    return [entry for entry in listing if entry[1].size and is_parquet(entry[0])]


def is_parquet(key: str) -> bool:
    """Return whether a file is a Parquet file by its key."""
    return copy_kind(key) == "parquet"


def _parse_rows(document: bytes) -> ParquetRows:
    """Parses the stored row lengths of a file. Raises ColumnError."""
    size, encoded = split_copy_document(document)
    lengths = RowLengths.from_bytes(encoded)
    if lengths.data_bytes > size:
        raise ColumnError("its converted copy ends before its last row")
    return ParquetRows(size, lengths, document)


def _check_column(name: str, column: str, rows: RowLengths, key: str) -> None:
    if column in rows.refused:
        message = f"{column!r} has the type {rows.refused[column]}, which is not supported"
        raise PlanError(
            f"fields.{name}", f"{message}: write it as bytes, text, a number or a list of numbers"
        )
    if column not in rows.columns:
        hint = suggestion(column, rows.columns)
        raise PlanError(f"fields.{name}", f"there is no column {column!r} in {key}{hint}")


def _without(source: Source) -> EmptySnapshotError:
    return EmptySnapshotError(
        "source", f"there is no Parquet file in {source}; expected names that end in .parquet or .pq"
    )
