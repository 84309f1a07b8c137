"""Direct rows: packed rows whose pieces are read from their objects' files into the tensors of frames.

Law: the bytes are those that `PackedRows.build_frame` makes of `DirectPieces`. The number of Python calls
does not depend on the tokens, and a piece costs one read. What is known of the pieces before they are read is
computed once, for the rows of all frames. Whatever is unusual (a piece that another node
holds, that is damaged or shorter than the table says) raises NotDirectError; the frame is then built piece by
piece, which says what is wrong with which sample. The
elements that are read equal the result of the ops on the whole sample, because the ops only name a dtype.
"""

from __future__ import annotations

import os
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

from meshd.batches.assembly.stored_sequence_format import BAD
from meshd.core.api_errors import busy
from meshd.core.sample_locations import bytes_columns, distinct
from meshd.store.errors import StoreError
from meshd.transform.messages import MAX_RAGGED_BYTES
from meshwire.plan.sequence_packing import POSITIONS, SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import PinnedObjects
    from meshd.store.records import Record, Span
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.columns import Integers
    from meshwire.plan.sequence_packing import PieceColumns


class NotDirectError(Exception):
    """The frame must be built piece by piece."""


class NotCachedError(Exception):
    """Some bytes are not in the page cache."""


class Reads(NamedTuple):
    """What is read for a field: of which object of `DirectRows.wanted`, from which byte on, how many bytes,
    and the byte of its frame's tensor at which they belong. int64[pieces] each."""

    numbers: Integers
    offsets: Integers
    sizes: Integers
    targets: Integers


class DirectRows:
    """The pieces of some frames as arrays. `rows`: how many each frame has; `columns`: those of
    `PackTable.piece_columns` for the rows of all frames, of whose samples `pinned.look_up` has been awaited.
    `wanted`: the objects to open, whole. Raises NotDirectError."""

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[int],
        columns: PieceColumns,
        pinned: PinnedObjects,
        snapshot: Snapshot,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        pack = plan.spec.pack
        assert pack is not None
        self.pack = pack
        self._counts, samples, self._begins, self._lengths = columns
        self._ends = np.cumsum(self._counts)
        self._frames = np.append(0, np.cumsum(rows))
        self._pieces = np.append(0, self._ends)[self._frames]
        numbers = np.repeat(np.arange(self._counts.size), self._counts)
        self._rows = (np.arange(self._counts.size) - np.repeat(self._frames[:-1], rows))[numbers]
        before = np.append(0, np.cumsum(self._lengths))
        self._used = before[self._ends] - before[self._ends - self._counts]
        self._targets = self._rows * pack.length + before[:-1] - before[self._ends - self._counts][numbers]
        self.wanted: list[tuple[Record, int, int]] = []
        self.dtypes = dict(zip(pack.fields, dtypes, strict=True))
        self.reads = {
            name: self._locate(plan, name, dtype, samples, snapshot, pinned)
            for name, dtype in self.dtypes.items()
        }

    def __repr__(self) -> str:
        return f"<DirectRows, {self._lengths.size} pieces of {len(self.wanted)} objects>"

    def _locate(
        self,
        plan: Plan,
        name: str,
        dtype: np.dtype[Any],
        samples: Integers,
        snapshot: Snapshot,
        pinned: PinnedObjects,
    ) -> Reads:
        column, width = bytes_columns(snapshot)[name], dtype.itemsize
        if np.dtype(plan.outputs[name].dtype) != dtype:
            raise NotDirectError("elements of another type")
        begins, sizes = self._begins * width, self._lengths * width
        if (column.lengths_at(samples) < begins + sizes).any():
            raise NotDirectError("a sample is shorter than the table says")
        numbers, which = distinct(column.objects_at(samples), len(snapshot.objects))
        if any(map(pinned.is_remote, numbers.tolist())):
            raise NotDirectError("another node has some of the bytes")
        first = len(self.wanted)
        for number in numbers.tolist():
            record = pinned.record(number)
            self.wanted.append((record, 0, record.size))
        offsets = column.offsets_at(samples) + begins
        return Reads(which + first, offsets, sizes, self._targets * width)

    def shape(self, frame: int) -> tuple[int, int]:
        """Return the rows of a frame, and the elements of each."""
        return int(self._frames[frame + 1] - self._frames[frame]), self.pack.length

    def pieces(self, frame: int) -> slice:
        """Return the numbers of a frame's pieces."""
        return slice(int(self._pieces[frame]), int(self._pieces[frame + 1]))

    def numbers(self, frame: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return the segment and the position of each element of a frame, as far as they are wanted, and 0
        for padding: int32[rows, length]."""
        pack = self.pack
        made: dict[str, npt.NDArray[np.int32]] = {}
        if not pack.numbers:
            return made
        first, (rows, length), part = pack.fields[0], self.shape(frame), self.pieces(frame)
        whole = slice(int(self._frames[frame]), int(self._frames[frame + 1]))
        lengths, inner, ends = self._lengths[part], self._rows[part], self._ends[whole] - part.start
        count = lengths.size
        places, padding = np.arange(count) + inner, ends + np.arange(rows)
        sizes = np.zeros(count + rows, np.int64)
        sizes[places], sizes[padding] = lengths, length - self._used[whole]
        if pack.segments:
            segments = np.zeros(count + rows, np.int32)
            segments[places] = np.arange(1, count + 1) - (ends - self._counts[whole])[inner]
            made[f"{first}{SEGMENTS}"] = np.repeat(segments, sizes).reshape(rows, length)
        if pack.positions != "none":
            shifts = np.zeros(count + rows, np.int32)
            shifts[places] = self._targets[part] - (self._begins[part] if pack.positions == "sample" else 0)
            counted = np.arange(rows * length, dtype=np.int32)
            counted -= np.repeat(shifts, sizes)
            positions = counted.reshape(rows, length)
            for row, used in enumerate(self._used[whole].tolist()):
                positions[row, used:] = 0
            made[f"{first}{POSITIONS}"] = positions
        return made


class _Places(NamedTuple):
    """Where the pieces of a field are read: descriptors, offsets in these files, sizes; where they belong:
    first bytes and ends; and which are not parts of only extents. `objects`: the number of each piece's
    object, and the offset in it."""

    fds: list[int]
    starts: list[int]
    sizes: list[int]
    begins: list[int]
    ends: list[int]
    apart: npt.NDArray[np.bool_]
    objects: list[tuple[int, int]]


class OpenRows:
    """Direct rows whose objects are open; `opened`: the spans of `DirectRows.wanted`."""

    def __init__(self, rows: DirectRows, opened: Sequence[Sequence[Span] | None]) -> None:
        self._rows, self._opened = rows, [each or () for each in opened]
        only = [each[0] if len(each) == 1 else None for each in self._opened]
        heads = [(-1, 0, 0) if span is None else (span.fd, span.offset, span.length) for span in only]
        self._heads = np.array(heads, np.int64).reshape(-1, 3).T
        self._places = {name: self._places_of(reads) for name, reads in rows.reads.items()}

    def __repr__(self) -> str:
        return f"<OpenRows of {self._rows!r}>"

    def _places_of(self, reads: Reads) -> _Places:
        numbers, offsets, sizes, targets = reads
        fds, bases, wholes = self._heads[:, numbers]
        apart = (offsets + sizes > wholes) | (sizes == wholes)
        objects = list(zip(numbers.tolist(), offsets.tolist(), strict=True)) if apart.any() else []
        starts, ends = (bases + offsets).tolist(), (targets + sizes).tolist()
        return _Places(fds.tolist(), starts, sizes.tolist(), targets.tolist(), ends, apart, objects)

    def elements(self, frame: int) -> int:
        """Return the elements of a tensor of a frame."""
        rows, length = self._rows.shape(frame)
        return rows * length

    def tensors(self, frame: int = 0, *, cached: bool) -> dict[str, npt.NDArray[Any]]:
        """Return the tensors of the rows of a frame. Raises NotDirectError.

        Blocking, except with `cached`, which raises NotCachedError for bytes that a disk must read.
        """
        rows = self._rows
        made: dict[str, npt.NDArray[Any]] = {}
        flags, part, shape = os.RWF_NOWAIT if cached else 0, rows.pieces(frame), rows.shape(frame)
        for name, dtype in rows.dtypes.items():
            made[name] = np.full(shape, rows.pack.value, dtype)
            self._read(self._places[name], part, made[name].reshape(-1).view(np.uint8).data, flags)
        return made | rows.numbers(frame)

    def _read(self, places: _Places, part: slice, room: memoryview, flags: int) -> None:
        """Read some pieces to their places in `room`."""
        bounds = zip(places.begins[part], places.ends[part], strict=True)
        rooms = [(room[begin:end],) for begin, end in bounds]
        if places.apart[part].any():
            for (number, offset), (piece,) in zip(places.objects[part], rooms, strict=True):
                _read_extents(self._opened[number], offset, piece, flags)
            return
        try:  # nearly always: parts of only extents
            got = list(map(os.preadv, places.fds[part], rooms, places.starts[part], repeat(flags)))
        except OSError as error:
            raise _failure(flags) from error
        if got != places.sizes[part]:
            raise _failure(flags)


def _failure(flags: int) -> NotDirectError | NotCachedError:
    return NotCachedError() if flags else NotDirectError("some bytes cannot be read")


def _read_extents(spans: Sequence[Span], offset: int, room: memoryview, flags: int) -> None:
    for span in spans:
        if offset >= span.length:
            offset -= span.length
            continue
        part = room[: span.length - offset]
        try:
            got = os.preadv(span.fd, [part], span.offset + offset, flags)
        except OSError as error:
            raise _failure(flags) from error
        if got != len(part):
            raise _failure(flags)
        whole = span.extent if len(part) == span.length else None  # then its checksum is known
        if whole is not None and crc32c(part) != whole.crc32c:
            raise NotDirectError("some bytes are damaged")
        room, offset = room[len(part) :], 0
        if not room:
            return
    if room:
        raise NotDirectError("an object is shorter than the snapshot says")


_OP: Final = "frombuffer"


def direct_dtypes(within: Plan, fields: Sequence[str]) -> tuple[np.dtype[Any], ...] | None:
    """Return the dtype of each field's elements in its objects; None unless all fields are read directly."""
    found = []
    for name in fields:
        ops = [op for op in within.spec.ops if name in op.all_fields]
        if len(ops) != 1 or ops[0].op != _OP:
            return None
        args = ops[0].for_field(name).args
        if args.get("shape") != [None] or args["dtype"] == "bool":
            return None
        found.append(np.dtype(args["dtype"]).newbyteorder("<"))
    return tuple(found)


def direct_lengths(snapshot: Snapshot, fields: Sequence[str], dtypes: Sequence[np.dtype[Any]]) -> Integers:
    """Return the lengths of all samples in elements: int64[n], BAD for those that rendering would refuse."""
    columns = bytes_columns(snapshot)
    sizes = [columns[name].length.astype(np.int64) for name in fields]
    lengths = [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    bad = sum(sizes) > MAX_RAGGED_BYTES
    for length, size, dtype in zip(lengths, sizes, dtypes, strict=True):
        bad |= (size % dtype.itemsize != 0) | (length != lengths[0])
    return np.where(bad, BAD, lengths[0])


class DirectPieces:
    """A source of pieces: the objects of the snapshot. `prepare` it; `pinned` is closed by its owner."""

    def __init__(
        self,
        pinned: PinnedObjects,
        snapshot: Snapshot,
        fields: Sequence[str],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        columns = bytes_columns(snapshot)
        self._pinned, self._dtypes = pinned, tuple(dtypes)
        self._columns = [columns[name] for name in fields]

    def __repr__(self) -> str:
        return f"<DirectPieces of {self._pinned!r}>"

    async def prepare(self, samples: npt.NDArray[np.int64], pieces: Iterable[tuple[int, int, int]]) -> None:
        """Look up the objects of the samples, and fetch the bytes of (sample, begin, length) that other nodes
        hold. Raises BatchError SnapshotChanged, Busy.
        """
        await self._pinned.look_up(samples.tolist())
        await self._pinned.fetch_ranges(
            [self._range(field, *piece) for piece in pieces for field in range(len(self._columns))]
        )

    def _range(self, field: int, sample: int, begin: int, length: int) -> tuple[int, int, int]:
        column, width = self._columns[field], self._dtypes[field].itemsize
        return int(column.objects_at(sample)), int(column.offsets_at(sample)) + begin * width, length * width

    def read_piece(self, field: int, sample: int, begin: int, length: int) -> npt.NDArray[Any] | None:
        """See `PieceSource`. Raises BatchError Busy, SnapshotChanged."""
        dtype = self._dtypes[field]
        if int(self._columns[field].lengths_at(sample)) < (begin + length) * dtype.itemsize:
            return None
        try:
            data = self._pinned.read_range(*self._range(field, sample, begin, length))
        except StoreError as error:
            raise busy(f"a part of sample {sample} cannot be read now: {error}") from error
        return np.frombuffer(data, dtype)
