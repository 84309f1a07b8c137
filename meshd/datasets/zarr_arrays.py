"""Snapshots of Zarr v3 arrays: a sample is one row along the first axis of every array that is a field.

Law: metadata and shard indexes come from the listed objects. An inconsistent array is refused by name;
it never yields a partial dataset.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.peer_source import ObjectRange
from meshwire.dataset.build_snapshot import (
    BytesColumn,
    EmptySnapshotError,
    ObjectTable,
    Snapshot,
    SnapshotBuild,
)
from meshwire.formats.zarr_source import METADATA, parse_array, parse_chunked, row_numbers, shard_starts
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.formats.zarr_source import RowLocations, StoredArray
    from meshwire.frame.columns import Integers

MAX_METADATA = 1 << 20
_TURN, _TURN_BYTES = 200, 16 << 20  # shard indexes read at a time, and their bytes
_Object = tuple[int, str, "Record"]  # its number in the array, its key, its record


class _Column(msgspec.Struct, frozen=True):
    """The stored rows of an array in ascending order, each with its object's number, offset and length."""

    rows: Integers
    objects: Integers
    offsets: Integers
    lengths: Integers

    def at(self, rows: Integers) -> BytesColumn:
        places = np.searchsorted(self.rows, rows)
        return BytesColumn(self.objects[places].astype(np.int32), self.offsets[places], self.lengths[places])


class ZarrSources:
    """Creates snapshots of Zarr arrays, for a worker."""

    def __init__(self, objects: RemoteObjects, capacity: SnapshotCapacity) -> None:
        self._objects, self._capacity = objects, capacity

    async def build_snapshot(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> SnapshotBuild:
        """Create the snapshot. Raises PlanError, EmptySnapshotError; BatchError BadSample."""
        records = dict(listing)
        labels = [name for name, spec in fields.items() if spec.kind != "bytes"]
        if labels:
            raise PlanError(
                f"fields.{labels[0]}", "arrays have no class folders; use an array of labels instead"
            )
        if len({spec.chunks for spec in fields.values()}) > 1:
            raise PlanError("fields", "rows and chunks cannot be mixed in a sample; use one for all fields")
        arrays = {name: await self._array(records, source, spec) for name, spec in fields.items()}
        row_numbers(list(arrays.values()))
        keys, taken = list[str](), 0
        columns = {}
        for name, array in arrays.items():
            folder = source.prefix + _folder(fields[name])
            columns[name] = await self._column(records, source.bucket, folder, array, keys)
            taken += columns[name].rows.size
            self._capacity.require_room(taken, 1, source)
        gathered = _Gathered(source, fields, arrays, columns, [(key, records[key]) for key in keys])
        return await asyncio.to_thread(gathered.built)

    async def _array(self, records: Mapping[str, Record], source: Source, spec: FieldSpec) -> StoredArray:
        key, path = f"{source.prefix}{_folder(spec)}{METADATA}", f"fields.{spec.name}"
        record = records.get(key)
        if record is None:
            arrays = [name.removesuffix(f"/{METADATA}") for name in records if name.endswith(METADATA)]
            below = [name.removeprefix(source.prefix) for name in arrays]
            before = any(name.endswith("/.zarray") for name in records)
            none = (
                "; arrays of Zarr version 2 are opened with mesh.open_zarr"
                if before
                else "; there are no arrays here"
            )
            hint = suggestion(spec.array or "", below) if below else none
            raise PlanError(path, f"there is no {key}{hint}")
        if record.size > MAX_METADATA:
            raise PlanError(path, f"{key} has {record.size} bytes; metadata has at most {MAX_METADATA}")
        document = await self._objects.read_range(source.bucket, key, record.etag, 0, record.size)
        return await asyncio.to_thread(parse_chunked if spec.chunks else parse_array, document, path)

    async def _column(
        self, records: Mapping[str, Record], bucket: str, folder: str, array: StoredArray, keys: list[str]
    ) -> _Column:
        parts, samples = list[_Column](), 0
        stored = await asyncio.to_thread(_stored_objects, records, folder, array)
        for some in _turns(stored, array):
            indexes = await self._indexes(bucket, some, array)
            placed = await asyncio.to_thread(_place_samples, bucket, array, some, indexes, len(keys))
            parts += placed
            samples += sum(part.rows.size for part in placed)
            self._capacity.require_room(samples, 1, f"s3://{bucket}/{folder}")
            keys += [key for _, key, _ in some]
        return await asyncio.to_thread(_join_columns, parts)

    async def _indexes(self, bucket: str, some: Sequence[_Object], array: StoredArray) -> list[bytes]:
        wanted = []
        for _, key, record in some:
            length = min(array.index_bytes, record.size)
            start = record.size - length if array.index_end else 0
            wanted.append(ObjectRange(bucket, key, record.etag, -1, start, length))
        return await self._objects.read_parts(wanted)


def _stored_objects(records: Mapping[str, Record], folder: str, array: StoredArray) -> list[_Object]:
    """Return the stored objects of an array, from the listing: metadata may claim any number of objects."""
    found = []
    for key, record in records.items():
        number = array.object_number(key[len(folder) :]) if key.startswith(folder) else None
        if number is not None:
            found.append((number, key, record))
    return sorted(found, key=lambda each: each[0])


def _turns(stored: Sequence[_Object], array: StoredArray) -> Iterator[Sequence[_Object]]:
    """Yield as many objects at a time as have indexes of a few MiB together; at least one."""
    each = max(1, min(_TURN, _TURN_BYTES // max(1, array.index_bytes)))
    for start in range(0, len(stored), each):
        yield stored[start : start + each]


def _place_samples(
    bucket: str, array: StoredArray, some: Sequence[_Object], indexes: Sequence[bytes], before: int
) -> list[_Column]:
    """Return the positions of the samples in these objects; `before`: the number of the first object."""
    columns = []
    for place, ((number, key, record), index) in enumerate(zip(some, indexes, strict=True)):
        rows, offsets, lengths = _places(f"s3://{bucket}/{key}", number, record, array, index)
        columns.append(_Column(rows, np.full(rows.size, before + place, np.int64), offsets, lengths))
    return columns


def _join_columns(parts: Sequence[_Column]) -> _Column:
    if not parts:
        return _Column(*[np.zeros(0, np.int64)] * 4)
    rows, *columns = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("rows", "objects", "offsets", "lengths")
    )
    order = np.argsort(rows, kind="stable")
    return _Column(rows[order], *(column[order] for column in columns))


def _places(url: str, number: int, record: Record, array: StoredArray, index: bytes) -> RowLocations:
    try:
        return array.locate_rows(number, record.size, index)
    except ValueError as error:
        raise BatchError(
            "BadSample",
            f"{url} is not a valid chunk of its array: {error}",
            help="write the array again",
            detail={"url": url},
        ) from error


class _Gathered(msgspec.Struct, frozen=True):
    """The input of a snapshot; `stored`: the objects that the columns number."""

    source: Source
    fields: Mapping[str, FieldSpec]
    arrays: Mapping[str, StoredArray]
    columns: Mapping[str, _Column]
    stored: Sequence[tuple[str, Record]]

    def built(self) -> SnapshotBuild:
        """Return the snapshot. Raises EmptySnapshotError."""
        arrays = list(self.arrays.values())
        kept = self._common_rows()
        if not kept.size:
            raise EmptySnapshotError(
                "source", f"none of the {arrays[0].rows} rows of the arrays in {self.source} is stored"
            )
        starts = shard_starts(arrays, kept)
        if next(iter(self.fields.values())).chunks:
            largest = max(self.arrays, key=lambda name: self.arrays[name].row_bytes)
            kept, starts = _by_object(kept, self.columns[largest])
        found = {name: column.at(kept) for name, column in self.columns.items()}
        snapshot = _seal(self.source, self.fields, self.stored, found, kept, starts)
        left_out = max(array.left_out for array in arrays)
        return SnapshotBuild(snapshot, arrays[0].rows - int(kept.size) + left_out, ())

    def _common_rows(self) -> Integers:
        """Return the rows that every array has."""
        first, *more = [column.rows for column in self.columns.values()]
        for rows in more:
            first = np.intersect1d(first, rows)
        return first


def _by_object(kept: Integers, column: _Column) -> tuple[Integers, Integers]:
    """Return the samples in stored order, and where those of each object begin, plus the end."""
    numbers = column.at(kept).object
    order = np.argsort(numbers, kind="stable")
    _, firsts = np.unique(numbers[order], return_index=True)
    return kept[order], np.append(firsts, kept.size).astype(np.int64)


def _folder(spec: FieldSpec) -> str:
    return f"{spec.array}/" if spec.array else ""


def _seal(
    source: Source,
    fields: Mapping[str, FieldSpec],
    stored: Sequence[tuple[str, Record]],
    found: Mapping[str, BytesColumn],
    kept: Integers,
    starts: Integers,
) -> Snapshot:
    keys = StringColumn.from_strings([key for key, _ in stored])
    etags = StringColumn.from_strings([record.etag for _, record in stored])
    sizes = np.array([record.size for _, record in stored], np.int64)
    names = StringColumn.from_numbers(kept)
    objects = ObjectTable(source.bucket, keys, etags, sizes)
    return Snapshot.from_parts(str(source), "zarr", objects, starts, found, fields, names)
