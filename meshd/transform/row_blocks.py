"""Blocks of rows whose fields are copied as arrays: no object, message or call a row.

Law: a block gives the bytes that rendering its rows one by one gives, or it fails as a whole and its rows are
rendered one by one, which finds the row at fault. Only ops that draw nothing and treat each row alone are
applied to a block (`COLUMN_OPS`).
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.source_files import PROC_PREFIX, SourceGoneError
from meshwire.plan.keyed_random import KeyedRandom

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshd.transform.messages import FieldPlaces, RenderRequest, RowBlock
    from meshd.transform.op_chain import OpChain

FIRST_OP: Final = ("frombuffer", "1")
COLUMN_OPS: Final = frozenset({("cast", "1"), ("one_hot", "1"), ("gather_columns", "1")})
"""Ops, with their versions, whose result for stacked rows is the stack of their results."""
_MAPPED_FILES: Final = 64
_SPARSE: Final = 4  # fields in a span of more than so many times their bytes are copied one by one
_SHORT: Final = 16  # bytes of a ragged value up to which indexing each byte is faster than a slice
_RAGGED_BYTES: Final = 512 << 20
_NO_DRAWS = KeyedRandom(0, 0, 0)


class BlockCopier:
    """Copies blocks into frames; keeps recent files mapped. One per connection of a transform process."""

    def __init__(self, limit: int = _MAPPED_FILES) -> None:
        self._limit = limit
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

        Returns for each ragged field, by its number, the bytes of each row, and all of them. Raises
        SourceGoneError; BadSampleError, or any error of an op, if a row has to be looked at.
        """
        stored = [np.zeros((block.count, width), np.uint8) for width in block.widths]
        ragged = {number: _Run(block.count) for number, width in enumerate(block.widths) if not width}
        for part in block.parts:
            rows = np.frombuffer(part.rows, "<i4")
            ends = [np.frombuffer(places.offsets, "<i8").max(initial=0) for places in part.places]
            data = self._file(request.paths[part.path], int(max(ends)))
            for places in part.places:
                if places.lengths:
                    ragged[places.fields[0][0]].add(data, rows, places)
                else:
                    _gather(data, rows, places, block.widths, stored)
        pause()
        made = {
            number: _stacked(chain, stored[number])
            for number, chain in enumerate(chains)
            if number not in ragged
        }
        for number, values in made.items():
            target = request.targets[number]
            assert target is not None
            row_bytes = values.nbytes // max(1, block.count)
            _write(frame_fd, np.ascontiguousarray(values), target[0] + first * row_bytes)
        return {number: run.joined() for number, run in ragged.items()}

    def _file(self, path: str, last: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a file, mapped, up to the offset `last` at least if it has grown to that.

        Raises SourceGoneError.
        """
        found = self._mapped.get(path)
        if found is None or last >= found.size:
            if path.startswith(PROC_PREFIX):
                raise SourceGoneError(f"{path} is the memory of another process")
            found = self._mapped[path] = _map(path)
            if len(self._mapped) > self._limit:
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
    places: FieldPlaces,
    widths: tuple[int, ...],
    stored: list[npt.NDArray[np.uint8]],
) -> None:
    offsets = np.frombuffer(places.offsets, "<i8")
    low = min(delta for _, delta in places.fields)
    span = max(delta + widths[field] for field, delta in places.fields) - low
    if span > _SPARSE * sum(widths[field] for field, _ in places.fields):
        for field, delta in places.fields:
            stored[field].view(f"V{widths[field]}")[rows, 0] = _cells(data, offsets + delta, widths[field])
        return
    records = _cells(data, offsets + low, span)
    whole = records.view(np.uint8).reshape(rows.size, span)
    for field, delta in places.fields:
        width = widths[field]
        cell = np.ndarray((rows.size,), f"V{width}", whole, delta - low, (span,))
        stored[field].view(f"V{width}")[rows, 0] = cell


class _Run:
    """The values of a ragged field of a block, in the order of its rows."""

    def __init__(self, count: int) -> None:
        self._lengths = np.zeros(count, np.int64)
        self._parts: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []

    def add(self, data: npt.NDArray[np.uint8], rows: npt.NDArray[np.int32], places: FieldPlaces) -> None:
        """Add some rows. Raises SourceGoneError for bytes outside the file."""
        offsets, lengths = np.frombuffer(places.offsets, "<i8"), np.frombuffer(places.lengths, "<i8")
        if rows.size and (int(offsets.min()) < 0 or int((offsets + lengths).max()) > data.size):
            raise SourceGoneError("the file is shorter than the rows in it")
        self._lengths[rows] = lengths
        self._parts.append((data, rows, offsets))

    def joined(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the bytes of each row, and all of them. Raises BadSampleError if they are too many."""
        total = int(self._lengths.sum())
        if total > _RAGGED_BYTES:
            raise BadSampleError(f"ragged values of {total} bytes")
        ends = np.cumsum(self._lengths)
        made = np.empty(total, np.uint8)
        room = made.data
        for data, rows, offsets in self._parts:
            lengths, places = self._lengths[rows], (ends - self._lengths)[rows]
            if total > _SHORT * self._lengths.size:
                source = data.data
                for at, begin, length in zip(
                    places.tolist(), offsets.tolist(), lengths.tolist(), strict=True
                ):
                    room[at : at + length] = source[begin : begin + length]
                continue
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            made[np.repeat(places, lengths) + within] = data[np.repeat(offsets, lengths) + within]
        return self._lengths, made


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


def _write(fd: int, values: npt.NDArray[Any], at: int) -> None:
    data = values.reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(fd, data, at)
        at, data = at + written, data[written:]
