"""Maps samples of a snapshot to the files, or the fetched memory, that hold their bytes.

Law: an object must still have the ETag that the snapshot pinned. Otherwise the read fails with
SnapshotChanged; it never returns other content under an old name. An archive with compressed members is
represented by its decompressed copy.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
from awscrt.checksums import crc32c

from meshd.core.api_errors import BatchError, busy, damaged
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import SINGLE_NODE, ObjectRange, ReadFailure
from meshd.store.errors import NotCachedError, QuarantinedError
from meshd.util.async_tasks import CooperativeYield
from meshwire.dataset.build_snapshot import BytesColumn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from meshd.core.peer_source import FetchedRanges, PeerSource
    from meshd.store.api import ObjectStore
    from meshd.store.records import Location, Record
    from meshd.transform.source_files import Piece, Pieces
    from meshwire.dataset.build_snapshot import Snapshot


_COUNTED_OBJECTS = 8192
_PORTION = 1024  # samples whose objects are looked up without a turn for others
_LOCAL_PORTION = 512  # samples whose pieces are found without a turn for others


def bytes_columns(snapshot: Snapshot) -> dict[str, BytesColumn]:
    """Returns the snapshot's bytes fields in order of name."""
    return {
        name: column for name, column in sorted(snapshot.fields.items()) if isinstance(column, BytesColumn)
    }


def own_columns(snapshot: Snapshot) -> dict[str, BytesColumn]:
    """Returns the bytes fields in order of name, without those that continue the bytes of others."""
    columns = bytes_columns(snapshot)
    return {name: column for name, column in columns.items() if not snapshot.specs[name].piece_of}


def main_objects(snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns for each sample the number of the object that holds most of its bytes; among equals, that
    of the field that is named first. int64[n]."""
    columns = list(bytes_columns(snapshot).values())
    objects = np.stack([column.objects_at(samples) for column in columns])
    if (objects == objects[0]).all():  # as in archives and tables, whose lengths may be on pages
        return np.asarray(objects[0], dtype=np.int64)
    lengths = np.stack([column.lengths_at(samples) for column in columns])
    chosen = np.argmax(lengths, axis=0)
    return np.asarray(objects[chosen, np.arange(len(samples))], dtype=np.int64)


def distinct(
    numbers: npt.NDArray[np.int32], count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the different numbers of 0…count−1, ascending, and for each number its place among them."""
    if count > _COUNTED_OBJECTS:
        found, places = np.unique(numbers, return_inverse=True)
        return found.astype(np.int64), places.astype(np.int64)
    there = np.bincount(numbers, minlength=count) > 0  # a quarter of the time that sorting takes
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


def snapshot_changed(snapshot: Snapshot, number: int, what: str) -> BatchError:
    """Returns the error for an object that has changed since the snapshot."""
    objects = snapshot.objects
    bucket, key = objects.bucket_of(number), objects.keys[number]
    return BatchError(
        "SnapshotChanged",
        f"s3://{bucket}/{key} {what} since the snapshot was created",
        help="restore the object, or create a new snapshot and plan (a new state: the order changes)",
        detail={"bucket": bucket, "key": key, "snapshot": snapshot.hash},
    )


class DecompressedArchives(Protocol):
    """Finds the object that holds an archive's members uncompressed."""

    async def decompressed(self, bucket: str, key: str, record: Record, pinned: int | None = None) -> Record:
        """Returns the archive itself or its decompressed copy, which has `pinned` bytes if that is known.
        Raises BatchError."""
        ...


class PinnedObjects:
    """The objects of a snapshot, each looked up and checked once. Create one for each frame or part of a
    frame, and `prepare` it; `close` releases the memory of bytes from other nodes."""

    def __init__(
        self,
        store: ObjectStore,
        snapshot: Snapshot,
        archives: DecompressedArchives,
        remote: PeerSource = SINGLE_NODE,
        memory: MemoryAccount | None = None,
    ) -> None:
        self._store, self._snapshot, self._archives = store, snapshot, archives
        self._remote, self._memory = remote, memory or MemoryAccount()
        self._records: dict[int, Record] = {}
        self._locations: dict[int, Sequence[Location]] = {}
        self._remote_numbers: set[int] = set()  # objects other nodes hold
        self._fetched: dict[tuple[int, int, int], Location] = {}
        self._fetched_ranges: list[FetchedRanges] = []

    def __repr__(self) -> str:
        return f"<PinnedObjects {len(self._records)} of {len(self._snapshot.objects)}>"

    async def prepare(
        self, samples: Sequence[int], fields: Collection[str] | None = None, at_most: int | None = None
    ) -> None:
        """Looks up the objects of these samples and fetches the bytes that other nodes hold: all of them, or
        only some fields and at most `at_most` bytes each. Raises BatchError SnapshotChanged, Busy, and what
        `decompressed` raises."""
        await self.look_up(samples)
        if self._remote_numbers:
            await self._fetch(self._remote_ranges(samples, fields, at_most))

    async def look_up(self, samples: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Looks up the objects, the first half of `prepare`; afterwards `is_remote` says which ones other
        nodes hold."""
        if self._snapshot.kind == "objects" and self._remote.single_node:
            return
        numbers = set[int]()
        known: npt.NDArray[np.int32] | None = None
        for column in bytes_columns(self._snapshot).values():  # their objects are mostly the same
            found = column.objects_at(samples)
            if known is None or not np.array_equal(found, known):
                numbers.update(distinct(found, len(self._snapshot.objects))[0].tolist())
            known = found
        await self.look_up_objects(numbers)

    async def look_up_objects(self, numbers: set[int]) -> None:
        """Looks up objects by their numbers, as `look_up` does those of samples."""
        objects = self._snapshot.objects
        for number, record in self._local_records(numbers - self._records.keys() - self._remote_numbers):
            if record is None:
                self._remote_numbers.add(number)
                continue
            # Offsets refer to an object of the size in the snapshot: for another size, the decompressed copy.
            if self._snapshot.kind != "objects" and record.size != int(objects.sizes[number]):
                record = await self._archives.decompressed(
                    objects.bucket_of(number), objects.keys[number], record, int(objects.sizes[number])
                )
            self._records[number] = record

    async def look_up_rows(self, samples: npt.NDArray[np.int64]) -> None:
        """Looks up the objects of many samples as `look_up` does; plain objects, of which each sample has its
        own, in portions, so that others get turns. Raises BatchError as `prepare` does."""
        if self._snapshot.kind != "objects":
            await self.look_up(samples)
            return
        for start in range(0, samples.size, _PORTION):
            some = samples[start : start + _PORTION]
            await self.look_up(some)
            for column in bytes_columns(self._snapshot).values():
                self._look_up_records(set(column.objects_at(some).tolist()) - self._remote_numbers)
            await asyncio.sleep(0)

    async def fetch_ranges(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Fetches those (object, offset, length) that other nodes hold, after `look_up`, so that `read_range`
        can read them. Raises BatchError SnapshotChanged, Busy."""
        wanted = {place for place in places if place[0] in self._remote_numbers}
        await self._fetch(sorted(wanted - self._fetched.keys()))

    def is_remote(self, number: int) -> bool:
        """Returns True if other nodes hold this object. Call `look_up` first."""
        return number in self._remote_numbers

    def range_of(self, number: int, offset: int, length: int) -> ObjectRange:
        """Returns the range by which other nodes are asked for bytes of an object."""
        objects = self._snapshot.objects
        place = objects.bucket_of(number), objects.keys[number], objects.etags[number]
        return ObjectRange(*place, int(objects.sizes[number]), offset, length)

    def record(self, number: int) -> Record:
        """Returns the record of an object of the snapshot. Raises BatchError SnapshotChanged."""
        if number not in self._records:
            self._look_up_records({number})
        return self._records[number]

    def _look_up_records(self, numbers: Collection[int]) -> None:
        """Looks up the record of each. Raises BatchError SnapshotChanged."""
        for number, record in self._local_records(set(numbers) - self._records.keys()):
            if record is None:
                raise self.changed(number)
            self._records[number] = record

    def _local_records(self, numbers: Collection[int]) -> Iterator[tuple[int, Record | None]]:
        """Yields each object with its record; None if another node may have it. Raises BatchError
        SnapshotChanged if no node has it."""
        if not numbers:
            return
        objects, places = self._snapshot.objects, np.fromiter(numbers, np.int64, len(numbers))
        single_node = self._remote.single_node
        for number, key, etag in zip(
            numbers, objects.keys.take_rows(places), objects.etags.take_rows(places), strict=True
        ):
            bucket = objects.bucket_of(number)
            try:
                record = self._store.get(bucket, key)
            except NotCachedError:  # its bytes are at an origin
                yield number, None
                continue
            if record is None or record.etag != etag:
                if single_node:
                    raise self.changed(number, "was deleted" if record is None else "was replaced")
                yield number, None
            elif single_node:
                yield number, record
            elif record.broken:  # damaged here: another owner supplies it
                yield number, None
            else:
                self._remote.record_use(bucket, key)
                yield number, record

    def check_unchanged(self, samples: npt.NDArray[np.int64]) -> None:
        """Checks that this node's objects of these samples are still those of the snapshot. Raises BatchError
        SnapshotChanged."""
        columns = bytes_columns(self._snapshot).values()
        numbers = {number for column in columns for number in np.unique(column.objects_at(samples)).tolist()}
        for _ in self._local_records(numbers):
            pass

    def changed(self, number: int, what: str = "was deleted or replaced") -> BatchError:
        """Returns the error for an object that has changed since the snapshot."""
        return snapshot_changed(self._snapshot, number, what)

    def _remote_ranges(
        self, samples: Sequence[int], fields: Collection[str] | None, at_most: int | None
    ) -> list[tuple[int, int, int]]:
        """Returns (object, offset, length) of these samples' bytes in objects of other nodes, each once,
        sorted by object."""
        found: set[tuple[int, int, int]] = set()
        for name, column in bytes_columns(self._snapshot).items():
            if fields is not None and name not in fields:
                continue
            chosen = column.objects_at(samples), column.offsets_at(samples), column.lengths_at(samples)
            rows = zip(*(values.tolist() for values in chosen), strict=True)
            found.update(
                place
                for place in rows
                if place[0] in self._remote_numbers and (at_most is None or place[2] <= at_most)
            )
        return sorted(found - self._fetched.keys())

    async def _fetch(self, places: Sequence[tuple[int, int, int]]) -> None:
        if not places:
            return
        fetched = await self._remote.fetch_parts([self.range_of(*place) for place in places], self._memory)
        self._fetched_ranges.append(fetched)
        for place, found in zip(places, fetched.places, strict=True):
            if isinstance(found, ReadFailure):
                raise self._error_of(place[0], found)
            self._fetched[place] = found

    def _error_of(self, number: int, failure: ReadFailure) -> BatchError:
        if failure.code in ("NoSuchKey", "SnapshotChanged"):
            return self.changed(number, "was deleted" if failure.code == "NoSuchKey" else "was replaced")
        url = self._url_of(number)
        if failure.code == "Unreadable":
            why = failure.message or "no node that holds it can read it"
            return damaged(url, why, {"url": url}, final=failure.final)
        return busy(f"{url} cannot be read now: {failure.message or failure.code}")

    def _url_of(self, number: int) -> str:
        objects = self._snapshot.objects
        return f"s3://{objects.bucket_of(number)}/{objects.keys[number]}"

    def locations(self, number: int) -> Sequence[Location]:
        """Returns the files that hold an object of this node. Raises BatchError SnapshotChanged,
        CorruptData."""
        found = self._locations.get(number)
        if found is None:
            try:
                found = self._locations[number] = self._store.locate(self.record(number))
            except QuarantinedError as error:
                url = self._url_of(number)
                final = self._remote.single_node
                raise damaged(url, "it is in quarantine", {"url": url}, final=final) from error
        return found

    def pieces_at(self, number: int, offset: int, length: int) -> Pieces:
        """Returns the files that hold these bytes of an object. Raises BatchError SnapshotChanged."""
        if number in self._remote_numbers:
            place = self._fetched[number, offset, length]
            return ((place.path, place.offset, place.length, place.crc32c),)
        locations = self.locations(number)
        if len(locations) == 1:
            place = locations[0]
            if length == place.length and not offset:
                return ((place.path, place.offset, length, place.crc32c),)
            if length < place.length:
                return ((place.path, place.offset + offset, length),)
        return slice_locations(locations, offset, length)

    def read_range(self, number: int, offset: int, length: int) -> bytes:
        """Reads the bytes, after `prepare` (blocking). Raises BatchError SnapshotChanged; StoreError."""
        if number not in self._remote_numbers:
            return self._store.read_range(self.record(number), offset, length)
        place = self._fetched[number, offset, length]
        return read_location(place)

    def sample_sources(self, samples: Sequence[int]) -> list[tuple[Pieces, ...]]:
        """Returns the pieces of each bytes field, in order of name, for each sample. Raises BatchError
        SnapshotChanged."""
        columns: dict[str, list[Pieces]] = {}
        for name, column in bytes_columns(self._snapshot).items():
            chosen = (
                column.objects_at(samples).tolist(),
                column.offsets_at(samples).tolist(),
                column.lengths_at(samples).tolist(),
            )
            self._look_up_records(set(chosen[0]) - self._remote_numbers)
            columns[name] = [self.pieces_at(*place) for place in zip(*chosen, strict=True)]
        for name, more in self._snapshot.pieces().items():
            rows = zip(columns[name], *(columns.pop(each) for each in more), strict=True)
            columns[name] = [tuple(chain.from_iterable(row)) for row in rows]
        return list(zip(*columns.values(), strict=True))

    async def find_local_pieces(self, samples: npt.NDArray[np.int64]) -> list[Piece]:
        """Looks up samples and returns the pieces of their bytes that this node holds. Leaves out
        portions that changed since the snapshot or cannot be read now: the builder reports these."""
        found: list[Piece] = []
        turns = CooperativeYield()
        for start in range(0, len(samples), _LOCAL_PORTION):
            some = samples[start : start + _LOCAL_PORTION].tolist()
            with suppress(BatchError):
                await self.look_up(some)
                found += self._local_pieces(some)
            await turns.yield_if_due()
        return found

    def _local_pieces(self, samples: Sequence[int]) -> Iterator[Piece]:
        """Yields the pieces of these samples' bytes that this node holds, after `look_up`. Raises BatchError
        SnapshotChanged."""
        for column in bytes_columns(self._snapshot).values():
            numbers = column.objects_at(samples).tolist()
            self._look_up_records(set(numbers) - self._remote_numbers)
            places = zip(
                numbers, column.offsets_at(samples).tolist(), column.lengths_at(samples).tolist(), strict=True
            )
            for place in places:
                if place[0] not in self._remote_numbers:
                    yield from self.pieces_at(*place)

    def release(self) -> None:
        """Drops the bytes from other nodes, but keeps what was looked up."""
        self._fetched.clear()
        while self._fetched_ranges:
            self._fetched_ranges.pop().close()

    def close(self) -> None:
        """Releases the memory. Idempotent."""
        self.release()


def read_location(place: Location) -> bytes:
    """Reads bytes from a file and verifies their checksum (blocking). Raises BatchError Busy."""
    with open(place.path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), place.length, place.offset)
    if len(data) != place.length or crc32c(data) != place.crc32c:
        raise busy("bytes from another node arrived damaged")
    return data


def slice_locations(locations: Sequence[Location], offset: int, length: int) -> Pieces:
    """Returns the part [offset, offset + length) of consecutive locations, with the checksum for each
    location that is included whole."""
    pieces: list[Piece] = []
    for location in locations:
        if length <= 0:
            break
        if offset >= location.length:
            offset -= location.length
            continue
        taken = min(length, location.length - offset)
        if taken == location.length:
            pieces.append((location.path, location.offset, taken, location.crc32c))
        else:
            pieces.append((location.path, location.offset + offset, taken))
        offset, length = 0, length - taken
    return tuple(pieces)
