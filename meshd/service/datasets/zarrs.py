"""Snapshots of Zarr v3 arrays: a sample is a row of the first axis of every array that is a field.

Law: what is listed is what is read: metadata and shard indexes come of the listed objects. An array that lies
about itself is refused by name, never a partial dataset.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshd.assembly.elsewhere import Part
from meshd.assembly.errors import BatchError
from meshwire.columns import StringColumn
from meshwire.documents import PlanError, suggestion
from meshwire.snapshots import Built, BytesColumn, EmptySnapshotError, Objects, Snapshot
from meshwire.zarrchunks import parse_chunked
from meshwire.zarrsources import METADATA, MISSING, boundaries, parse_array, row_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.columns import Integers
    from meshwire.fields import FieldSpec, Source
    from meshwire.zarrsources import Stored

MAX_METADATA = 1 << 20
_TURN = 200


@dataclass(frozen=True, slots=True)
class _Column:
    """Of one array, its `rows` that are stored, rising, and of each the stored object's number, offset and
    length."""

    rows: Integers
    objects: Integers
    offsets: Integers
    lengths: Integers

    def at(self, rows: Integers) -> BytesColumn:
        places = np.searchsorted(self.rows, rows)
        return BytesColumn(self.objects[places].astype(np.int32), self.offsets[places], self.lengths[places])


class ZarrSources:
    """One a worker."""

    def __init__(self, objects: RemoteObjects) -> None:
        self._objects = objects

    def __repr__(self) -> str:
        return "<ZarrSources>"

    async def build(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> Built:
        """Raises PlanError, EmptySnapshotError; BatchError BadSample."""
        records = dict(listing)
        labels = [name for name, spec in fields.items() if spec.kind != "bytes"]
        if labels:
            raise PlanError(f"fields.{labels[0]}", "arrays have no folder of a class; name one of labels")
        if len({spec.chunks for spec in fields.values()}) > 1:
            raise PlanError("fields", "rows of one array and chunks of another make no sample; choose one")
        arrays = {name: await self._array(records, source, spec) for name, spec in fields.items()}
        rows, starts = row_numbers(list(arrays.values())), boundaries(list(arrays.values()))
        keys: list[str] = []
        columns = {}
        for name, array in arrays.items():
            folder = source.prefix + _folder(fields[name])
            columns[name] = await self._column(records, source.bucket, folder, array, keys)
        kept = np.arange(0)
        for number, column in enumerate(columns.values()):
            kept = np.intersect1d(kept, column.rows) if number else column.rows
        if not kept.size:
            raise EmptySnapshotError("source", f"none of the {rows} rows of the arrays in {source} is stored")
        shard_starts = np.unique(np.searchsorted(kept, starts)).astype(np.int64)
        if next(iter(fields.values())).chunks:
            largest = max(arrays, key=lambda name: arrays[name].row_bytes)
            kept, shard_starts = _by_object(kept, columns[largest])
        found = {name: column.at(kept) for name, column in columns.items()}
        snapshot = _sealed(source, fields, [(key, records[key]) for key in keys], found, kept, shard_starts)
        left_out = max(array.left_out for array in arrays.values())
        return Built(snapshot, rows - int(kept.size) + left_out, ())

    async def _array(self, records: Mapping[str, Record], source: Source, spec: FieldSpec) -> Stored:
        key, path = f"{source.prefix}{_folder(spec)}{METADATA}", f"fields.{spec.name}"
        record = records.get(key)
        if record is None:
            arrays = [name.removesuffix(f"/{METADATA}") for name in records if name.endswith(METADATA)]
            below = [name.removeprefix(source.prefix) for name in arrays]
            before = any(name.endswith("/.zarray") for name in records)
            none = (
                "; Zarr version 2 is not read: write it as version 3"
                if before
                else "; there is no array at all"
            )
            hint = suggestion(spec.array or "", below) if below else none
            raise PlanError(path, f"there is no {key}{hint}")
        if record.size > MAX_METADATA:
            raise PlanError(path, f"{key} has {record.size} bytes: too many for an array's metadata")
        document = await self._objects.read(source.bucket, key, record.etag, 0, record.size)
        return parse_chunked(document, path) if spec.chunks else parse_array(document, path)

    async def _column(
        self, records: Mapping[str, Record], bucket: str, folder: str, array: Stored, keys: list[str]
    ) -> _Column:
        parts: list[_Column] = []
        stored = [
            (number, key, record)
            for number in range(array.objects)
            if (record := records.get(key := folder + array.key(number))) is not None
        ]
        for start in range(0, len(stored), _TURN):
            some = stored[start : start + _TURN]
            indexes = await self._indexes(bucket, some, array)
            for (number, key, record), index in zip(some, indexes, strict=True):
                offsets, lengths = _places(f"s3://{bucket}/{key}", record, array, index)
                there = np.flatnonzero(offsets != MISSING)
                which = np.full(there.size, len(keys), np.int64)
                parts.append(_Column(array.numbers(number)[there], which, offsets[there], lengths[there]))
                keys.append(key)
            await asyncio.sleep(0)  # other requests get their turn
        if not parts:
            return _Column(*[np.zeros(0, np.int64)] * 4)
        rows, *columns = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "objects", "offsets", "lengths")
        )
        inside = np.flatnonzero(rows < array.rows)
        inside = inside[np.argsort(rows[inside], kind="stable")]
        return _Column(rows[inside], *(column[inside] for column in columns))

    async def _indexes(
        self, bucket: str, some: Sequence[tuple[int, str, Record]], array: Stored
    ) -> list[bytes]:
        wanted = []
        for _, key, record in some:
            length = min(array.index_bytes, record.size)
            start = record.size - length if array.index_end else 0
            wanted.append(Part(bucket, key, record.etag, -1, start, length))
        return await self._objects.read_many(wanted)


def _places(url: str, record: Record, array: Stored, index: bytes) -> tuple[Integers, Integers]:
    try:
        return array.places(record.size, index)
    except ValueError as error:
        raise BatchError(
            "BadSample",
            f"{url} is no chunk of its array: {error}",
            help="write the array again",
            detail={"url": url},
        ) from error


def _by_object(kept: Integers, column: _Column) -> tuple[Integers, Integers]:
    """Samples in the order in which they are stored, and where those of each object begin, and the end."""
    numbers = column.at(kept).object
    order = np.argsort(numbers, kind="stable")
    _, firsts = np.unique(numbers[order], return_index=True)
    return kept[order], np.append(firsts, kept.size).astype(np.int64)


def _folder(spec: FieldSpec) -> str:
    return f"{spec.array}/" if spec.array else ""


def _sealed(
    source: Source,
    fields: Mapping[str, FieldSpec],
    stored: Sequence[tuple[str, Record]],
    found: Mapping[str, BytesColumn],
    kept: Integers,
    shard_starts: Integers,
) -> Snapshot:
    keys = StringColumn.of([key for key, _ in stored])
    etags = StringColumn.of([record.etag for _, record in stored])
    sizes = np.array([record.size for _, record in stored], np.int64)
    names = StringColumn.of([f"{row:09d}" for row in kept.tolist()])
    objects = Objects(source.bucket, keys, etags, sizes)
    return Snapshot.sealed(str(source), "zarr", objects, shard_starts, found, fields, names)
