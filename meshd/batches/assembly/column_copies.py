"""Column copies: the rows of a frame that transform processes copy as arrays, found without a loop over rows.

Law: a row goes into a block only if its fields lie whole in one file of this node and have the number of
bytes that the plan expects. Every other row is left to be rendered by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from meshd.core.sample_locations import bytes_columns, distinct
from meshd.transform.messages import FieldPlaces, RowBlock
from meshd.transform.render_calls import RowWork
from meshd.transform.row_blocks import COLUMN_OPS, FIRST_OP
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.snapshot import RecordColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshd.core.plan_record import FieldOutput
    from meshd.core.sample_locations import PinnedObjects
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

    Numbers = npt.NDArray[np.int64]

FEWEST_ROWS: Final = 64
"""Below that number of rows, a block saves nothing."""
_BLOCK_ROWS: Final = 16384
_RAGGED_BYTES: Final = 4096  # of a row's ragged fields, on average
_KEPT_SNAPSHOTS: Final = 8


class StoredField(NamedTuple):
    """How a field of a row is stored: `width` bytes, or if that is 0 as elements of `item` bytes."""

    width: int
    item: int


def block_fields(
    spec: PlanSpec, outputs: Mapping[str, FieldOutput], *, mixed: bool
) -> tuple[StoredField, ...] | None:
    """Return how each field is stored, by name, or None if rows must be rendered one by one."""
    if mixed or spec.pack is not None or not outputs:
        return None
    found = []
    for name, output in sorted(outputs.items()):
        field = _stored_field([op for op in spec.ops if name in op.all_fields], output)
        if field is None:
            return None
        found.append(field)
    return tuple(found)


def _stored_field(ops: list[OpSpec], output: FieldOutput) -> StoredField | None:
    ragged = output.shape is None and output.ndim == 1
    if not ops:
        return StoredField(0, 1) if ragged else None
    first, *others = ops
    apart = all((op.op, op.version) in COLUMN_OPS and not op.fields for op in others)
    if (first.op, first.version) != FIRST_OP or first.fields or not apart:
        return None
    shape, item = list(first.args.get("shape", ())), int(np.dtype(first.args["dtype"]).itemsize)
    if None not in shape:
        return None if output.shape is None else StoredField(item * math.prod(shape), item)
    plain = ragged and shape == [None] and not others and first.args["dtype"] != "bool"
    return StoredField(0, item) if plain else None


class RowPlaces:
    """Where the fields of all samples of a snapshot are, as far as it is the same for all of them.

    `distances`: bytes of each field with a width from the first of these, by number of the field, or None if
    they differ between samples; `good`: bool[N], the samples whose fields are in one object and have the
    expected lengths, or None if all are; `object_count`: of the snapshot.
    """

    def __init__(self, snapshot: Snapshot, fields: tuple[StoredField, ...]) -> None:
        self._columns = list(bytes_columns(snapshot).values())
        self.fields, self.object_count = fields, len(snapshot.objects)
        self.fixed = [number for number, field in enumerate(fields) if field.width]
        self.ragged = [number for number, field in enumerate(fields) if not field.width]
        first = self._columns[self.fixed[0] if self.fixed else 0]
        self._first = first
        good = np.ones(snapshot.samples, np.bool_)
        distances: dict[int, int] = {}
        for number, (column, (width, item)) in enumerate(zip(self._columns, fields, strict=True)):
            if column is not first and column.object is not first.object:
                good &= column.object == first.object
            if not width:
                if item > 1:
                    good &= column.length % item == 0
                continue
            if isinstance(column, RecordColumn) and isinstance(first, RecordColumn):
                if column.width != width:
                    good[:] = False
                elif column.records is first.records:
                    distances[number] = column.distance - first.distance
                continue
            good &= column.length == width
            apart = column.offset - first.offset
            if apart.size and (apart == apart[0]).all():
                distances[number] = int(apart[0])
        self.good = None if good.all() else good
        self.distances = distances if len(distances) == len(self.fixed) else None

    def __repr__(self) -> str:
        return f"<RowPlaces of {len(self.fields)} fields>"

    def objects(self, samples: Numbers) -> npt.NDArray[np.int32]:
        """Return the number of the object of each sample."""
        return self._first.objects_at(samples)

    def offsets(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the offsets by number of the field: of fields with a width, or with `distances` of the first
        of these alone, and of ragged ones."""
        wanted = [*(self.fixed if self.distances is None else self.fixed[:1]), *self.ragged]
        return {number: self._columns[number].offsets_at(samples) for number in wanted}

    def lengths(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the lengths of ragged fields, by their number."""
        return {number: self._columns[number].lengths_at(samples) for number in self.ragged}

    def good_rows(self, samples: Numbers) -> npt.NDArray[np.bool_]:
        """Return for each sample whether a block may have it."""
        return np.ones(samples.size, np.bool_) if self.good is None else self.good[samples]


class RowPlacesCache:
    """The places of the snapshots that were used last; finding them reads all offsets of a snapshot once."""

    def __init__(self, limit: int = _KEPT_SNAPSHOTS) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, tuple[StoredField, ...]], RowPlaces] = OrderedDict()
        self._making: SingleFlight[tuple[str, tuple[StoredField, ...]], RowPlaces] = SingleFlight()

    def __repr__(self) -> str:
        return f"<RowPlacesCache of {len(self._kept)} snapshots>"

    async def find(self, snapshot: Snapshot, fields: tuple[StoredField, ...]) -> RowPlaces:
        """Return the places of a snapshot whose fields are stored like this."""
        key = snapshot.hash, fields
        found = self._kept.get(key)
        if found is None:
            found, _ = await self._making.run(key, lambda: asyncio.to_thread(RowPlaces, snapshot, fields))
            self._kept[key] = found
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


class ColumnCopies:
    """The blocks of some rows of a frame. `rest`: the rows that are in none.

    `samples`: int64[n], the samples of the rows `first`, `first` + 1, ….
    """

    def __init__(
        self,
        places: RowPlaces,
        pinned: PinnedObjects,
        samples: Numbers,
        positions: Numbers,
        first: int,
    ) -> None:
        self._pinned, self._places, self._first = pinned, places, first
        self._objects, self._offsets = places.objects(samples), places.offsets(samples)
        self._lengths = places.lengths(samples)
        self._good, self._positions = places.good_rows(samples), positions
        if sum(int(each.sum()) for each in self._lengths.values()) > _RAGGED_BYTES * len(samples):
            self._good[:] = False  # large values are read as such, with their checksums
        self.work: list[RowWork] = []
        for start in range(0, len(samples), _BLOCK_ROWS):
            self._add_block(start, min(len(samples), start + _BLOCK_ROWS))

    def __repr__(self) -> str:
        return f"<ColumnCopies, {len(self.work)} blocks>"

    @property
    def rest(self) -> list[int]:
        """The rows that no block has, ascending."""
        return (np.flatnonzero(~self._good) + self._first).tolist()

    def _add_block(self, start: int, end: int) -> None:
        files = _Files(self._pinned, self._objects[start:end], self._places.object_count)
        rows = np.flatnonzero(files.here & self._good[start:end])
        found = [(-1, *files.within(rows, *self._extents(rows + start)))] if self._places.fixed else []
        for field in self._places.ragged:
            begins = self._offsets[field][rows + start]
            found.append((field, *files.within(rows, begins, begins + self._lengths[field][rows + start])))
        inside = np.logical_and.reduce([fits for *_, fits in found])
        self._good[start:end] = False
        rows = rows[inside]
        if not rows.size:
            return
        self._good[start + rows] = True
        places: list[FieldPlaces] = []
        for field, which, shifts, _ in found:
            of_file, shift = which[inside].astype("<i4").tobytes(), shifts[inside]
            if field < 0:
                places += self._fixed_places(of_file, rows + start, shift)
            else:
                places.append(self._ragged_places(of_file, field, rows + start, shift))
        widths = tuple(field.width for field in self._places.fields)
        block = RowBlock(end - start, widths, rows.astype("<i4").tobytes(), (), tuple(places))
        position = int(self._positions[start])
        self.work.append(RowWork(self._first + start, position, (), block=block, paths=files.paths))

    def _extents(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return where the first field of each row with a width begins, and where the last one ends."""
        fields, distances = self._places.fields, self._places.distances
        if distances is None:
            offsets = {number: self._offsets[number][rows] for number in self._places.fixed}
            ends = [values + fields[number].width for number, values in offsets.items()]
            return np.minimum.reduce(list(offsets.values())), np.maximum.reduce(ends)
        base = self._offsets[self._places.fixed[0]][rows]
        last = max(distance + fields[number].width for number, distance in distances.items())
        return base + min(distances.values()), base + last

    def _ragged_places(self, files: bytes, field: int, rows: Numbers, shift: Numbers) -> FieldPlaces:
        offsets = (self._offsets[field][rows] + shift).astype("<i8").tobytes()
        return FieldPlaces(files, offsets, ((field, 0),), self._lengths[field][rows].astype("<i8").tobytes())

    def _fixed_places(self, files: bytes, rows: Numbers, shift: Numbers) -> list[FieldPlaces]:
        """Group fields that are at the same distance from each other in all rows."""
        if self._places.distances is not None:
            base = (self._offsets[self._places.fixed[0]][rows] + shift).astype("<i8").tobytes()
            return [FieldPlaces(files, base, tuple(self._places.distances.items()))]
        groups: list[tuple[Any, list[tuple[int, int]]]] = []
        for field in self._places.fixed:
            offsets = self._offsets[field][rows]
            for base_offsets, fields in groups:
                delta = int(offsets[0] - base_offsets[0])
                if np.array_equal(offsets - base_offsets, np.full(rows.size, delta)):
                    fields.append((field, delta))
                    break
            else:
                groups.append((offsets, [(field, 0)]))
        return [
            FieldPlaces(files, (base_offsets + shift).astype("<i8").tobytes(), tuple(fields))
            for base_offsets, fields in groups
        ]


class _Files:
    """The files of the objects of some rows, as one range of bytes: object after object, extent after extent.

    `here`: bool[rows], those whose object is on this node; `paths`: the different files.
    """

    def __init__(self, pinned: PinnedObjects, objects: npt.NDArray[np.int32], count: int) -> None:
        numbers, self._which = distinct(objects, count)
        remote = np.fromiter(map(pinned.is_remote, numbers.tolist()), np.bool_, numbers.size)
        self.here = ~remote[self._which]
        paths: dict[str, int] = {}
        owner, files, offsets, lengths = list[int](), list[int](), list[int](), list[int]()
        for place, number in enumerate(numbers.tolist()):
            for extent in () if remote[place] else pinned.locations(number):
                owner.append(place)
                files.append(paths.setdefault(extent.path, len(paths)))
                offsets.append(extent.offset)
                lengths.append(extent.length)
        self.paths = tuple(paths)
        self._owner, self._file = np.array(owner, np.int64), np.array(files, np.int64)
        self._bounds = np.cumsum([0, *lengths])
        self._first = self._bounds[np.searchsorted(self._owner, np.arange(numbers.size))]
        self._shift = np.array(offsets, np.int64) - self._bounds[:-1]

    def within(
        self, rows: Numbers, begins: Numbers, ends: Numbers
    ) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """Return for a range of the object of each row: the file in which it begins, the distance from an
        offset in the object to one in the file, and whether the range is a part of one extent.

        A whole extent has a checksum, which rendering verifies.
        """
        if not self._owner.size:
            return rows, rows, np.zeros(rows.size, np.bool_)
        owner = self._which[rows]
        first = self._first[owner]
        begins, ends = begins + first, ends + first
        which = np.minimum(np.searchsorted(self._bounds, begins, side="right"), self._owner.size) - 1
        stop = self._bounds[which + 1]
        whole = (begins == self._bounds[which]) & (ends == stop)
        fits = (self._owner[which] == owner) & (ends <= stop) & ~whole
        return self._file[which], self._shift[which] + first, fits
