"""Columns of a snapshot: where the bytes of a field are for each sample, and class labels.

Law: immutable. The column of a table takes no memory for its samples; what all its columns share does. A
column of a stored document is a view of it, in integers of any width, and takes none either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshwire.frame.columns import Integers

    Narrow = npt.NDArray[Any]
    """Integers of any width."""
    Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class BytesColumn:
    """Where the bytes of each sample are: `object` int32[N] into the snapshot's objects, `offset` and
    `length` int64[N].
    """

    object: Int32
    offset: Integers
    length: Integers

    @property
    def narrow_objects(self) -> Narrow:
        """`object` in the integer type that it is held in."""
        return self.object

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


class StoredColumn(BytesColumn):
    """A field of bytes in the memory of a document: `objects`, `offsets`, `lengths` integers [N] of any
    width; without `offsets` each sample is a whole object, and `lengths` has the bytes of each object."""

    __slots__ = ("_lengths", "_objects", "_offsets")

    _objects: Narrow
    _offsets: Narrow | None
    _lengths: Narrow

    def __init__(self, objects: Narrow, offsets: Narrow | None, lengths: Narrow) -> None:
        for name, value in (("_objects", objects), ("_offsets", offsets), ("_lengths", lengths)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<StoredColumn of {self._objects.size} samples>"

    @property
    def object(self) -> Int32:
        return self._objects.astype(np.int32)

    @property
    def narrow_objects(self) -> Narrow:
        return self._objects

    @property
    def offset(self) -> Integers:
        return self.offsets_at(slice(None))

    @property
    def length(self) -> Integers:
        return self.lengths_at(slice(None))

    def objects_at(self, samples: Any) -> Int32:
        found: Int32 = self._objects[samples].astype(np.int32)
        return found

    def offsets_at(self, samples: Any) -> Integers:
        if self._offsets is None:
            return np.zeros_like(self._objects[samples], np.int64)
        found: Integers = self._offsets[samples].astype(np.int64)
        return found

    def lengths_at(self, samples: Any) -> Integers:
        chosen = self._objects[samples] if self._offsets is None else samples
        found: Integers = self._lengths[chosen].astype(np.int64)
        return found


class Records:
    """Where the record of each sample of a table is: `objects` and `offsets`, integers [N] of any width."""

    __slots__ = ("_last", "_objects", "_offsets")

    def __init__(self, objects: Narrow, offsets: Narrow) -> None:
        self._objects, self._offsets = objects, offsets
        self._last: tuple[Integers, Records] | None = None

    def __repr__(self) -> str:
        return f"<Records of {len(self)} samples>"

    def __len__(self) -> int:
        return self._offsets.size

    @property
    def object(self) -> Int32:
        """int32[N]."""
        return self.objects_at(slice(None))

    @property
    def offset(self) -> Integers:
        """int64[N]."""
        return self.offsets_at(slice(None))

    def objects_at(self, samples: Any) -> Int32:
        """Return the objects of some samples; see `BytesColumn.objects_at`."""
        found: Int32 = self._objects[samples].astype(np.int32, copy=False)
        return found

    def offsets_at(self, samples: Any) -> Integers:
        """Return the offsets of some samples; see `BytesColumn.offsets_at`."""
        found: Integers = self._offsets[samples].astype(np.int64, copy=False)
        return found

    def take(self, samples: Integers) -> Records:
        """Return the records of these samples; the same ones for all columns of a table."""
        return self._make_once(samples, lambda: Records(self._objects[samples], self._offsets[samples]))

    def renumber(self, numbers: Integers) -> Records:
        """Return the records with `numbers[n]` for object n; the same ones for all columns of a table."""
        return self._make_once(
            numbers, lambda: Records(numbers[self._objects].astype(np.int32), self._offsets)
        )

    def _make_once(self, of: Integers, make: Callable[[], Records]) -> Records:
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
        return np.broadcast_to(np.int64(self.width), (len(self.records),))

    def objects_at(self, samples: Any) -> Int32:
        return self.records.objects_at(samples)

    def offsets_at(self, samples: Any) -> Integers:
        found: Integers = self.records.offsets_at(samples) + self.distance
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


class StoredLabels(LabelColumn):
    """A label in the memory of a document: `numbers` integers [N] of any width."""

    __slots__ = ("_numbers",)

    _numbers: Narrow

    def __init__(self, numbers: Narrow, classes: tuple[str, ...]) -> None:
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "classes", classes)

    def __repr__(self) -> str:
        return f"<StoredLabels of {len(self.classes)} classes>"

    @property
    def values(self) -> Integers:
        return self.values_at(slice(None))

    def values_at(self, samples: Any) -> Integers:
        found: Integers = self._numbers[samples].astype(np.int64)
        return found
