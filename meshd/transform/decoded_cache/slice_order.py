"""What a transform process does with the decoded cache for one slice, as the coordinator decided it.

Law: an order is made for one slice and one process. What it does not allow is not stored, and it says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.transform.decoded_cache import policy
from meshd.transform.decoded_cache.messages import FieldOrder, TableOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.transform.decoded_cache.tables import Segment, Table

NO_ROOM: Final = "no room in the decoded cache"
CALLER_LIMIT: Final = "more than the bytes that the caller allows"
BUCKET_QUOTA: Final = "more than the quota of the bucket"
READ_SLOWLY: Final = "results were read as slowly from the disk as they are computed"
WRITE_PAUSE: Final = "writing is paused: the disk is full, or slower than computing"
TOO_LARGE: Final = "a result is too large, or the disk is full"
NOT_SETTLED: Final = "the kind of result was not seen often enough"


class SliceOrder(msgspec.Struct):
    """What a transform process is told about one slice: for each field, the steps and tables of its prefix.

    By table: the `segments` to append to, the `shares` of the samples to keep, the bytes `promised`, those
    that still may be (`rooms`); `bounds`: why no more is kept, or nothing. `promise` is called with each
    segment and the bytes to be appended to it. `refused`: by sample, why a result may not be stored, "" if it
    may be the next time.
    """

    program: tuple[str, str]
    writer: object
    rows: int
    steps: tuple[int, ...]
    tables: tuple[tuple[Table, ...], ...]
    segments: dict[int, Segment]
    shares: dict[int, float]
    rooms: dict[int, int] = msgspec.field(default_factory=dict)
    promise: Callable[[Segment, int], None] = lambda segment, size: None
    bounds: dict[int, str] = msgspec.field(default_factory=dict)
    promised: dict[int, int] = msgspec.field(default_factory=dict)
    refused: dict[int, str] = msgspec.field(default_factory=dict)

    def fields(self, path: Callable[[str], int]) -> tuple[FieldOrder, ...]:
        """Return the part for the request; `path` returns the index of a path in it."""
        return tuple(
            FieldOrder(steps, tuple(self._table_order(table, path) for table in tables))
            for steps, tables in zip(self.steps, self.tables, strict=True)
        )

    def _table_order(self, table: Table, path: Callable[[str], int]) -> TableOrder:
        segment = self.segments.get(table.number)
        if segment is None:
            return TableOrder(table.variant, table.number, -1)
        return TableOrder(table.variant, table.number, path(str(segment.path)), segment.capacity)

    def places(self, sample: int, path: Callable[[str], int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return for each field the entries of a sample, and which results may be stored."""
        return tuple(
            tuple(filter(None, (self._place(table, sample, path) for table in tables)))
            for tables in self.tables
        )

    def _place(self, table: Table, sample: int, path: Callable[[str], int]) -> tuple[int, ...]:
        found = table.find(sample)
        if found is not None:
            segment, offset, length = found
            return (table.variant, path(str(segment.path)), offset, length)
        if sample < 0:
            return ()
        appended, size = self.segments.get(table.number), int(table.size.value) + 1
        if (
            appended is None
            or self.rooms[table.number] < size
            or not policy.is_admitted(sample, self.shares[table.number])
        ):
            self.refused[sample] = self.bounds.get(table.number, NO_ROOM)
            return ()
        if appended.is_full:
            self.refused[sample] = ""
            return ()
        self.promise(appended, size)
        self.promised[table.number] = self.promised.get(table.number, 0) + size
        for number in self.rooms:  # tables share most limits
            self.rooms[number] -= size
        return (table.variant,)
