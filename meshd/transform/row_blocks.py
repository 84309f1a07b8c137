"""Blocks of rows whose fields are copied as arrays: no object, message or call a row.

Law: a block gives the bytes that rendering its rows one by one gives, or it fails as a whole and its rows are
rendered one by one, which finds the row at fault. Only ops that draw nothing and treat each row alone are
applied to a block (`COLUMN_OPS`).
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from awscrt.checksums import crc32c

from meshd.transform.errors import BadSampleError
from meshd.transform.messages import unpack_integers
from meshd.transform.source_files import PROC_PREFIX, SourceDamagedError, SourceGoneError
from meshwire.plan.keyed_random import KeyedRandom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from meshd.transform.messages import FieldPlaces, RenderRequest, RowBlock
    from meshd.transform.op_chain import OpChain

FIRST_OP: Final = ("frombuffer", "1")
COLUMN_OPS: Final = frozenset({("cast", "1"), ("one_hot", "1"), ("gather_columns", "1")})
"""Ops, with their versions, whose result for stacked rows is the stack of their results."""
_MAPPED_FILES: Final = 1024
_SPARSE: Final = 4  # fields in a span of more than so many times their bytes are copied one by one
_FEW: Final = 16  # ragged values of a file that are copied one by one
_LONG: Final = 4096  # bytes from which on a ragged value is copied by itself
_RAGGED_BYTES: Final = 512 << 20
_NO_DRAWS = KeyedRandom(0, 0, 0)


class BlockCopier:
    """Copies blocks into frames; keeps recent files mapped. One per connection of a transform process."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[str, npt.NDArray[np.uint8]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockCopier, {len(self._mapped)} files mapped>"

    def copy(
        self,
        block: RowBlock,
        first: int,
        request: RenderRequest,
        chains: tuple[OpChain, ...],
        frame_fd: int,
        pause: Callable[[], None],
    ) -> dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
        """Write the fields of the rows from `first` on into the frame; `pause` is called when all is read.

        Returns for each field without a target, as ragged ones are, by its number, the bytes of each row, and
        all of them. Raises SourceGoneError; SourceDamagedError, BadSampleError, or any error of an op, if a
        row has to be looked at.
        """
        stored = [np.zeros((block.count, width), np.uint8) for width in block.widths]
        rows = np.frombuffer(block.rows, "<i4") if block.rows else np.arange(block.count, dtype=np.int32)
        paths = [request.paths[file] for file in block.files]
        ragged: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        for places in block.places:
            run = _ByFile(rows, places)
            if places.lengths:
                room = ragged[places.fields[0][0]] = run.lengths_of(block.count)
                for path, some in run.files(paths):
                    run.copy(self._file(path, run.last(some)), some, room)
                run.verify_ragged(room[1])
            else:
                for path, some in run.files(paths):
                    data = self._file(path, run.last(some))
                    _gather(data, run.rows[some], run.offsets[some], places.fields, block.widths, stored)
                run.verify_fixed(stored[places.fields[0][0]])
        pause()
        made = {
            number: _stacked(chain, stored[number])
            for number, chain in enumerate(chains)
            if number not in ragged
        }
        for number, values in made.items():
            target, row_bytes = request.targets[number], values.nbytes // max(1, block.count)
            if target is None:  # of several frames
                lengths = np.full(block.count, row_bytes, np.int64)
                ragged[number] = lengths, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
                continue
            _write(frame_fd, np.ascontiguousarray(values), target[0] + first * row_bytes)
        return ragged

    def _file(self, path: str, last: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, mapped, up to the offset `last` at least if it has grown to that.

        Raises SourceGoneError.
        """
        found = self._mapped.get(path)
        if found is None or last >= found.size:
            if path.startswith(PROC_PREFIX):
                raise SourceGoneError(f"{path} is the memory of another process")
            found = self._mapped[path] = _map(path)
            if len(self._mapped) > _MAPPED_FILES:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(path)
        return found

    def forget(self, path: str) -> None:
        """Map a file again when it is read next: it may have grown."""
        self._mapped.pop(path, None)

    def close(self) -> None:
        """Unmap every file."""
        self._mapped.clear()


def _map(path: str) -> npt.NDArray[np.uint8]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise SourceGoneError(f"cannot map {os.path.basename(path)}: {error}") from error


def _gather(
    data: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    fields: tuple[tuple[int, int], ...],
    widths: tuple[int, ...],
    stored: list[npt.NDArray[np.uint8]],
) -> None:
    low = min(delta for _, delta in fields)
    span = max(delta + widths[field] for field, delta in fields) - low
    if span > _SPARSE * sum(widths[field] for field, _ in fields):
        for field, delta in fields:
            stored[field].view(f"V{widths[field]}")[rows, 0] = _cells(data, offsets + delta, widths[field])
        return
    records = _cells(data, offsets + low, span)
    whole = records.view(np.uint8).reshape(rows.size, span)
    for field, delta in fields:
        width = widths[field]
        cell = np.ndarray((rows.size,), f"V{width}", whole, delta - low, (span,))
        stored[field].view(f"V{width}")[rows, 0] = cell


class _ByFile:
    """The rows of a block and where some of their fields are, sorted by file."""

    def __init__(self, rows: npt.NDArray[np.int32], places: FieldPlaces) -> None:
        files, offsets = (unpack_integers(each, rows.size) for each in (places.files, places.offsets))
        order = np.argsort(files, kind="stable")  # of narrow integers a radix sort
        self._files, self.rows, self.offsets = files[order], rows[order], offsets[order].astype(np.int64)
        self._sums = np.frombuffer(places.sums, "<i8")[order] if places.sums else None
        if places.lengths:
            self._lengths = unpack_integers(places.lengths, rows.size)[order].astype(np.int64)
            self._ends = self.offsets + self._lengths
            self._targets = np.zeros(0, np.int64)

    def files(self, paths: list[str]) -> Iterator[tuple[str, slice]]:
        """Yield each file and its part of the arrays."""
        cuts = [0, *(np.flatnonzero(self._files[1:] != self._files[:-1]) + 1).tolist(), self._files.size]
        for start, end in itertools.pairwise(cuts if self._files.size else []):
            yield paths[self._files[start]], slice(start, end)

    def last(self, some: slice) -> int:
        """Return the greatest offset in a file."""
        return int(self.offsets[some].max())

    def lengths_of(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the bytes of each of `count` rows, and room for all of them. Raises BadSampleError if they
        are too many."""
        lengths = np.zeros(count, np.int64)
        lengths[self.rows] = self._lengths
        total = int(lengths.sum())
        if total > _RAGGED_BYTES:
            raise BadSampleError(f"ragged values of {total} bytes")
        self._targets = (np.cumsum(lengths) - lengths)[self.rows]
        return lengths, np.empty(total, np.uint8)

    def verify_ragged(self, made: npt.NDArray[np.uint8]) -> None:
        """Compare the copied values with the checksums that are known. Raises SourceDamagedError."""
        if self._sums is not None:
            _verify(made, self._targets, self._targets + self._lengths, self._sums)

    def verify_fixed(self, stored: npt.NDArray[np.uint8]) -> None:
        """Compare the rows of a field with the checksums that are known. Raises SourceDamagedError."""
        if self._sums is not None:
            begins = self.rows.astype(np.int64) * stored.shape[1]
            _verify(stored.reshape(-1), begins, begins + stored.shape[1], self._sums)

    def copy(
        self,
        data: npt.NDArray[np.uint8],
        some: slice,
        values: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]],
    ) -> None:
        """Copy the ragged values in one file to their places. Raises SourceGoneError for bytes outside it."""
        offsets, lengths, targets = self.offsets[some], self._lengths[some], self._targets[some]
        if int(offsets.min()) < 0 or int(self._ends[some].max()) > data.size:
            raise SourceGoneError("the file is shorter than the rows in it")
        made = values[1]
        width = int(lengths[0])
        if lengths.size > _FEW and 0 < width < _LONG and bool((lengths == width).all()):
            np.ndarray((made.size - width + 1,), f"V{width}", made, 0, (1,))[targets] = _cells(
                data, offsets, width
            )
            return
        single = np.ones(lengths.size, np.bool_)
        if lengths.size > _FEW:
            single = lengths >= _LONG
            classes = np.frexp(lengths)[1]  # of lengths from 2 ** (n - 1) on, below 2 ** n
            for number in np.unique(classes[~single & (lengths > 0)]).tolist():
                rows, width = np.flatnonzero(classes == number), 1 << (number - 1)
                begins, ends = offsets[rows], targets[rows]
                rooms = np.ndarray((made.size - width + 1,), f"V{width}", made, 0, (1,))
                rooms[ends] = _cells(data, begins, width)
                rest = lengths[rows] - width  # the last `width` bytes overlap the first ones
                if rest.any():
                    rooms[ends + rest] = _cells(data, begins + rest, width)
        source, room = data.data, made.data
        places = zip(*(each[single].tolist() for each in (targets, offsets, lengths)), strict=True)
        for at, begin, length in places:
            room[at : at + length] = source[begin : begin + length]


def _verify(
    data: npt.NDArray[np.uint8],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    sums: npt.NDArray[np.int64],
) -> None:
    """Compare ranges of bytes with their crc32c, where it is not -1. Raises SourceDamagedError."""
    known, octets = sums >= 0, data.data
    for begin, end, expected in zip(*(each[known].tolist() for each in (begins, ends, sums)), strict=True):
        if crc32c(octets[begin:end]) != expected:
            raise SourceDamagedError("a value does not have its checksum")


def _cells(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.void]:
    """Return `width` bytes at each of the offsets. Raises SourceGoneError for one outside the file.

    Void elements have no alignment, so numpy indexes the mapping itself; other types would copy all of it.
    """
    if offsets.size and not 0 <= int(offsets.min()) <= int(offsets.max()) <= data.size - width:
        raise SourceGoneError("the file is shorter than the rows in it")
    if data.size < width:
        return np.zeros(0, f"V{width}")
    cells: npt.NDArray[np.void] = np.ndarray((data.size - width + 1,), f"V{width}", data, 0, (1,))
    return cells[offsets]


def _stacked(chain: OpChain, stored: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Apply the steps of a chain to the stored bytes of all rows at once. Raises what its ops raise."""
    first, *others = chain.steps
    shape = tuple(extent or 0 for extent in first.output.shape)
    kind = np.dtype(first.output.dtype)
    if kind == np.bool_:
        made: Any = stored != 0
    else:
        made = stored.view(kind.newbyteorder("<")).astype(kind, copy=False)
    made = made.reshape(len(stored), *shape)
    for step in others:
        made = step.operation.apply(made, _NO_DRAWS)
    if made.dtype != chain.output.dtype or made.shape[1:] != chain.output.fixed:
        raise BadSampleError(f"rows of {made.dtype}{list(made.shape[1:])}, not of {chain.output}")
    return made  # type: ignore[no-any-return]  # ops return arrays


def write_frames(
    block: RowBlock, fields: Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]], fd: int
) -> tuple[int, ...]:
    """Write the fields of a block, as `BlockCopier.copy` returns them, into its frames. Return the crc32c of
    each tensor: frame by frame, fields in the order of their numbers."""
    sums: list[int] = []
    ends = {number: np.cumsum(lengths) for number, (lengths, _) in fields.items()}
    begins = dict.fromkeys(fields, 0)
    row = 0
    for count, offsets in block.frames:
        row += count
        for number, at in enumerate(offsets):
            end = int(ends[number][row - 1]) if row else 0
            data = fields[number][1][begins[number] : end].data
            begins[number] = end
            sums.append(crc32c(data))
            _write_all(fd, data, at)
    return tuple(sums)


def _write(fd: int, values: npt.NDArray[Any], at: int) -> None:
    _write_all(fd, values.reshape(-1).view(np.uint8).data, at)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        at, data = at + written, data[written:]
