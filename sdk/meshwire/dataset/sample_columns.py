"""Columns of a snapshot: where the bytes of a field are for each sample, and class labels.

Law: immutable. The column of a table takes no memory for its samples; what all its columns share does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.frame.columns import Integers

    Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class BytesColumn:
    """Where the bytes of each sample are: `object` int32[N] into the snapshot's objects, `offset` and
    `length` int64[N].
    """

    object: Int32
    offset: Integers
    length: Integers

    def objects_at(self, samples: Any) -> Int32:
        """Return the objects of some samples, given by an index, a list or an array of them."""
        found: Int32 = self.object[samples]
        return found

    def offsets_at(self, samples: Any) -> Integers:
        """Return the offsets of some samples, given like those of `objects_at`."""
        found: Integers = self.offset[samples]
        return found

    def lengths_at(self, samples: Any) -> Integers:
        """Return the lengths of some samples, given like those of `objects_at`."""
        found: Integers = self.length[samples]
        return found

    def total_bytes(self) -> int:
        """Return the bytes of all samples together."""
        return int(self.length.sum())

    def take(self, samples: Integers) -> BytesColumn:
        """Return the column of these samples."""
        return BytesColumn(self.object[samples], self.offset[samples], self.length[samples])

    def renumber(self, numbers: Integers) -> BytesColumn:
        """Return the column with `numbers[n]` for object n."""
        return BytesColumn(numbers[self.object].astype(np.int32), self.offset, self.length)


class Records:
    """Where the record of each sample of a table is: `object` int32[N], `offset` int64[N]."""

    __slots__ = ("_last", "object", "offset")

    def __init__(self, object_: Int32, offset: Integers) -> None:
        self.object, self.offset = object_, offset
        self._last: tuple[Integers, Records] | None = None

    def __repr__(self) -> str:
        return f"<Records of {self.offset.size} samples>"

    def take(self, samples: Integers) -> Records:
        """Return the records of these samples; the same ones for all columns of a table."""
        return self._made(samples, lambda: Records(self.object[samples], self.offset[samples]))

    def renumber(self, numbers: Integers) -> Records:
        """Return the records with `numbers[n]` for object n; the same ones for all columns of a table."""
        return self._made(numbers, lambda: Records(numbers[self.object].astype(np.int32), self.offset))

    def _made(self, of: Integers, make: Callable[[], Records]) -> Records:
        if self._last is None or self._last[0] is not of:
            self._last = of, make()
        return self._last[1]


class RecordColumn(BytesColumn):
    """A column of a table: `width` bytes at `distance` in each record. Takes no memory for its samples."""

    __slots__ = ("distance", "records", "width")

    records: Records
    distance: int
    width: int

    def __init__(self, records: Records, distance: int, width: int) -> None:
        for name, value in (("records", records), ("distance", distance), ("width", width)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<RecordColumn, {self.width} bytes at {self.distance} of {self.records!r}>"

    @property
    def object(self) -> Int32:
        return self.records.object

    @property
    def offset(self) -> Integers:
        return self.records.offset + self.distance

    @property
    def length(self) -> Integers:
        return np.broadcast_to(np.int64(self.width), self.records.offset.shape)

    def offsets_at(self, samples: Any) -> Integers:
        found: Integers = self.records.offset[samples] + self.distance
        return found

    def take(self, samples: Integers) -> RecordColumn:
        return RecordColumn(self.records.take(samples), self.distance, self.width)

    def renumber(self, numbers: Integers) -> RecordColumn:
        return RecordColumn(self.records.renumber(numbers), self.distance, self.width)


@dataclass(frozen=True, slots=True, eq=False)
class LabelColumn:
    """The class of each sample: `values` int64[N], indices into `classes` (sorted by their UTF-8 bytes)."""

    values: Integers
    classes: tuple[str, ...]

    def values_at(self, samples: Any) -> Integers:
        """Return the values of some samples, given by an index, a list or an array of them."""
        found: Integers = self.values[samples]
        return found

    def counts(self) -> Integers:
        """Return the number of samples of each class: int64[classes]."""
        return np.bincount(self.values[self.values >= 0], minlength=len(self.classes))
