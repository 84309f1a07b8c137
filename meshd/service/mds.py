"""Snapshots of MDS datasets: the shards that the folder's `index.json` names, each sample's columns in place.

Law: what is listed is what is read; a shard that is not what the index says is refused by name. Where samples
lie is kept by the shard's ETag and what the index says of it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from meshd.assembly.errors import BatchError
from meshwire.columns import ColumnError
from meshwire.documents import PlanError, suggestion
from meshwire.mds import INDEX, MAX_INDEX, UNSAFE, MdsError, index_samples, parse_mds, sample_bounds
from meshwire.recordindexes import RecordIndex, build_from_records
from meshwire.snapshots import EmptySnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshd.assembly.catalog import Catalog
    from meshd.service.remote import RemoteObjects
    from meshd.store.records import Record
    from meshwire.columns import Integers
    from meshwire.fields import FieldSpec, Source
    from meshwire.mds import MdsShard
    from meshwire.snapshots import Built

_WINDOW = 32 << 20


class MdsSources:
    """One a worker."""

    def __init__(self, catalog: Catalog, objects: RemoteObjects) -> None:
        self._catalog, self._objects = catalog, objects

    def __repr__(self) -> str:
        return "<MdsSources>"

    async def build(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> Built:
        """Raises PlanError, EmptySnapshotError; BatchError BadSample."""
        records = dict(listing)
        shards = await self._shards(records, source)
        wanted = sorted({spec.column for spec in fields.values() if spec.column is not None})
        for name, spec in fields.items():
            if spec.column is not None:
                _check_column(name, spec.column, shards[0])
        files = []
        for shard in shards:
            key = source.prefix + shard.basename
            record = _stored(records, source, shard)
            files.append(
                (key, record.etag, record.size, await self._index(source, key, record, shard, wanted))
            )
        return build_from_records(files, kind="mds", source=source, fields=fields)

    async def _shards(self, records: Mapping[str, Record], source: Source) -> tuple[MdsShard, ...]:
        key = source.prefix + INDEX
        record = records.get(key)
        if record is None:
            folders = sorted({found.removesuffix(INDEX) for found in records if found.endswith(f"/{INDEX}")})
            told = ", ".join(f"s3://{source.bucket}/{folder}" for folder in folders[:5])
            raise EmptySnapshotError(
                "source", f"there is no {INDEX} in {source}" + (f"; there is one in {told}" if told else "")
            )
        if record.size > MAX_INDEX:
            raise PlanError("source", f"{key} has {record.size} bytes: too many for an index")
        found = parse_mds(await self._objects.read(source.bucket, key, record.etag, 0, record.size), key)
        if not any(shard.samples for shard in found):
            raise EmptySnapshotError("source", f"the {INDEX} in {source} names no samples")
        return found

    async def _index(
        self, source: Source, key: str, record: Record, shard: MdsShard, wanted: Sequence[str]
    ) -> RecordIndex:
        digest = hashlib.sha256(repr((shard, wanted)).encode()).hexdigest()[:32]
        name = f"mds/{record.etag}-{record.size}-{digest}"
        document = self._catalog.read(name)
        if document is not None:
            try:
                return RecordIndex.from_bytes(document)
            except ColumnError:  # written by another version: made anew below
                pass
        try:
            length = min(shard.head_bytes, record.size)
            head = await self._objects.read(source.bucket, key, record.etag, 0, length)
            bounds = sample_bounds(shard, head)
        except MdsError as error:
            raise _refused(f"s3://{source.bucket}/{key}", str(error)) from error
        heads = await self._heads(source.bucket, key, record, shard, bounds)
        index = index_samples(shard, bounds, heads, wanted)
        await self._catalog.write(name, index.to_bytes())
        return index

    async def _heads(
        self, bucket: str, key: str, record: Record, shard: MdsShard, bounds: Integers
    ) -> npt.NDArray[np.uint8]:
        """What each sample begins with; zeros of those that are too short."""
        heads = np.zeros((shard.samples, shard.width), np.uint8)
        if not shard.width:
            return heads
        columns = np.arange(shard.width)
        for begin, end in _runs(bounds):
            first = int(bounds[begin])
            length = min(int(bounds[end - 1]) + shard.width, record.size) - first
            data = np.frombuffer(await self._objects.read(bucket, key, record.etag, first, length), np.uint8)
            places = bounds[begin:end] - first
            whole = np.flatnonzero(np.diff(bounds[begin : end + 1]) >= shard.width)
            heads[begin + whole] = data[places[whole][:, None] + columns]
        return heads


def _runs(bounds: Integers) -> Iterator[tuple[int, int]]:
    """Runs of samples that begin within a window."""
    begin, count = 0, bounds.size - 1
    while begin < count:
        end = int(np.searchsorted(bounds[:-1], bounds[begin] + _WINDOW, side="right"))
        yield begin, max(end, begin + 1)
        begin = max(end, begin + 1)


def _check_column(name: str, column: str, shard: MdsShard) -> None:
    path = f"fields.{name}"
    if column not in shard.names:
        raise PlanError(path, f"there is no column {column!r}{suggestion(column, shard.names)}")
    if shard.encodings[shard.names.index(column)] == UNSAFE:
        raise PlanError(path, f"{column!r} is Python objects (pkl), which are never read; write it as json")


def _stored(records: Mapping[str, Record], source: Source, shard: MdsShard) -> Record:
    url = f"{source}{shard.basename}"
    record = records.get(source.prefix + shard.basename)
    if record is None:
        packed = shard.packed and source.prefix + shard.packed in records
        how = "; it is there compressed: write the dataset with compression=None" if packed else ""
        raise _refused(url, f"it is not there, although the index names it{how}")
    if record.size != shard.bytes:
        raise _refused(url, f"it has {record.size} bytes, the index says {shard.bytes}")
    return record


def _refused(url: str, reason: str) -> BatchError:
    return BatchError(
        "BadSample",
        f"{url} is no MDS shard of its index: {reason}",
        help="upload the dataset again, index.json last",
        detail={"url": url},
    )
