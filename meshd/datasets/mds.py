"""Shards of MDS datasets, as their `index.json` lists them, and the pages of their samples' columns.

Law: the listed shards are the shards that are read; a shard that contradicts the index is refused by
name. A page depends on the shard and on what the index says of it, which snapshots have the hash of.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from contextlib import suppress
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError
from meshd.core.peer_messages import RemoteRecord
from meshd.core.peer_source import ObjectRange
from meshwire.dataset.archive_paths import compression_kind
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.mds import (
    MAX_INDEX,
    MDS_INDEX,
    UNSAFE_ENCODING,
    MdsError,
    index_samples,
    parse_mds,
    sample_bounds,
)
from meshwire.formats.record_index import write_record_page
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshd.core.sample_locations import DecompressedArchives
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.paged_snapshot import PageParts
    from meshwire.formats.mds import MdsShard
    from meshwire.formats.record_index import RecordIndex
    from meshwire.frame.columns import Integers

_WINDOW = 32 << 20
_REMEMBERED = 1 << 16


class MdsSources:
    """Indexes MDS datasets, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        archives: DecompressedArchives,
        objects: RemoteObjects,
        capacity: SnapshotCapacity,
    ) -> None:
        self._capacity = capacity
        self._store, self._archives, self._objects = store, archives, objects
        self._told: OrderedDict[tuple[str, str, str], MdsShard] = OrderedDict()

    def __repr__(self) -> str:
        return f"<MdsSources, {len(self._told)} shards known>"

    async def find_shards(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> list[tuple[str, Record, str]]:
        """Return key, record and hash of the index entry of each shard.

        Raises PlanError, EmptySnapshotError; BatchError BadSample.
        """
        records = dict(listing)
        shards = await self._shards(records, source)
        for name, spec in fields.items():
            if spec.column is not None:
                _check_column(name, spec.column, shards[0])
        found = []
        for shard in shards:
            held, beside = _stored_shard(records, source, shard), _entry_hash(shard)
            found.append((held.key, held.record, beside))
            self._told[source.bucket, held.key, beside] = shard
        while len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        return found

    async def make_page(self, bucket: str, key: str, record: Record, parts: PageParts) -> bytes:
        """Return the page of a shard. Raises BatchError BadSample, TooLarge, SnapshotChanged if no index says
        of it what it said."""
        shard = self._told.get((bucket, key, parts.beside)) or await self._find_entry(bucket, key, parts)
        held = _Held(bucket, key, record, shard)
        self._capacity.require_room(shard.samples, len(parts.parts), held.url)
        index = await self._index(held, [name for name, *_ in parts.parts])
        return await asyncio.to_thread(write_record_page, replace(index, size=shard.bytes), parts)

    async def _find_entry(self, bucket: str, key: str, parts: PageParts) -> MdsShard:
        """Find the index entry of a shard in the folders above it."""
        folders = [key[: at + 1] for at, letter in enumerate(key) if letter == "/"]
        names = [(bucket, folder + MDS_INDEX) for folder in ["", *folders]]
        for (_, name), record in zip(names, await self._objects.find_many(names), strict=True):
            if record is None or record.size > MAX_INDEX:
                continue
            document = await self._objects.read_range(bucket, name, record.etag, 0, record.size)
            with suppress(PlanError):
                for shard in await asyncio.to_thread(parse_mds, document, name):
                    if key[len(name) - len(MDS_INDEX) :] in (shard.basename, shard.packed) and (
                        _entry_hash(shard) == parts.beside
                    ):
                        return shard
        raise BatchError("SnapshotChanged", f"no {MDS_INDEX} says of s3://{bucket}/{key} what it said")

    async def _shards(self, records: Mapping[str, Record], source: Source) -> tuple[MdsShard, ...]:
        key = source.prefix + MDS_INDEX
        record = records.get(key)
        if record is None:
            folders = sorted(
                {found.removesuffix(MDS_INDEX) for found in records if found.endswith(f"/{MDS_INDEX}")}
            )
            examples = ", ".join(f"s3://{source.bucket}/{folder}" for folder in folders[:5])
            raise EmptySnapshotError(
                "source",
                f"there is no {MDS_INDEX} in {source}" + (f"; found one in {examples}" if examples else ""),
            )
        if record.size > MAX_INDEX:
            raise PlanError("source", f"{key} has {record.size} bytes; an index has at most {MAX_INDEX}")
        document = await self._objects.read_range(source.bucket, key, record.etag, 0, record.size)
        found = await asyncio.to_thread(parse_mds, document, key)
        if not any(shard.samples for shard in found):
            raise EmptySnapshotError("source", f"the {MDS_INDEX} in {source} names no samples")
        return found

    async def _index(self, held: _Held, wanted: Sequence[str]) -> RecordIndex:
        shard = held.shard
        try:
            bounds = sample_bounds(shard, await self._read(held, 0, min(shard.head_bytes, shard.bytes)))
        except MdsError as error:
            raise _bad_index(held.url, str(error)) from error
        return await asyncio.to_thread(index_samples, shard, bounds, await self._heads(held, bounds), wanted)

    async def _heads(self, held: _Held, bounds: Integers) -> npt.NDArray[np.uint8]:
        """Return the first bytes of each sample; zeros for samples that are too short."""
        width, size = held.shard.width, held.shard.bytes
        heads = np.zeros((held.shard.samples, width), np.uint8)
        if not width:
            return heads
        columns = np.arange(width)
        for begin, end in _runs(bounds):
            first = int(bounds[begin])
            length = min(int(bounds[end - 1]) + width, size) - first
            data = np.frombuffer(await self._read(held, first, length), np.uint8)
            places = bounds[begin:end] - first
            whole = np.flatnonzero(np.diff(bounds[begin : end + 1]) >= width)
            heads[begin + whole] = data[places[whole][:, None] + columns]
        return heads

    async def _read(self, held: _Held, offset: int, length: int) -> bytes:
        """Return bytes of a decompressed shard. Raises BatchError."""
        bucket, key, record = held.bucket, held.key, held.record
        if compression_kind(key) is None:
            return await self._objects.read_range(bucket, key, record.etag, offset, length)
        plain = await self._archives.decompressed(bucket, key, record)
        if isinstance(plain, RemoteRecord):
            part = ObjectRange(bucket, key, record.etag, held.shard.bytes, offset, length)
            return (await self._objects.read_parts([part]))[0]
        if plain.size != held.shard.bytes:
            raise _bad_index(
                held.url, f"decompressed, it has {plain.size} bytes; the index says {held.shard.bytes}"
            )
        return await asyncio.to_thread(self._store.read_range, plain, offset, length)


class _Held(msgspec.Struct, frozen=True):
    """A shard and the object that holds it, plain or compressed."""

    bucket: str
    key: str
    record: Record
    shard: MdsShard

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def _entry_hash(shard: MdsShard) -> str:
    return hashlib.sha256(repr(astuple(shard)).encode()).hexdigest()[:32]


def _runs(bounds: Integers) -> Iterator[tuple[int, int]]:
    """Yield runs of samples that begin within one window."""
    begin, count = 0, bounds.size - 1
    while begin < count:
        end = int(np.searchsorted(bounds[:-1], bounds[begin] + _WINDOW, side="right"))
        yield begin, max(end, begin + 1)
        begin = max(end, begin + 1)


def _check_column(name: str, column: str, shard: MdsShard) -> None:
    path = f"fields.{name}"
    if column not in shard.names:
        raise PlanError(path, f"there is no column {column!r}{suggestion(column, shard.names)}")
    if shard.encodings[shard.names.index(column)] == UNSAFE_ENCODING:
        raise PlanError(
            path, f"{column!r} holds Python objects (pkl), which are never read; write it as json"
        )


def _stored_shard(records: Mapping[str, Record], source: Source, shard: MdsShard) -> _Held:
    """Return the shard's object, or else that of its compressed form. Raises BatchError."""
    names = [(shard.basename, shard.bytes), (shard.packed, shard.packed_bytes)]
    for name, size in names:
        record = records.get(source.prefix + name) if name else None
        if record is None:
            continue
        held = _Held(source.bucket, source.prefix + name, record, shard)
        if record.size != size:
            raise _bad_index(held.url, f"it has {record.size} bytes; the index says {size}")
        if name == shard.packed and (compression_kind(name) is None or size == shard.bytes):
            reason = "its compression is not supported: use zstd, gz, or none"
            raise _bad_index(
                held.url,
                reason
                if compression_kind(name) is None
                else "its compressed and its plain form have the same size",
            )
        return held
    raise _bad_index(f"{source}{shard.basename}", "the object does not exist, but the index lists it")


def _bad_index(url: str, reason: str) -> BatchError:
    return BatchError(
        "BadSample",
        f"{url} does not match the index of its MDS dataset: {reason}",
        help="upload the dataset again, index.json last",
        detail={"url": url},
    )
