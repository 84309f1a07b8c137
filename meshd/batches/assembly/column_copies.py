"""Column copies: the rows of a frame that transform processes copy as arrays, found without a loop over rows.

Law: a row goes into a block only if its fields lie whole in one file of this node and have the number of
bytes that the plan expects. Every other row is left to be rendered by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from meshd.core.sample_locations import bytes_columns
from meshd.transform.messages import BlockPart, FieldPlaces, RowBlock
from meshd.transform.render_calls import RowWork
from meshd.transform.row_blocks import COLUMN_OPS, FIRST_OP
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.snapshot import RecordColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshd.core.plan_record import FieldOutput
    from meshd.core.sample_locations import PinnedObjects
    from meshwire.dataset.snapshot import BytesColumn, Records, Snapshot
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

    Numbers = npt.NDArray[np.int64]

FEWEST_ROWS: Final = 64
"""Below that number of rows, a block saves nothing."""
_BLOCK_ROWS: Final = 16384
_KEPT_SNAPSHOTS: Final = 8
_MOST_FILES: Final = 1024  # of a block: each costs a few numpy calls


def block_widths(
    spec: PlanSpec, outputs: Mapping[str, FieldOutput], *, mixed: bool
) -> tuple[int, ...] | None:
    """Return the bytes of each field of a row in its file, or None if rows must be rendered one by one."""
    if mixed or spec.pack is not None or not outputs:
        return None
    widths = []
    for name, output in sorted(outputs.items()):
        ops = [op for op in spec.ops if name in op.all_fields]
        width = 0 if output.shape is None or not ops else _stored_width(ops)
        if not width:
            return None
        widths.append(width)
    return tuple(widths)


def _stored_width(ops: list[OpSpec]) -> int:
    first, *others = ops
    apart = all((op.op, op.version) in COLUMN_OPS and not op.fields for op in others)
    if (first.op, first.version) != FIRST_OP or first.fields or not apart:
        return 0
    shape = first.args.get("shape", ())
    if not isinstance(shape, (list, tuple)) or None in shape:
        return 0
    return int(np.dtype(first.args["dtype"]).itemsize * math.prod(shape))


class RowPlaces:
    """Where the fields of all samples of a snapshot are, as far as it is the same for all of them.

    `distances`: bytes of each field from the first one, or None if they differ between samples; `good`:
    bool[N], the samples whose fields are in one object and have the expected `widths`, or None if all are.
    """

    def __init__(self, snapshot: Snapshot, widths: tuple[int, ...]) -> None:
        self._columns = list(bytes_columns(snapshot).values())
        first, self.widths = self._columns[0], widths
        self.good: npt.NDArray[np.bool_] | None
        self.distances: tuple[int, ...] | None
        if isinstance(first, RecordColumn) and _are_records(self._columns, widths, first.records):
            columns = cast("list[RecordColumn]", self._columns)
            self.good, self.distances = None, tuple(column.distance - first.distance for column in columns)
            return
        good = np.ones(snapshot.samples, np.bool_)
        distances: list[int] = []
        for column, width in zip(self._columns, widths, strict=True):
            good &= (column.length == width) & (column.object == first.object)
            apart = column.offset - first.offset
            if apart.size and (apart == apart[0]).all():
                distances.append(int(apart[0]))
        self.good = None if good.all() else good
        self.distances = tuple(distances) if len(distances) == len(widths) else None

    def __repr__(self) -> str:
        return f"<RowPlaces of {len(self.widths)} fields>"

    def objects(self, samples: Numbers) -> npt.NDArray[np.int32]:
        """Return the number of the object of each sample."""
        return self._columns[0].object[samples]

    def offsets(self, samples: Numbers) -> list[Numbers]:
        """Return the offset of each field, or with `distances` that of the first field alone."""
        columns = self._columns if self.distances is None else self._columns[:1]
        return [column.offsets_at(samples) for column in columns]

    def good_rows(self, samples: Numbers) -> npt.NDArray[np.bool_]:
        """Return for each sample whether a block may have it."""
        return np.ones(samples.size, np.bool_) if self.good is None else self.good[samples]


def _are_records(columns: Sequence[BytesColumn], widths: Sequence[int], records: Records) -> bool:
    return all(
        isinstance(column, RecordColumn) and column.records is records and column.width == width
        for column, width in zip(columns, widths, strict=True)
    )


class RowPlacesCache:
    """The places of the snapshots that were used last; finding them reads all offsets of a snapshot once."""

    def __init__(self, limit: int = _KEPT_SNAPSHOTS) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], RowPlaces] = OrderedDict()
        self._making: SingleFlight[tuple[str, tuple[int, ...]], RowPlaces] = SingleFlight()

    def __repr__(self) -> str:
        return f"<RowPlacesCache of {len(self._kept)} snapshots>"

    async def find(self, snapshot: Snapshot, widths: tuple[int, ...]) -> RowPlaces:
        """Return the places of a snapshot whose fields have these widths in bytes."""
        key = snapshot.hash, widths
        found = self._kept.get(key)
        if found is None:
            found, _ = await self._making.run(key, lambda: asyncio.to_thread(RowPlaces, snapshot, widths))
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
        self._good, self._positions = places.good_rows(samples), positions
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
            block = RowBlock(end - start, self._places.widths, tuple(parts))
            position = int(self._positions[start])
            self.work.append(RowWork(self._first + start, position, (), block=block, paths=tuple(paths)))

    def _object_parts(self, number: int, rows: Numbers, start: int) -> Iterator[tuple[str, BlockPart]]:
        """Yield the parts of a block that begins at `start`, for its rows in one object."""
        if self._pinned.is_remote(number):
            self._good[rows] = False
            return
        locations = self._pinned.locations(number)
        bounds = np.cumsum([0, *(place.length for place in locations)])
        begins, ends = self._extents(rows)
        which = np.searchsorted(bounds, begins, side="right") - 1
        inside = (which < len(locations)) & (ends <= bounds[np.minimum(which + 1, len(locations))])
        self._good[rows[~inside]] = False
        for each in np.unique(which[inside]).tolist():
            place, some = locations[each], rows[inside & (which == each)]
            shift = place.offset - int(bounds[each])
            within = (some - start).astype("<i4").tobytes()
            yield place.path, BlockPart(-1, within, self._field_places(some, shift))

    def _extents(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return where the first field of each row begins, and where the last one ends."""
        widths, distances = self._places.widths, self._places.distances
        if distances is None:
            offsets = [values[rows] for values in self._offsets]
            ends = [values + width for values, width in zip(offsets, widths, strict=True)]
            return np.minimum.reduce(offsets), np.maximum.reduce(ends)
        base = self._offsets[0][rows]
        last = max(distance + width for distance, width in zip(distances, widths, strict=True))
        return base + min(distances), base + last

    def _field_places(self, rows: Numbers, shift: int) -> tuple[FieldPlaces, ...]:
        """Group fields that are at the same distance from each other in all rows."""
        if self._places.distances is not None:
            base = (self._offsets[0][rows] + shift).astype("<i8").tobytes()
            return (FieldPlaces(base, tuple(enumerate(self._places.distances))),)
        groups: list[tuple[Any, list[tuple[int, int]]]] = []
        for field, values in enumerate(self._offsets):
            offsets = values[rows]
            for base, fields in groups:
                delta = int(offsets[0] - base[0])
                if np.array_equal(offsets - base, np.full(rows.size, delta)):
                    fields.append((field, delta))
                    break
            else:
                groups.append((offsets, [(field, 0)]))
        return tuple(
            FieldPlaces((base + shift).astype("<i8").tobytes(), tuple(fields)) for base, fields in groups
        )
