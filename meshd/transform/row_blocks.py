"""Blocks of rows whose fields are copied as arrays, without an object, message or call per row.

Law: a block gives the same bytes as rendering its rows one by one. Otherwise it fails as a whole; the caller
then renders its rows one by one, which finds the row at fault. Only ops that draw nothing and treat each row
independently are applied to a block (`COLUMN_OPS`).
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

    RaggedField = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]
    """The length of each row's value, and the values of all rows, concatenated."""

    from meshd.transform.messages import FieldPlaces, RenderRequest, RowBlock
    from meshd.transform.op_chain import OpChain

FIRST_OP: Final = ("frombuffer", "1")
COLUMN_OPS: Final = frozenset({("cast", "1"), ("one_hot", "1"), ("gather_columns", "1")})
"""Ops, with their versions, whose result for stacked rows is the stack of their results."""
_MAPPED_FILES: Final = 1024
_SPARSE: Final = 4  # fields are copied one by one if their span has more than this many times their bytes
_FEW: Final = 16  # up to so many ragged values of a file are copied one by one
_LONG: Final = 4096  # so are ragged values from this many bytes on
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
    ) -> dict[int, RaggedField]:
        """Write the block's rows into the frame; its first one is row `first` there. Calls `pause` once all
        sources are read.

        Returns, by number, the fields that have no target in the frame, such as ragged ones. Raises
        SourceGoneError; and if some row is at fault SourceDamagedError, BadSampleError, or any error of an
        op.
        """
        stored = [np.zeros((block.count, width), np.uint8) for width in block.widths]
        rows = np.frombuffer(block.rows, "<i4") if block.rows else np.arange(block.count, dtype=np.int32)
        paths = [request.paths[file] for file in block.files]
        ragged: dict[int, RaggedField] = {}
        for places in block.places:
            run = _RowsByFile(rows, places)
            if places.lengths:
                field = ragged[places.fields[0][0]] = run.allocate_ragged(block.count)
                for path, part in run.files(paths):
                    run.copy_ragged(self._file(path, run.last_offset(part)), part, field[1])
                run.verify_ragged(field[1])
            else:
                for path, part in run.files(paths):
                    data = self._file(path, run.last_offset(part))
                    _copy_fixed(data, run.rows[part], run.offsets[part], places.fields, block.widths, stored)
                run.verify_fixed(stored[places.fields[0][0]])
        pause()
        made = {
            number: _apply_stacked(chain, stored[number])
            for number, chain in enumerate(chains)
            if number not in ragged
        }
        for number, values in made.items():
            target, row_bytes = request.targets[number], values.nbytes // max(1, block.count)
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            if target is None:  # the block's rows are in several frames
                ragged[number] = np.full(block.count, row_bytes, np.int64), data
            else:
                _write_all(frame_fd, data.data, target[0] + first * row_bytes)
        return ragged

    def _file(self, path: str, last: int) -> npt.NDArray[np.uint8]:
        """Return the mapped bytes of a file. Maps it again if the mapping ends before the offset `last`,
        since the file may have grown. Raises SourceGoneError."""
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
        """Forget the mapping of a file, which may have grown: the next read maps it again."""
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


def _copy_fixed(
    data: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    fields: tuple[tuple[int, int], ...],
    widths: tuple[int, ...],
    stored: list[npt.NDArray[np.uint8]],
) -> None:
    """Copy fields of fixed width from one file. `fields`: (number, distance from the row's offset) of each.

    Fields that lie close together are read as one record per row.
    """
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


class _RowsByFile:
    """The rows of a block and where part of their fields are, sorted by file."""

    def __init__(self, rows: npt.NDArray[np.int32], places: FieldPlaces) -> None:
        files, offsets = (unpack_integers(each, rows.size) for each in (places.files, places.offsets))
        order = np.argsort(files, kind="stable")  # a radix sort, for narrow integers
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

    def last_offset(self, part: slice) -> int:
        """Return the greatest offset of the rows in one file, `part` of the arrays."""
        return int(self.offsets[part].max())

    def allocate_ragged(self, count: int) -> RaggedField:
        """Return the field of `count` rows with its lengths set and its values not yet copied. Raises
        BadSampleError if the values are too large."""
        lengths = np.zeros(count, np.int64)
        lengths[self.rows] = self._lengths
        total = int(lengths.sum())
        if total > _RAGGED_BYTES:
            raise BadSampleError(f"ragged values of {total} bytes")
        self._targets = (np.cumsum(lengths) - lengths)[self.rows]
        return lengths, np.empty(total, np.uint8)

    def verify_ragged(self, made: npt.NDArray[np.uint8]) -> None:
        """Compare the copied values with their checksums, where known. Raises SourceDamagedError."""
        if self._sums is not None:
            _verify(made, self._targets, self._targets + self._lengths, self._sums)

    def verify_fixed(self, stored: npt.NDArray[np.uint8]) -> None:
        """Compare the rows of a field with their checksums, where known. Raises SourceDamagedError."""
        if self._sums is not None:
            begins = self.rows.astype(np.int64) * stored.shape[1]
            _verify(stored.reshape(-1), begins, begins + stored.shape[1], self._sums)

    def copy_ragged(self, data: npt.NDArray[np.uint8], part: slice, values: npt.NDArray[np.uint8]) -> None:
        """Copy the ragged values in one file to their places in `values`. Raises SourceGoneError for bytes
        outside the file."""
        offsets, lengths, targets = self.offsets[part], self._lengths[part], self._targets[part]
        if int(offsets.min()) < 0 or int(self._ends[part].max()) > data.size:
            raise SourceGoneError("the file is shorter than the rows in it")
        single = np.ones(lengths.size, np.bool_)
        if lengths.size > _FEW:
            width = int(lengths[0])
            if 0 < width < _LONG and bool((lengths == width).all()):
                _cells_of(values, width)[targets] = _cells(data, offsets, width)
                return
            single = lengths >= _LONG
            _copy_by_size(data, values, offsets, lengths, targets, ~single & (lengths > 0))
        source, target = data.data, values.data
        places = zip(*(each[single].tolist() for each in (targets, offsets, lengths)), strict=True)
        for at, begin, length in places:
            target[at : at + length] = source[begin : begin + length]


def _copy_by_size(
    data: npt.NDArray[np.uint8],
    values: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.bool_],
) -> None:
    """Copy the chosen values, those of similar size together. A value of 2**(n-1) to 2**n - 1 bytes is copied
    as its first and its last 2**(n-1) bytes, which overlap."""
    classes = np.frexp(lengths)[1]  # n for lengths from 2**(n-1) to 2**n - 1
    for number in np.unique(classes[chosen]).tolist():
        rows, width = np.flatnonzero(classes == number), 1 << (number - 1)
        begins, ends = offsets[rows], targets[rows]
        cells = _cells_of(values, width)
        cells[ends] = _cells(data, begins, width)
        rest = lengths[rows] - width
        if rest.any():
            cells[ends + rest] = _cells(data, begins + rest, width)


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
    """Return `width` bytes at each of the offsets. Raises SourceGoneError for one outside the file."""
    if offsets.size and not 0 <= int(offsets.min()) <= int(offsets.max()) <= data.size - width:
        raise SourceGoneError("the file is shorter than the rows in it")
    if data.size < width:
        return np.zeros(0, f"V{width}")
    return _cells_of(data, width)[offsets]


def _cells_of(data: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.void]:
    """Return a view of the `width` bytes that begin at each byte of `data`.

    Void elements have no alignment, so numpy indexes the mapping itself; other types would copy all of it.
    """
    return np.ndarray((data.size - width + 1,), f"V{width}", data, 0, (1,))


def _apply_stacked(chain: OpChain, stored: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
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


def write_frames(block: RowBlock, fields: Mapping[int, RaggedField], fd: int) -> tuple[int, ...]:
    """Write the fields of a block, as `BlockCopier.copy` returns them, into its frames. Return the crc32c of
    each tensor, frame by frame, in the order of the fields' numbers."""
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


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        at, data = at + written, data[written:]
