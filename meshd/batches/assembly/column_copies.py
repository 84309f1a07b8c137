"""Column copies: the rows of a frame that transform processes copy as arrays, found without a loop over rows.

Law: a row goes into a block only if each of its fields lies whole in one extent of this node and has the
number of bytes that the plan expects. A field that is a whole extent, as a small object is, has its checksum
with it. Every other row is left to be rendered by itself. Only the samples of the batch are looked at.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from meshd.core.sample_locations import bytes_columns, distinct
from meshd.transform.messages import FieldPlaces, RowBlock, pack_integers
from meshd.transform.renderer import RowWork
from meshd.transform.row_blocks import COLUMN_OPS, FIRST_OP
from meshwire.dataset.paged_columns import PagedColumn
from meshwire.dataset.snapshot import RecordColumn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshd.core.plan_record import FieldOutput
    from meshd.core.sample_locations import PinnedObjects
    from meshwire.dataset.snapshot import BytesColumn, Snapshot
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

    Numbers = npt.NDArray[np.int64]

FEWEST_ROWS: Final = 64
"""Below that number of rows, a block saves nothing."""
BLOCK_ROWS: Final = 16384
"""Rows of a block, at most."""
SMALL_BYTES: Final = 4096
"""Of a row's ragged fields, on average: beyond, their copying is what costs, and rows are rendered."""


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
    """Where the fields of samples of a snapshot are; asked for those of a batch, it looks at no others.

    `groups`: the fields that are read together from one object, by their numbers: all those with a width,
    and each ragged one; of plain objects each field, which is an object of its own. `distances`: bytes of
    each field with a width from the first of these, if it is the same for all samples; `object_count`: of
    the snapshot.
    """

    def __init__(self, snapshot: Snapshot, fields: tuple[StoredField, ...]) -> None:
        self._columns = list(bytes_columns(snapshot).values())
        self.fields, self.object_count = fields, len(snapshot.objects)
        self.whole_objects = snapshot.kind == "objects"
        fixed = tuple(number for number, field in enumerate(fields) if field.width)
        ragged = [(number,) for number, field in enumerate(fields) if not field.width]
        apart = [(number,) for number in range(len(fields))]
        self.groups = apart if self.whole_objects else [*([fixed] if fixed else []), *ragged]
        self.distances = self._record_distances(fixed)
        self._last: tuple[Numbers, dict[int, Numbers]] | None = None
        self._last_objects: tuple[Numbers, list[npt.NDArray[np.int32]]] | None = None

    def __repr__(self) -> str:
        return f"<RowPlaces of {len(self.fields)} fields>"

    def _record_distances(self, fixed: tuple[int, ...]) -> dict[int, int] | None:
        """Return the distances of columns of a table that share their records; None for others."""
        columns = [self._columns[number] for number in fixed]
        found = [column for column in columns if isinstance(column, RecordColumn)]
        if not found or len(found) < len(columns) or any(c.records is not found[0].records for c in found):
            return None
        first = found[0].distance
        return {number: each.distance - first for number, each in zip(fixed, found, strict=True)}

    def objects(self, samples: Numbers) -> list[npt.NDArray[np.int32]]:
        """Return the number of the object of each sample, for each group; but one, if it is the same. Of the
        same array as before at once."""
        if self._last_objects is None or self._last_objects[0] is not samples:
            which = [group[0] for group in self.groups] if self.whole_objects else [self.groups[0][0]]
            self._last_objects = samples, [self._columns[number].objects_at(samples) for number in which]
        return self._last_objects[1]

    def object_numbers(self, samples: Numbers) -> set[int]:
        """Return the numbers of these objects, each once."""
        found = set[int]()
        for objects in self.objects(samples):
            found.update(distinct(objects, self.object_count)[0].tolist())
        return found

    def offsets(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the offsets by number of the field; with `distances`, of the first of these fields alone."""
        left = () if self.distances is None else tuple(self.distances)[1:]
        wanted = [number for number in range(len(self.fields)) if number not in left]
        return {number: self._columns[number].offsets_at(samples) for number in wanted}

    def lengths(self, samples: Numbers) -> dict[int, Numbers]:
        """Return the lengths of ragged fields, by their number; of the same array as before at once."""
        if self._last is None or self._last[0] is not samples:
            ragged = [number for number, field in enumerate(self.fields) if not field.width]
            self._last = samples, {number: self._columns[number].lengths_at(samples) for number in ragged}
        return self._last[1]

    def good_rows(self, samples: Numbers, lengths: Mapping[int, Numbers]) -> npt.NDArray[np.bool_]:
        """Return for each sample whether a block may have it: its fields have the expected lengths, and are
        in one object if they are in no object of their own. `lengths`: those of ragged fields."""
        good = np.ones(samples.size, np.bool_)
        first = self._columns[self.groups[0][0]]
        objects: npt.NDArray[np.int32] | None = None
        for number, (column, (width, item)) in enumerate(zip(self._columns, self.fields, strict=True)):
            if not self.whole_objects and not _in_same_objects(column, first):
                objects = first.objects_at(samples) if objects is None else objects
                good &= column.objects_at(samples) == objects
            if not width:
                if item > 1:
                    good &= lengths[number] % item == 0
            elif isinstance(column, RecordColumn):
                if column.width != width:
                    good[:] = False
            else:
                good &= column.lengths_at(samples) == width
        return good

    def row_bytes(self, samples: Numbers) -> float:
        """Return the bytes of the fields of a row, on average."""
        ragged = sum(int(each.sum()) for each in self.lengths(samples).values())
        return sum(field.width for field in self.fields) + ragged / max(1, samples.size)


def _in_same_objects(column: BytesColumn, first: BytesColumn) -> bool:
    """Return whether two columns are known to have the same object for each sample."""
    if isinstance(column, PagedColumn) and isinstance(first, PagedColumn):
        return column.pages is first.pages
    if isinstance(column, RecordColumn) and isinstance(first, RecordColumn):
        return column.records is first.records
    return column is first


class ColumnCopies:
    """The blocks of some rows of a frame. `rest`: the rows that are in none.

    `samples`: int64[n], the samples of the rows; `ends`: the row before which each block ends.
    """

    def __init__(
        self,
        places: RowPlaces,
        pinned: PinnedObjects,
        samples: Numbers,
        positions: Numbers,
        ends: Sequence[int] | None = None,
    ) -> None:
        self._pinned, self._places = pinned, places
        self._objects, self._offsets = places.objects(samples), places.offsets(samples)
        self._lengths = places.lengths(samples)
        self._good, self._positions = places.good_rows(samples, self._lengths), positions
        if sum(int(each.sum()) for each in self._lengths.values()) > SMALL_BYTES * len(samples):
            self._good[:] = False  # large values are read as such, with their checksums
        self.work: list[RowWork] = []
        bounds = [*range(0, len(samples), BLOCK_ROWS), len(samples)] if ends is None else [0, *ends]
        for start, end in itertools.pairwise(bounds):
            self._add_block(start, end)

    def __repr__(self) -> str:
        return f"<ColumnCopies, {len(self.work)} blocks>"

    @property
    def rest(self) -> list[int]:
        """The rows that no block has, ascending."""
        return np.flatnonzero(~self._good).tolist()

    def _add_block(self, start: int, end: int) -> None:
        places, part = self._places, slice(start, end)
        files = _Files(self._pinned, [each[part] for each in self._objects], places.object_count)
        good = self._good[part] if files.here is None else files.here & self._good[part]
        rows = None if good.all() else np.flatnonzero(good)
        at: slice | Numbers = part if rows is None else rows + start
        found = [
            files.within(number, rows, *self._extents(group, at), checked=len(group) == 1)
            for number, group in enumerate(places.groups)
        ]
        inside = np.logical_and.reduce([each.fits for each in found]) if len(found) > 1 else found[0].fits
        if rows is not None or not inside.all():
            rows = (np.arange(end - start) if rows is None else rows)[inside]
            found = [each.select(inside) for each in found]
            at = rows + start
            self._good[part] = False
            self._good[at] = True
        count = end - start if rows is None else rows.size
        if not count:
            return
        made: list[FieldPlaces] = []
        for group, each in zip(places.groups, found, strict=True):
            if places.fields[group[0]].width:
                made += self._fixed_places(group, each, at)
            else:
                made.append(self._ragged_places(group[0], each, at))
        widths = tuple(field.width for field in places.fields)
        chosen = b"" if rows is None or count == end - start else rows.astype("<i4").tobytes()
        block = RowBlock(end - start, widths, chosen, (), tuple(made))
        position = int(self._positions[start])
        self.work.append(RowWork(start, position, (), block=block, paths=files.paths))

    def _extents(self, group: tuple[int, ...], rows: Numbers | slice) -> tuple[Numbers, Numbers]:
        """Return where the first field of a group begins in each row, and where the last one ends."""
        fields, distances = self._places.fields, self._places.distances
        if not fields[group[0]].width:
            begins = self._offsets[group[0]][rows]
            return begins, begins + self._lengths[group[0]][rows]
        if distances is None:
            offsets = {number: self._offsets[number][rows] for number in group}
            ends = [values + fields[number].width for number, values in offsets.items()]
            return np.minimum.reduce(list(offsets.values())), np.maximum.reduce(ends)
        base = self._offsets[group[0]][rows]
        last = max(distance + fields[number].width for number, distance in distances.items())
        return base + min(distances.values()), base + last

    def _ragged_places(self, field: int, found: _Found, rows: Numbers | slice) -> FieldPlaces:
        offsets, lengths = self._offsets[field][rows] + found.shifts, self._lengths[field][rows]
        return FieldPlaces(
            pack_integers(found.files),
            pack_integers(offsets),
            ((field, 0),),
            pack_integers(lengths),
            found.known_sums(),
        )

    def _fixed_places(
        self, group: tuple[int, ...], found: _Found, rows: Numbers | slice
    ) -> list[FieldPlaces]:
        """Group fields that are at the same distance from each other in all rows."""
        files, sums = pack_integers(found.files), found.known_sums()
        if self._places.distances is not None:
            base = pack_integers(self._offsets[group[0]][rows] + found.shifts)
            return [FieldPlaces(files, base, tuple(self._places.distances.items()), sums=sums)]
        groups: list[tuple[Any, list[tuple[int, int]]]] = []
        for field in group:
            offsets = self._offsets[field][rows]
            for base_offsets, fields in groups:
                delta = int(offsets[0] - base_offsets[0])
                if bool((offsets - base_offsets == delta).all()):
                    fields.append((field, delta))
                    break
            else:
                groups.append((offsets, [(field, 0)]))
        return [
            FieldPlaces(files, pack_integers(base + found.shifts), tuple(fields), sums=sums)
            for base, fields in groups
        ]


class _Found(NamedTuple):
    """Where ranges of objects are, one for each row: the file in which each begins, the distance from an
    offset in the object to one in the file, and whether the range is within one extent. `sums`: the crc32c
    of those that are a whole extent, -1 for others; None if all are others."""

    files: Numbers
    shifts: Numbers
    fits: npt.NDArray[np.bool_]
    sums: Numbers | None = None

    def select(self, rows: npt.NDArray[np.bool_]) -> _Found:
        sums = None if self.sums is None else self.sums[rows]
        return _Found(self.files[rows], self.shifts[rows], self.fits[rows], sums)

    def known_sums(self) -> bytes:
        """Return the checksums as a message has them, nothing if there is none."""
        if self.sums is None or not bool((self.sums >= 0).any()):
            return b""
        return self.sums.astype("<i8").tobytes()


class _Files:
    """The files of the objects of some rows, as one range of bytes: object after object, extent after extent.

    `objects`: those of each group of fields, or of all groups; `here`: bool[rows], those whose objects are on
    this node, None if all are; `paths`: the different files.
    """

    def __init__(self, pinned: PinnedObjects, objects: list[npt.NDArray[np.int32]], count: int) -> None:
        numbers, which = distinct(objects[0] if len(objects) == 1 else np.concatenate(objects), count)
        self._which = np.split(which, len(objects))
        remote = np.fromiter(map(pinned.is_remote, numbers.tolist()), np.bool_, numbers.size)
        self.here: npt.NDArray[np.bool_] | None = None
        if remote.any():
            self.here = ~np.logical_or.reduce([remote[each] for each in self._which])
        paths: dict[str, int] = {}
        owner, files, offsets, lengths, sums = (list[int]() for _ in range(5))
        for place, number in enumerate(numbers.tolist()):
            for extent in () if remote[place] else pinned.locations(number):
                owner.append(place)
                files.append(paths.setdefault(extent.path, len(paths)))
                offsets.append(extent.offset)
                lengths.append(extent.length)
                sums.append(extent.crc32c)
        self.paths = tuple(paths)
        self._owner, self._file = np.array(owner, np.int64), np.array(files, np.int64)
        self._sums, self._bounds = np.array(sums, np.int64), np.cumsum([0, *lengths])
        self._first = self._bounds[np.searchsorted(self._owner, np.arange(numbers.size))]
        self._offset, self._length = np.array(offsets, np.int64), np.array(lengths, np.int64)
        self._shift = self._offset - self._bounds[:-1]
        # Each object is one extent, as most are: which one a range is in needs no search.
        self._whole_objects = np.array_equal(self._owner, np.arange(numbers.size))

    def within(
        self, group: int, rows: Numbers | None, begins: Numbers, ends: Numbers, *, checked: bool
    ) -> _Found:
        """Return where a range of the object of each row is; None: of all rows. `checked`: whether a range
        can be compared with a checksum; otherwise a whole extent, which has one, is left to be rendered."""
        if not self._owner.size:
            return _Found(begins, begins, np.zeros(begins.size, np.bool_))
        owner = self._which[group if len(self._which) > 1 else 0]
        owner = owner if rows is None else owner[rows]
        if self._whole_objects:
            which, shifts = owner, self._offset.take(owner)
            starts, stops = begins == 0, self._length.take(owner)
            fits = ends <= stops
        else:
            first = self._first[owner]
            begins, ends = begins + first, ends + first
            which = np.minimum(np.searchsorted(self._bounds, begins, side="right"), self._owner.size) - 1
            shifts = self._shift[which] + first
            starts, stops = begins == self._bounds[which], self._bounds[which + 1]
            fits = (self._owner[which] == owner) & (ends <= stops)
        sums = None
        if starts.any():
            whole = starts & (ends == stops)
            fits &= checked | ~whole
            sums = np.where(whole, self._sums[which], -1) if whole.any() else None
        return _Found(self._file.take(which), shifts, fits, sums)
