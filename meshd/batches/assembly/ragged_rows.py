"""RaggedRows: where the bytes of a field's rows are, in files that transform processes have filled.

Law: rows are added by their numbers, or as runs of rows that follow each other in a file; they are read in
order, with as few reads as the runs allow.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.transform.messages import unpack_integers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from meshd.transform.renderer import RaggedPart

_CHUNK: Final = 1 << 20


class RaggedRows:
    """The rows of one field of a frame; each has no bytes until it is set.

    `lengths`: int64[n], bytes of each row.
    """

    def __init__(self, count: int) -> None:
        self.lengths = np.zeros(count, np.int64)
        self._offsets = np.zeros(count, np.int64)
        self._files = np.full(count, -1, np.int64)
        self._shapes: dict[int, tuple[int, ...]] = {}
        # So many rows, from the first one on, follow each other in one file, up to this offset; -1: unknown.
        self._joined, self._end = 0, 0

    def __repr__(self) -> str:
        return f"<RaggedRows, {self.nbytes} bytes of {self.lengths.size} rows>"

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def set_row(self, row: int, fd: int, offset: int, length: int, shape: tuple[int, ...]) -> None:
        """Set a row to `length` bytes at `offset` of a file."""
        self.lengths[row], self._offsets[row], self._files[row] = length, offset, fd
        self._shapes[row] = shape
        self._joined = -1

    def set_run(self, first: int, fd: int, offset: int, lengths: npt.NDArray[np.int64]) -> None:
        """Set consecutive rows, of one axis, to bytes that follow each other from `offset` of a file on."""
        rows = slice(first, first + lengths.size)
        follows = self._joined == first and (not first or (self._files[first - 1], self._end) == (fd, offset))
        self.lengths[rows], self._files[rows] = lengths, fd
        self._offsets[rows] = offset + np.cumsum(lengths) - lengths
        self._joined, self._end = rows.stop if follows else -1, offset + int(lengths.sum())

    def clear_row(self, row: int) -> None:
        """Set a row to no bytes."""
        self.lengths[row], self._files[row] = 0, -1
        self._shapes.pop(row, None)
        self._joined = -1

    def take(self, kept: npt.NDArray[np.int64]) -> RaggedRows:
        """Return these rows."""
        taken = RaggedRows(kept.size)
        taken.lengths, taken._offsets = self.lengths[kept], self._offsets[kept]
        taken._files, taken._joined = self._files[kept], -1
        taken._shapes = {
            place: self._shapes[row] for place, row in enumerate(kept.tolist()) if row in self._shapes
        }
        return taken

    @property
    def _is_joined(self) -> bool:
        """Whether all rows are known to follow each other in one file."""
        return self._joined == self.lengths.size

    def shapes(self, ndim: int) -> npt.NDArray[np.int64]:
        """Return int64[n, ndim], the shape of each row."""
        found = np.zeros((self.lengths.size, ndim), np.int64)
        for row, shape in self._shapes.items():
            found[row] = shape
        return found

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of all rows in order. Raises EOFError for a file that is shorter than its rows."""
        held: list[bytes] = []
        size = 0
        for fd, offset, length in self._runs():
            for at in range(0, length, _CHUNK):
                held.append(_read(fd, offset + at, min(_CHUNK, length - at)))
                size += len(held[-1])
                if size >= _CHUNK:
                    yield b"".join(held)
                    held, size = [], 0
        if held:
            yield b"".join(held)

    def _runs(self) -> Sequence[tuple[int, int, int]]:
        """Return (file, offset, bytes) of rows that follow each other in a file."""
        if self._is_joined and self.lengths.size:
            size = self.nbytes
            return [(int(self._files[0]), int(self._offsets[0]), size)] if size else []
        rows = np.flatnonzero(self.lengths)
        if not rows.size:
            return []
        files, offsets, lengths = self._files[rows], self._offsets[rows], self.lengths[rows]
        apart = (files[1:] != files[:-1]) | (offsets[1:] != offsets[:-1] + lengths[:-1])
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        sizes = np.add.reduceat(lengths, starts)
        return list(zip(files[starts].tolist(), offsets[starts].tolist(), sizes.tolist(), strict=True))


def set_copied(columns: Sequence[RaggedRows], part: RaggedPart) -> None:
    """Set the rows of blocks that were copied to their bytes; `columns`, by the numbers of their fields."""
    offset, each = 0, len(part.columns) // max(1, len(part.rows))
    for number, column in enumerate(part.columns if part.rows else ()):
        lengths = unpack_integers(column.run, column.count).astype(np.int64)
        first = part.rows[number // each]  # a block has the columns that follow each other
        columns[column.field].set_run(first, part.fd, offset, lengths)
        offset += int(lengths.sum())


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise EOFError("a scratch file is shorter than its transform process reported")
    return data
