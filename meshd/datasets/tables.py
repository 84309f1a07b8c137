"""Tables: Parquet and Arrow files, converted once per content into a copy of typed records.

Law: positions of values follow from the index of a file, which is stored by its ETag; the copy may be evicted
and is made again with the same bytes. A filter is evaluated over columns of the copy, block by block.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.peer_source import ObjectRange
from meshd.datasets.index_documents import IndexDocuments, read_copy_document, split_copy_document
from meshd.datasets.table_statistics import TablePart, TableStatistics
from meshd.peer_reads.remote_objects import BlockingObjects
from meshd.util.async_tasks import CallProgress
from meshwire.dataset.archive_paths import (
    MEMBERS,
    TABLE_ENDINGS,
    ArchiveError,
    is_table,
    pinned_size,
    table_kind,
)
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.dataset.fields import parse_fields
from meshwire.formats.table_rows import FOOTER_BYTES, TableIndex, index_range
from meshwire.formats.table_snapshot import (
    TableFile,
    all_fields,
    build_from_tables,
    find_column,
    resolve_fields,
    with_columns_left_out,
    with_ids,
    with_masks,
)
from meshwire.frame.columns import ColumnError
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.build_snapshot import SnapshotBuild
    from meshwire.dataset.column_filter import Condition
    from meshwire.dataset.fields import FieldSpec, Source

_AT_ONCE: Final = 2  # files converted at a time


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How a table is read. `conditions`: of its filter; `masks`: rows with nulls are kept, and a field has
    another one that says where it has a value; `ids`: text columns that are delivered as ids; `files`: the
    names below the source of its files, which may have others, too; `sliced`: row groups may be left out;
    `members`: copies may have the members of structs in lists."""

    conditions: tuple[Condition, ...] = ()
    masks: bool = False
    ids: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    sliced: bool = False
    members: bool = False

    def __repr__(self) -> str:
        """A result of a snapshot is named by it: without `files` and `sliced` it is what it was without them,
        and `members` changes no result."""
        text = f"TableOptions(conditions={self.conditions!r}, masks={self.masks!r}, ids={self.ids!r}"
        return f"{text}{f', files={self.files!r}' * bool(self.files)}{', sliced' * self.sliced})"


class IndexedTable(msgspec.Struct, frozen=True, eq=False):
    """The index of a file and the size of its copy; `document` has both encoded."""

    size: int
    index: TableIndex
    document: bytes


class TableFiles:
    """Indexes tables and builds their snapshots, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        archives: ArchiveService,
        objects: RemoteObjects,
        capacity: SnapshotCapacity,
    ) -> None:
        self._capacity = capacity
        self._store, self._archives, self._objects = store, archives, objects
        self._indexes = IndexDocuments(catalog, "a table", _parse_index)
        self._statistics = TableStatistics(catalog, objects)

    def __repr__(self) -> str:
        return f"<TableFiles {self._indexes}>"

    async def matching_parts(
        self,
        listing: Sequence[tuple[str, Record]],
        source: Source,
        fields: Mapping[str, FieldSpec],
        options: TableOptions,
    ) -> list[TablePart]:
        """Return the files without what the filter leaves out of them by their statistics; with the bit
        MEMBERS, if a column is wanted that only such copies have. Ids are numbered over all rows. Raises
        BatchError BadSample, NotImplemented."""
        if not options.conditions or options.ids or not listing:
            parts = [TablePart(*entry) for entry in listing]
        else:
            parts = await self._statistics.matching_parts(
                listing, source.bucket, options.conditions, sliced=options.sliced
            )
        wanted = {spec.column for spec in fields.values() if spec.column is not None}
        if parts and wanted and options.members:
            first = (await self.read_table(source.bucket, *parts[0][:3])).index
            if any(_is_within(column, first.refused) for column in wanted):
                parts = [part._replace(slices=part.slices | MEMBERS) for part in parts]
        return parts

    async def index_files(
        self, parts: Sequence[TablePart], source: Source, progress: CallProgress
    ) -> list[IndexedTable]:
        """Return the index of each file, or of what is read of it. Raises EmptySnapshotError; BatchError
        BadSample, TooLarge, NotImplemented."""
        if not parts:
            raise EmptySnapshotError(
                "source",
                f"there is no table in {source}; expected names that end in {', '.join(TABLE_ENDINGS)}",
            )
        found: list[IndexedTable] = []
        rows = 0
        for start in range(0, len(parts), _AT_ONCE):
            some = parts[start : start + _AT_ONCE]
            found += await asyncio.gather(*[self.read_table(source.bucket, *part[:3]) for part in some])
            rows += sum(table.index.rows for table in found[start:])
            self._capacity.require_room(rows, 1, source)
            progress.done = len(found) / len(parts)
        return found

    async def build_snapshot(
        self,
        parts: Sequence[TablePart],
        source: Source,
        fields: Mapping[str, FieldSpec],
        options: TableOptions,
    ) -> SnapshotBuild:
        """Build the snapshot of these files, or parts of files; without `fields`, of all columns. Raises
        PlanError and what `index_files` raises."""
        tables = await self.index_files(parts, source, CallProgress())
        first, guessed = tables[0].index, not fields
        if guessed:
            fields = parse_fields(all_fields(first))
        if options.ids:
            fields = with_ids(fields, options.ids)
        if options.masks:
            fields = with_masks(fields, first)
        resolved = resolve_fields(fields, first, parts[0].key)
        if all(spec.kind != "bytes" for spec in fields.values()):
            raise PlanError("ids", "these are all columns of the dataset: it needs another one, too")
        files = []
        for part, table in zip(parts, tables, strict=True):
            kept, url = None, f"s3://{source.bucket}/{part.key}"
            try:
                size = pinned_size(part.slices, table.size)
            except ArchiveError as error:
                raise BatchError("TooLarge", f"{url}: {error}", help="write smaller files") from error
            if options.conditions:
                kept = await self._kept_rows(source.bucket, part, size, table.index, options.conditions)
            numbers = part.statistics.row_numbers(part.slices) if part.statistics is not None else None
            if numbers is not None and numbers.size != table.index.rows:
                raise BatchError(
                    "BadSample", f"the rows of {url} do not match its footer", detail={"url": url}
                )
            files.append(TableFile(part.key, part.record.etag, size, table.index, kept, numbers))
        built = await asyncio.to_thread(build_from_tables, files, source=source, fields=resolved)
        return with_columns_left_out(built, files) if guessed else built

    async def read_table(self, bucket: str, key: str, record: Record, slices: int = 0) -> IndexedTable:
        """Return the index of a file, or of slices of it given as bits. Raises BatchError BadSample,
        TooLarge, NotImplemented."""

        async def make() -> bytes:
            here = await self._objects.hold_whole(bucket, key, record)
            if here is None:
                return await self._objects.fetch_index(bucket, key, record, table=True, slices=slices)
            copy = await self._archives.local.copy_of(table_kind(slices), bucket, key, here)
            return await asyncio.to_thread(read_copy_document, self._store, copy, FOOTER_BYTES, index_range)

        name = f"tables/{record.etag}-{record.size}{f'-{slices:x}' if slices else ''}"
        return await self._indexes.read(name, f"s3://{bucket}/{key}", make)

    async def _kept_rows(
        self, bucket: str, part: TablePart, size: int, index: TableIndex, conditions: Sequence[Condition]
    ) -> npt.NDArray[np.bool_]:
        """Return the rows for which all conditions hold; `size`: under which the copy is pinned. Raises
        PlanError, BatchError."""
        key, record = part.key, part.record
        kinds = {name: column.kind for name, column in index.columns.items()}
        conditions = [condition.for_kind(kinds.get(condition.column, "")) for condition in conditions]
        columns = _filtered_columns(index, key, conditions)
        if not columns:  # only texts, whose ids are in the index
            return await asyncio.to_thread(_matching, index, conditions, lambda offset, length: b"")
        here = await self._objects.hold_whole(bucket, key, record)
        if here is not None:
            copy = await self._archives.local.copy_of(table_kind(part.slices), bucket, key, here)
            return await asyncio.to_thread(
                _matching, index, conditions, partial(self._store.read_range, copy)
            )
        others = BlockingObjects(self._objects)

        def read(offset: int, length: int) -> bytes:
            return others.read_part(ObjectRange(bucket, key, record.etag, size, offset, length))

        return await asyncio.to_thread(_matching, index, conditions, read)


def _is_within(column: str, refused: Mapping[str, str]) -> bool:
    """Return whether a column is one of these, or a member of one."""
    return any(column == name or column.startswith(f"{name}.") for name in refused)


def table_files(listing: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the entries of a listing that are nonempty tables."""
    return [entry for entry in listing if entry[1].size and is_table(entry[0])]


def _parse_index(document: bytes) -> IndexedTable:
    """Parses the stored index of a file. Raises ColumnError."""
    size, encoded = split_copy_document(document)
    index = TableIndex.from_bytes(encoded)
    if max(index.rows, index.data_bytes) > size:  # a row has at least the byte of a length in the index
        raise ColumnError("its converted copy ends before its last row")
    return IndexedTable(size, index, document)


def _filtered_columns(index: TableIndex, key: str, conditions: Sequence[Condition]) -> list[str]:
    """Return the columns whose values have to be read. Raises PlanError for one that cannot be compared."""
    found: list[str] = []
    for number, condition in enumerate(conditions):
        path = f"filter[{number}]"
        column = find_column(path, condition.column, index, key)
        condition.require_kind(path, column.kind, text=column.text)
        if column.text and condition.column not in index.ids:
            raise PlanError(path, f"{condition.column!r} has too many distinct texts in {shown_value(key)}")
        if not column.text and column.shape != ():
            raise PlanError(path, f"{condition.column!r} is {column.kind}; numbers and texts can be compared")
        if not column.text:
            found.append(condition.column)
    return found


def _matching(
    index: TableIndex, conditions: Sequence[Condition], read: Callable[[int, int], bytes]
) -> npt.NDArray[np.bool_]:
    kept = np.ones(index.rows, np.bool_)
    numeric = [condition for condition in conditions if not index.columns[condition.column].text]
    for condition in conditions:
        if condition.column in index.nulls:
            kept &= ~index.nulls[condition.column]
        if index.columns[condition.column].text:
            codes, known = index.ids[condition.column]
            texts = np.array([*known, ""], object)
            kept &= condition.holds(texts)[codes]
    if not numeric:
        return kept
    offsets, distances = index.record_offsets(), index.distances()[0]
    for first in range(0, index.rows, index.block_rows):
        rows = slice(first, min(index.rows, first + index.block_rows))
        if not kept[rows].any():
            continue
        count = rows.stop - rows.start
        data = np.frombuffer(read(int(offsets[first]), count * index.record_bytes), np.uint8)
        records = data.reshape(count, index.record_bytes)
        for condition in numeric:
            column, at = index.columns[condition.column], distances[condition.column]
            values: npt.NDArray[Any] = np.ascontiguousarray(records[:, at : at + column.width])
            kept[rows] &= condition.holds(values.view(np.dtype(column.dtype).newbyteorder("<"))[:, 0])
    return kept
