"""Zarr v3 arrays cut into windows over any axes: every whole chunk (or inner chunk of a shard) is a sample.

Law: a sample is what is encoded together, so that nothing is decoded for another's sake. Chunks that reach
beyond the array hold values that are none, and are no samples. Chunks are numbered as the array's axes run,
the last one fastest, whatever the shards are. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from meshwire.documents import PlanError
from meshwire.zarrsources import (
    MAX_OBJECTS,
    MAX_ROW_BYTES,
    Places,
    key_numbers,
    parse_layout,
    read_shard_index,
)

if TYPE_CHECKING:
    from meshwire.columns import Integers
    from meshwire.frames import Buffer
    from meshwire.zarrsources import Layout

MAX_PIECES = 1 << 18  # of a shard
MAX_CHUNKS = 1 << 26


@dataclass(frozen=True)
class ChunkedArray:
    """An array whose samples are chunks of `shape`."""

    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.smallest

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Whole chunks along each axis."""
        return tuple(extent // chunk for extent, chunk in zip(self.layout.shape, self.shape, strict=True))

    @cached_property
    def _objects(self) -> tuple[int, ...]:
        """Stored objects along each axis."""
        return tuple(
            -(-extent // chunk) for extent, chunk in zip(self.layout.shape, self.layout.chunk, strict=True)
        )

    @cached_property
    def _each(self) -> tuple[int, ...]:
        """Chunks of a stored object along each axis."""
        return tuple(outer // inner for outer, inner in zip(self.layout.chunk, self.shape, strict=True))

    @property
    def rows(self) -> int:
        return math.prod(self.grid)

    @property
    def left_out(self) -> int:
        """Chunks that reach beyond the array."""
        every = (-(-extent // chunk) for extent, chunk in zip(self.layout.shape, self.shape, strict=True))
        return math.prod(every) - self.rows

    @property
    def chunk(self) -> int:
        return math.prod(self._each)

    @property
    def objects(self) -> int:
        return math.prod(self._objects)

    @property
    def index_bytes(self) -> int:
        return 16 * self.chunk + 4 * self.layout.index_crc if self.layout.inner else 0

    @property
    def index_end(self) -> bool:
        return self.layout.index_end

    def key(self, number: int) -> str:
        """Of a stored object, below the array."""
        return self.layout.lead + self.layout.separator.join(map(str, self._place(number)))

    def _place(self, number: int) -> list[int]:
        return [int(part) for part in np.unravel_index(number, self._objects)]

    def number(self, key: str) -> int | None:
        """The stored object that has this key below the array; None for what is none of its objects."""
        found = key_numbers(key, self.layout.lead, self.layout.separator, len(self._objects))
        if found is None or any(at >= count for at, count in zip(found, self._objects, strict=True)):
            return None
        return int(np.ravel_multi_index(found, self._objects))

    def _numbers(self, number: int, pieces: Integers) -> Integers:
        """The samples that these pieces of a stored object are; `rows` for those that are none."""
        inside = np.array(np.unravel_index(pieces, self._each), np.int64)
        firsts = np.array([at * each for at, each in zip(self._place(number), self._each, strict=True)])
        places = inside + firsts[:, None]
        whole = (places < np.array(self.grid)[:, None]).all(axis=0)
        found = np.full(pieces.size, self.rows, np.int64)
        found[whole] = np.ravel_multi_index(tuple(places[:, whole]), self.grid)
        return found

    def places(self, number: int, size: int, index: Buffer) -> Places:
        """Where the chunks of the stored object `number` lie in its `size` bytes, in its order; chunks that
        are not stored, or reach beyond the array, are left out. Raises ValueError."""
        if self.layout.inner:
            offsets, lengths = read_shard_index(size, index, self.chunk, checked=self.layout.index_crc)
        else:
            offsets, lengths = np.zeros(1, np.int64), np.array([size], np.int64)
        there = np.flatnonzero(offsets >= 0)
        wrong = np.flatnonzero(lengths[there] != self.row_bytes)
        if not self.layout.encodings and wrong.size:
            length = int(lengths[there][wrong[0]])
            raise ValueError(f"a chunk of {length} bytes where {self.row_bytes} should be")
        rows = self._numbers(number, there)
        kept = np.flatnonzero(rows < self.rows)
        return Places(rows[kept], offsets[there[kept]], lengths[there[kept]])


def parse_chunked(document: bytes, name: str) -> ChunkedArray:
    """Of an array's `zarr.json`. Raises PlanError, at `name`."""
    layout = parse_layout(document, name)
    if not all((*layout.chunk, *layout.smallest)) or len(layout.chunk) != len(layout.shape):
        raise PlanError(name, "chunks of nothing, or of another number of axes than the array")
    if any(outer % inner for outer, inner in zip(layout.chunk, layout.smallest, strict=True)):
        raise PlanError(name, "a shard does not hold a whole number of chunks along each axis")
    made = ChunkedArray(layout)
    if not made.rows:
        raise PlanError(name, f"an array of {list(layout.shape)} has no whole chunk of {list(made.shape)}")
    many = made.objects > MAX_OBJECTS or made.chunk > MAX_PIECES or made.objects * made.chunk > MAX_CHUNKS
    if made.row_bytes > MAX_ROW_BYTES or many:
        raise PlanError(name, "chunks of more than 1 GiB, or too many of them, or of stored objects")
    return made
