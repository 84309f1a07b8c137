"""Row groups of Parquet files that a filter can leave out by their statistics, unconverted.

Law: a group is left out only if no row of it can match, so the samples are the same as without statistics.
What they do not tell keeps the group. They are believed: a file that lies about its rows loses them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError, busy
from meshd.datasets.index_documents import IndexDocuments
from meshd.peer_reads.remote_objects import BlockingObjects
from meshd.transform.parquet.client import (
    ParquetError,
    ParquetInterruptedError,
    ParquetUnsupportedError,
    parquet_rows,
)
from meshwire.dataset.archive_paths import MEMBERS, SLICES
from meshwire.dataset.snapshot import MAX_SAMPLES
from meshwire.formats.table_rows import slice_of
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.dataset.column_filter import Condition, Scalar
    from meshwire.frame.columns import Integers

WORTH_BYTES: Final = 4 << 20
"""Smaller files are converted in the time that a process needs to read their footer."""
_AT_ONCE: Final = 2
_MEMORY: Final = 1 << 30
_SECONDS: Final = 60.0
_MOST_BYTES: Final = 64 << 20
_PARQUET: Final = (".parquet", ".pq")


class GroupStatistics(msgspec.Struct, frozen=True):
    """`rows`: of each row group; by column, the least and greatest value of each group, or None."""

    rows: list[int]
    columns: dict[str, list[tuple[bool | int | float | str, bool | int | float | str] | None]]

    def matching_slices(self, conditions: Sequence[Condition]) -> int:
        """Return the bits of the slices that may have a row for which all conditions hold."""
        known = [(each, self.columns[each.column]) for each in conditions if each.column in self.columns]
        found = 0
        for group in range(len(self.rows)):
            if all(_may_hold(condition, ranges[group]) for condition, ranges in known):
                found |= 1 << slice_of(group, len(self.rows))
        return found

    def row_numbers(self, slices: int) -> Integers:
        """Return int64[n], the numbers of the rows in these slices."""
        ends, groups, slices = np.cumsum([0, *self.rows]).tolist(), len(self.rows), slices % MEMBERS
        kept = [group for group in range(groups) if slices >> slice_of(group, groups) & 1]
        return np.concatenate([np.arange(ends[group], ends[group + 1], dtype=np.int64) for group in kept])


class TablePart(NamedTuple):
    """A file of a table, and the bits of those of its slices that are read, 0 for all of it; then
    `statistics` are those of its row groups."""

    key: str
    record: Record
    slices: int = 0
    statistics: GroupStatistics | None = None


class TableStatistics:
    """Reads the statistics of files, for a worker."""

    def __init__(self, catalog: DocumentStore, objects: RemoteObjects) -> None:
        self._objects = objects
        self._known = IndexDocuments(catalog, "the footer of a table", _parse_statistics)

    def __repr__(self) -> str:
        return f"<TableStatistics {self._known}>"

    async def matching_parts(
        self,
        listing: Sequence[tuple[str, Record]],
        bucket: str,
        conditions: Sequence[Condition],
        *,
        sliced: bool,
    ) -> list[TablePart]:
        """Return of the files what may have a row for which all conditions hold, and something of the first
        one, whose schema is the table's; whole files unless `sliced`. Raises BatchError BadSample,
        NotImplemented."""
        kept: list[TablePart] = []
        for start in range(0, len(listing), _AT_ONCE):
            some = listing[start : start + _AT_ONCE]
            found = await asyncio.gather(*[self._part(bucket, *entry, conditions) for entry in some])
            kept += [part for part in found if part is not None]
        if not kept or kept[0].key != listing[0][0]:
            kept.insert(0, TablePart(*listing[0], 1, await self._statistics_of(bucket, *listing[0])))
        return kept if sliced else [TablePart(part.key, part.record) for part in kept]

    async def _part(
        self, bucket: str, key: str, record: Record, conditions: Sequence[Condition]
    ) -> TablePart | None:
        """Return what of a file may match, None if nothing does."""
        if record.size < WORTH_BYTES or not key.lower().endswith(_PARQUET):
            return TablePart(key, record)
        found = await self._statistics_of(bucket, key, record)
        slices = found.matching_slices(conditions)
        if not found.rows or slices == (1 << min(SLICES, len(found.rows))) - 1:
            return TablePart(key, record)
        return TablePart(key, record, slices, found) if slices else None

    async def _statistics_of(self, bucket: str, key: str, record: Record) -> GroupStatistics:
        url, name = f"s3://{bucket}/{key}", f"tables/{record.etag}-{record.size}-statistics"

        async def make() -> bytes:
            blocking = BlockingObjects(self._objects)
            return await asyncio.to_thread(_read, blocking, bucket, key, record)

        return await self._known.read(name, url, make)


def _may_hold(condition: Condition, found: tuple[Scalar, Scalar] | None) -> bool:
    return found is None or condition.may_hold(*found)


def _parse_statistics(document: bytes) -> GroupStatistics:
    try:
        found = msgspec.json.decode(document, type=GroupStatistics)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ColumnError(str(error)) from error
    if any(rows < 0 for rows in found.rows) or sum(found.rows) > MAX_SAMPLES:
        raise ColumnError("its row groups have an impossible number of rows")
    if any(len(groups) != len(found.rows) for groups in found.columns.values()):
        raise ColumnError("its columns have different numbers of row groups")
    return found


def _read(objects: BlockingObjects, bucket: str, key: str, record: Record) -> bytes:
    def read(offset: int, length: int) -> bytes:
        return objects.read_range(bucket, key, record, offset, length)

    found = bytearray()
    try:
        for piece in parquet_rows(read, record.size, kind="statistics", memory=_MEMORY, silent=_SECONDS):
            found += piece
            if len(found) > _MOST_BYTES:
                return b'{"rows": [], "columns": {}}'
    except ParquetUnsupportedError as error:
        raise BatchError("NotImplemented", str(error)) from error
    except ParquetInterruptedError as error:
        raise busy(f"s3://{bucket}/{key} cannot be read now: {error}") from error
    except ParquetError as error:
        url = f"s3://{bucket}/{key}"
        raise BatchError("BadSample", f"{url} cannot be read: {error}", detail={"url": url}) from error
    return bytes(found)
