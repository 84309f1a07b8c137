"""Files of a table that a filter can leave out by the statistics of their row groups, unconverted.

Law: a file is left out only if no row of it can match, so the snapshot is the same as without statistics.
What they do not tell keeps the file. They are believed: a file that lies about its rows loses them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import BatchError
from meshd.datasets.index_documents import IndexDocuments
from meshd.peer_reads.remote_objects import BlockingObjects
from meshd.transform.parquet.client import ParquetError, ParquetUnsupportedError, parquet_rows
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.dataset.column_filter import Condition, Scalar
    from meshwire.dataset.fields import Source

WORTH_BYTES: Final = 4 << 20
"""Smaller files are converted in the time that a process needs to read their footer."""
_AT_ONCE: Final = 2
_MEMORY: Final = 1 << 30
_SECONDS: Final = 60.0
_MOST_BYTES: Final = 64 << 20
_PARQUET: Final = (".parquet", ".pq")


class _Statistics(msgspec.Struct, frozen=True):
    """By column, the least and greatest value of each row group, or None."""

    columns: dict[str, list[tuple[bool | int | float | str, bool | int | float | str] | None]]


class TableStatistics:
    """Reads the statistics of files, for a worker."""

    def __init__(self, catalog: DocumentStore, objects: RemoteObjects) -> None:
        self._objects = objects
        self._known = IndexDocuments(catalog, "the footer of a table", _parsed)

    def __repr__(self) -> str:
        return f"<TableStatistics {self._known}>"

    async def matching_files(
        self, listing: Sequence[tuple[str, Record]], source: Source, conditions: Sequence[Condition]
    ) -> list[tuple[str, Record]]:
        """Return the files that may have a row for which all conditions hold, and the first one, whose schema
        is the table's. Raises BatchError BadSample, NotImplemented."""
        first, *others = listing
        kept = [first]
        for start in range(0, len(others), _AT_ONCE):
            some = others[start : start + _AT_ONCE]
            found = await asyncio.gather(
                *[self._may_match(source.bucket, *entry, conditions) for entry in some]
            )
            kept += [entry for entry, may in zip(some, found, strict=True) if may]
        return kept

    async def _may_match(
        self, bucket: str, key: str, record: Record, conditions: Sequence[Condition]
    ) -> bool:
        if record.size < WORTH_BYTES or not key.lower().endswith(_PARQUET):
            return True
        url, name = f"s3://{bucket}/{key}", f"tables/{record.etag}-{record.size}-statistics"

        async def make() -> bytes:
            blocking = BlockingObjects(self._objects)
            return await asyncio.to_thread(_read, blocking, bucket, key, record)

        found = await self._known.read(name, url, make)
        return may_match(found.columns, conditions)


def may_match(
    columns: Mapping[str, Sequence[tuple[Scalar, Scalar] | None]], conditions: Sequence[Condition]
) -> bool:
    """Return whether some row group may have a row for which all conditions hold."""
    known = [
        (condition, columns[condition.column]) for condition in conditions if condition.column in columns
    ]
    if not known:
        return True
    groups = len(known[0][1])
    return not groups or any(all(_may_hold(*each, group) for each in known) for group in range(groups))


def _may_hold(condition: Condition, ranges: Sequence[tuple[Scalar, Scalar] | None], group: int) -> bool:
    found = ranges[group]
    return found is None or condition.may_hold(*found)


def _parsed(document: bytes) -> _Statistics:
    try:
        found = msgspec.json.decode(document, type=_Statistics)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ColumnError(str(error)) from error
    if len({len(groups) for groups in found.columns.values()}) > 1:
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
                return b'{"columns": {}}'
    except ParquetUnsupportedError as error:
        raise BatchError("NotImplemented", str(error)) from error
    except ParquetError as error:
        url = f"s3://{bucket}/{key}"
        raise BatchError("BadSample", f"{url} cannot be read: {error}", detail={"url": url}) from error
    return bytes(found)
