"""Maps samples of a snapshot to the files, or the fetched memory, that hold their bytes.

Law: an object must still have the ETag that the snapshot pinned. Otherwise the read fails with
SnapshotChanged; it never returns other content under an old name. An archive with compressed members is
represented by its decompressed copy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import numpy as np
from awscrt.checksums import crc32c

from meshd.core.api_errors import BatchError, busy, damaged
from meshd.core.remote_source import SINGLE_NODE, ObjectRange, ReadFailure
from meshd.core.shared_memory import MemoryAccount
from meshd.store.errors import NotCachedError
from meshwire.dataset.build_snapshot import BytesColumn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from meshd.core.remote_source import FetchedRanges, RemoteSource
    from meshd.core.renderer_protocol import Pieces
    from meshd.store.api import ObjectStore
    from meshd.store.records import Location, Record
    from meshwire.dataset.build_snapshot import Snapshot


def bytes_columns(snapshot: Snapshot) -> dict[str, BytesColumn]:
    """The snapshot's fields that hold bytes, in order of name."""
    return {
        name: column for name, column in sorted(snapshot.fields.items()) if isinstance(column, BytesColumn)
    }


class DecompressedArchives(Protocol):
    """Who knows the object that holds an archive's members as they are."""

    async def decompressed(self, bucket: str, key: str, record: Record) -> Record:
        """The archive itself, or its inflated copy. Raises BatchError."""
        ...


class PinnedObjects:
    """The objects of a snapshot, each looked up and checked once. Make one for each frame (or part of it),
    and `prepare` it; `close` gives back the memory of what came from other nodes."""

    def __init__(
        self,
        store: ObjectStore,
        snapshot: Snapshot,
        archives: DecompressedArchives,
        elsewhere: RemoteSource = SINGLE_NODE,
        memory: MemoryAccount | None = None,
    ) -> None:
        self._store, self._snapshot, self._archives = store, snapshot, archives
        self._remote, self._memory = elsewhere, memory or MemoryAccount()
        self._records: dict[int, Record] = {}
        self._locations: dict[int, Sequence[Location]] = {}
        self._remote_numbers: set[int] = set()  # objects other nodes hold
        self._fetched: dict[tuple[int, int, int], Location] = {}
        self._held: list[FetchedRanges] = []

    def __repr__(self) -> str:
        return f"<PinnedObjects {len(self._records)} of {len(self._snapshot.objects)}>"

    async def prepare(
        self, samples: Sequence[int], fields: Collection[str] | None = None, at_most: int | None = None
    ) -> None:
        """Look up the objects of these samples, and fetch the bytes of those that other nodes hold: all of
        them, or those of some fields and of so many bytes at most. Raises BatchError: SnapshotChanged, Busy,
        and what `plain` does."""
        await self.look_up(samples)
        if self._remote_numbers:
            await self._fetch(self._places(samples, fields, at_most))

    async def look_up(self, samples: Sequence[int]) -> None:
        """The first half of `prepare`: afterwards `is_far` tells what other nodes hold."""
        if self._snapshot.kind == "objects" and self._remote.single_node:
            return
        columns = bytes_columns(self._snapshot).values()
        numbers = {number for column in columns for number in np.unique(column.object[samples]).tolist()}
        objects = self._snapshot.objects
        for number, record in self._here(numbers - self._records.keys() - self._remote_numbers):
            if record is None:
                self._remote_numbers.add(number)
                continue
            # Places are within what has the size that the snapshot says.
            if self._snapshot.kind != "objects" and record.size != int(objects.sizes[number]):
                record = await self._archives.decompressed(
                    objects.bucket_of(number), objects.keys[number], record
                )
            self._records[number] = record

    def is_remote(self, number: int) -> bool:
        """Whether other nodes hold this object, after `look_up`."""
        return number in self._remote_numbers

    def range_of(self, number: int, offset: int, length: int) -> ObjectRange:
        """How other nodes are asked for bytes of an object."""
        objects = self._snapshot.objects
        place = objects.bucket_of(number), objects.keys[number], objects.etags[number]
        return ObjectRange(*place, int(objects.sizes[number]), offset, length)

    def record(self, number: int) -> Record:
        """The record of an object of the snapshot. Raises BatchError SnapshotChanged."""
        if number not in self._records:
            self._know({number})
        return self._records[number]

    def _know(self, numbers: Collection[int]) -> None:
        """Afterwards there is a record of each. Raises BatchError SnapshotChanged."""
        for number, record in self._here(set(numbers) - self._records.keys()):
            if record is None:
                raise self.changed(number)
            self._records[number] = record

    def _here(self, numbers: Collection[int]) -> Iterator[tuple[int, Record | None]]:
        """Each object with its record; None: another node may have it. Raises BatchError SnapshotChanged
        where there is none.
        """
        if not numbers:
            return
        objects, places = self._snapshot.objects, np.fromiter(numbers, np.int64, len(numbers))
        alone = self._remote.single_node
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
                if alone:
                    raise self.changed(number, "was deleted" if record is None else "was replaced")
                yield number, None
            elif alone:
                yield number, record
            elif record.broken:  # damaged here; another owner has it
                yield number, None
            else:
                self._remote.record_use(bucket, key)
                yield number, record

    def changed(self, number: int, what: str = "was deleted or replaced") -> BatchError:
        """What is raised of an object that is not what it was."""
        objects = self._snapshot.objects
        bucket, key = objects.bucket_of(number), objects.keys[number]
        return BatchError(
            "SnapshotChanged",
            f"s3://{bucket}/{key} {what} since the snapshot was made",
            help="restore the object, or make a new snapshot and plan (a new state: the order changes)",
            detail={"bucket": bucket, "key": key, "snapshot": self._snapshot.hash},
        )

    def _places(
        self, samples: Sequence[int], fields: Collection[str] | None, at_most: int | None
    ) -> list[tuple[int, int, int]]:
        """(object, offset, length) of what these samples have in objects of other nodes, each once, one
        object after the other."""
        found: set[tuple[int, int, int]] = set()
        for name, column in bytes_columns(self._snapshot).items():
            if fields is not None and name not in fields:
                continue
            chosen = column.object[samples], column.offset[samples], column.length[samples]
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
        self._held.append(fetched)
        for place, found in zip(places, fetched.places, strict=True):
            if isinstance(found, ReadFailure):
                raise self._lost(place[0], found)
            self._fetched[place] = found

    def _lost(self, number: int, lost: ReadFailure) -> BatchError:
        if lost.code in ("NoSuchKey", "SnapshotChanged"):
            return self.changed(number, "was deleted" if lost.code == "NoSuchKey" else "was replaced")
        objects = self._snapshot.objects
        url = f"s3://{objects.bucket_of(number)}/{objects.keys[number]}"
        if lost.code == "Unreadable":
            return damaged(url, lost.message or "no node that holds it can read it", {"url": url})
        return busy(f"{url} cannot be read now: {lost.message or lost.code}")

    def pieces_at(self, number: int, offset: int, length: int) -> Pieces:
        """The files that hold these bytes of an object. Raises BatchError SnapshotChanged."""
        if number in self._remote_numbers:
            place = self._fetched[number, offset, length]
            return ((place.path, place.offset, place.length, place.crc32c),)
        locations = self._locations.get(number)
        if locations is None:
            locations = self._locations[number] = self._store.locate(self.record(number))
        if len(locations) == 1:
            place = locations[0]
            if length == place.length and not offset:
                return ((place.path, place.offset, length, place.crc32c),)
            if length < place.length:
                return ((place.path, place.offset + offset, length),)
        return slice_locations(locations, offset, length)

    def read_range(self, number: int, offset: int, length: int) -> bytes:
        """The bytes, after `prepare` (blocking). Raises BatchError SnapshotChanged; StoreError."""
        if number not in self._remote_numbers:
            return self._store.read_range(self.record(number), offset, length)
        place = self._fetched[number, offset, length]
        return read_location(place)

    def sample_sources(self, samples: Sequence[int]) -> list[tuple[Pieces, ...]]:
        """For each sample, the pieces of each bytes field in order of name. Raises BatchError
        SnapshotChanged.
        """
        columns = []
        for column in bytes_columns(self._snapshot).values():
            chosen = (
                column.object[samples].tolist(),
                column.offset[samples].tolist(),
                column.length[samples].tolist(),
            )
            self._know(set(chosen[0]) - self._remote_numbers)
            columns.append([self.pieces_at(*place) for place in zip(*chosen, strict=True)])
        return list(zip(*columns, strict=True))

    def release(self) -> None:
        """Forget the bytes that came from other nodes, not what was looked up."""
        self._fetched.clear()
        while self._held:
            self._held.pop().close()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.release()


def read_location(place: Location) -> bytes:
    """The bytes of a file, compared with their checksum (blocking). Raises BatchError Busy."""
    with open(place.path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), place.length, place.offset)
    if len(data) != place.length or crc32c(data) != place.crc32c:
        raise busy("bytes of another node came damaged")
    return data


def slice_locations(locations: Sequence[Location], offset: int, length: int) -> Pieces:
    """The part [offset, offset + length) of consecutive locations; with checksums where it is all of one."""
    pieces: list[tuple[str, int, int] | tuple[str, int, int, int]] = []
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
