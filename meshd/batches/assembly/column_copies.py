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

from meshd.core.sample_locations import bytes_columns
from meshd.transform.messages import BlockPart, FieldPlaces, RowBlock
from meshd.transform.render_calls import RowWork
from meshd.transform.row_blocks import COLUMN_OPS, FIRST_OP
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.snapshot import RecordColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
_MOST_FILES: Final = 1024  # of a block: each costs a few numpy calls


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
    expected lengths, or None if all are.
    """

    def __init__(self, snapshot: Snapshot, fields: tuple[StoredField, ...]) -> None:
        self._columns = list(bytes_columns(snapshot).values())
        self.fields = fields
        self.fixed = [number for number, field in enumerate(fields) if field.width]
        self.ragged = [number for number, field in enumerate(fields) if not field.width]
        first = self._columns[self.fixed[0] if self.fixed else 0]
        self._first = first
        good = np.ones(snapshot.samples, np.bool_)
        distances: dict[int, int] = {}
        for number, (column, (width, item)) in enumerate(zip(self._columns, fields, strict=True)):
            if column.object is not first.object:
                good &= column.object == first.object
            if not width:
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
        return self._first.object[samples]

    def offsets(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the offsets by number of the field: of fields with a width, or with `distances` of the first
        of these alone, and of ragged ones."""
        wanted = [*(self.fixed if self.distances is None else self.fixed[:1]), *self.ragged]
        return {number: self._columns[number].offsets_at(samples) for number in wanted}

    def lengths(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the lengths of ragged fields, by their number."""
        return {number: self._columns[number].length[samples] for number in self.ragged}

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
        paths: list[str] = []
        parts: list[BlockPart] = []
        numbers = np.unique(self._objects[start:end])
        for number in numbers[:_MOST_FILES].tolist():
            found = np.flatnonzero(self._objects[start:end] == number) + start
            for path, part in self._object_parts(number, found[self._good[found]], start):
                paths.append(path)
                parts.append(part)
        for number in numbers[_MOST_FILES:].tolist():
            self._good[start:end] &= self._objects[start:end] != number
        if parts:
            block = RowBlock(end - start, tuple(field.width for field in self._places.fields), tuple(parts))
            position = int(self._positions[start])
            self.work.append(RowWork(self._first + start, position, (), block=block, paths=tuple(paths)))

    def _object_parts(self, number: int, rows: Numbers, start: int) -> Iterator[tuple[str, BlockPart]]:
        """Yield the parts of a block that begins at `start`, for its rows in one object."""
        if self._pinned.is_remote(number):
            self._good[rows] = False
            return
        locations = self._pinned.locations(number)
        bounds = np.cumsum([0, *(place.length for place in locations)])
        found = [(-1, *self._within(bounds, *self._extents(rows)))] if self._places.fixed else []
        for field in self._places.ragged:
            begins = self._offsets[field][rows]
            found.append((field, *self._within(bounds, begins, begins + self._lengths[field][rows])))
        inside = np.logical_and.reduce([fits for _, _, fits in found])
        self._good[rows[~inside]] = False
        for field, which, _ in found:
            for each in np.unique(which[inside]).tolist():
                place, some = locations[each], rows[inside & (which == each)]
                shift = place.offset - int(bounds[each])
                made = (
                    self._fixed_places(some, shift) if field < 0 else self._ragged_places(field, some, shift)
                )
                yield place.path, BlockPart(-1, (some - start).astype("<i4").tobytes(), made)

    @staticmethod
    def _within(bounds: Numbers, begins: Numbers, ends: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the extent in which each range begins, and whether it ends there, too."""
        last = bounds.size - 2
        which = np.clip(np.searchsorted(bounds, begins, side="right") - 1, 0, max(0, last))
        firsts, nexts = bounds[which], bounds[np.minimum(which + 1, bounds.size - 1)]
        whole = (begins == firsts) & (ends == nexts)  # has a checksum, which rendering verifies
        return which, (ends <= nexts) & ~whole & (last >= 0)

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

    def _ragged_places(self, field: int, rows: Numbers, shift: int) -> tuple[FieldPlaces, ...]:
        offsets = (self._offsets[field][rows] + shift).astype("<i8").tobytes()
        return (FieldPlaces(offsets, ((field, 0),), self._lengths[field][rows].astype("<i8").tobytes()),)

    def _fixed_places(self, rows: Numbers, shift: int) -> tuple[FieldPlaces, ...]:
        """Group fields that are at the same distance from each other in all rows."""
        if self._places.distances is not None:
            base = (self._offsets[self._places.fixed[0]][rows] + shift).astype("<i8").tobytes()
            return (FieldPlaces(base, tuple(self._places.distances.items())),)
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
        return tuple(
            FieldPlaces((base_offsets + shift).astype("<i8").tobytes(), tuple(fields))
            for base_offsets, fields in groups
        )
