"""Where the bytes of samples lie right now: snapshot → index → files.

Law: an object must still be the one the snapshot pinned (its ETag); anything else is SnapshotChanged, never
other data under an old name. An archive whose members are compressed stands for its inflated copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshd.assembly.errors import BatchError
from meshwire.snapshots import BytesColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.assembly.rendering import Pieces
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Location, Record
    from meshwire.snapshots import Snapshot


def bytes_columns(snapshot: Snapshot) -> dict[str, BytesColumn]:
    """The snapshot's fields that hold bytes, in order of name."""
    return {
        name: column for name, column in sorted(snapshot.fields.items()) if isinstance(column, BytesColumn)
    }


class PlainArchives(Protocol):
    """Who knows the object that holds an archive's members as they are."""

    async def plain(self, bucket: str, key: str, record: Record) -> Record:
        """The archive itself, or its inflated copy. Raises BatchError."""
        ...


class PinnedObjects:
    """The objects of a snapshot, each looked up and checked once. Make one for each frame, and `prepare`
    it."""

    def __init__(self, store: ObjectStore, snapshot: Snapshot, archives: PlainArchives) -> None:
        self._store, self._snapshot, self._archives = store, snapshot, archives
        self._records: dict[int, Record] = {}
        self._locations: dict[int, Sequence[Location]] = {}

    def __repr__(self) -> str:
        return f"<PinnedObjects {len(self._records)} of {len(self._snapshot.objects)}>"

    async def prepare(self, samples: Sequence[int]) -> None:
        """Look up the objects of these samples. Raises BatchError: SnapshotChanged, and what `plain` does."""
        if self._snapshot.kind == "objects":
            return
        columns = bytes_columns(self._snapshot).values()
        numbers = {number for column in columns for number in np.unique(column.object[samples]).tolist()}
        objects = self._snapshot.objects
        for number in numbers - self._records.keys():
            record = self._checked(number)
            # Places are within what has the size that the snapshot says.
            if record.size != int(objects.sizes[number]):
                record = await self._archives.plain(objects.bucket_of(number), objects.keys[number], record)
            self._records[number] = record

    def record(self, number: int) -> Record:
        """The record of an object of the snapshot. Raises BatchError SnapshotChanged."""
        record = self._records.get(number)
        if record is None:
            record = self._records[number] = self._checked(number)
        return record

    def _checked(self, number: int) -> Record:
        objects = self._snapshot.objects
        bucket, key = objects.bucket_of(number), objects.keys[number]
        record = self._store.get(bucket, key)
        if record is not None and record.etag == objects.etags[number]:
            return record
        what = "was deleted" if record is None else "was replaced"
        raise BatchError(
            "SnapshotChanged",
            f"s3://{bucket}/{key} {what} since the snapshot was made",
            help="restore the object, or make a new snapshot and plan (a new state: the order changes)",
            detail={"bucket": bucket, "key": key, "snapshot": self._snapshot.hash},
        )

    def pieces(self, number: int, offset: int, length: int) -> Pieces:
        """The files that hold these bytes of an object. Raises BatchError SnapshotChanged."""
        locations = self._locations.get(number)
        if locations is None:
            locations = self._locations[number] = self._store.locate(self.record(number))
        if len(locations) == 1 and length < locations[0].length:
            return ((locations[0].path, locations[0].offset + offset, length),)
        return cut_pieces(locations, offset, length)

    def sources(self, samples: Sequence[int]) -> list[tuple[Pieces, ...]]:
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
            columns.append([self.pieces(*place) for place in zip(*chosen, strict=True)])
        return list(zip(*columns, strict=True))


def cut_pieces(locations: Sequence[Location], offset: int, length: int) -> Pieces:
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
