"""Zarr v3 arrays as sources of samples: where each row or chunk is in the stored objects.

Law: a sample is stored or encoded on its own: a chunk (or inner chunk of a shard) of one row, a row of an
uncompressed chunk, or a whole chunk. An array whose rows could be read only by decoding their neighbours is
rejected with advice. Chunks that extend beyond the array are not samples; chunks are numbered along the
array's axes, the last axis fastest, as in the Zarr v3 core specification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from meshwire.formats.zarr_layout import MISSING, key_numbers, parse_layout, read_shard_index
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.formats.zarr_layout import ZarrLayout
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer


METADATA = "zarr.json"
MAX_ROW_BYTES = 1 << 30
MAX_CHUNK_ROWS = 1 << 24
MAX_OBJECTS = 1 << 22
MAX_SHARD_PIECES = 1 << 20


class StoredArray(Protocol):
    """An array as a sequence of samples: `rows` samples of `row_bytes`, `chunk` per stored object;
    `left_out` chunks are not samples."""

    @property
    def rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def index_end(self) -> bool: ...
    def object_number(self, key: str) -> int | None: ...
    def locate_rows(self, number: int, size: int, index: Buffer) -> RowLocations: ...


class RowLocations(NamedTuple):
    """The samples that a stored object contains: int64[n] each."""

    rows: Integers
    offsets: Integers
    lengths: Integers


@dataclass(frozen=True, slots=True)
class SourceArray:
    """An array with `rows` samples of shape `row`; a stored object has `chunk` rows, and if it is a shard,
    pieces of `inner` rows (0: no shard). The rest is as in `ZarrLayout`."""

    dtype: str
    rows: int
    row: tuple[int, ...]
    chunk: int
    inner: int
    encodings: tuple[str, ...]
    swapped: bool
    lead: str
    separator: str
    index_end: bool = True
    index_crc: bool = True

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * np.dtype(self.dtype).itemsize

    @property
    def left_out(self) -> int:
        return 0

    @property
    def objects(self) -> int:
        """The number of stored objects, if none is missing."""
        return -(-self.rows // self.chunk)

    @property
    def pieces(self) -> int:
        """Inner chunks per shard; 1 without shards."""
        return self.chunk // self.inner if self.inner else 1

    @property
    def index_bytes(self) -> int:
        return 16 * self.pieces + 4 * self.index_crc if self.inner else 0

    def object_key(self, number: int) -> str:
        """Return the key of a stored object, relative to the array."""
        numbers = [str(number), *("0" for _ in self.row)]
        return self.lead + self.separator.join(numbers)

    def object_number(self, key: str) -> int | None:
        """Return the number of the stored object with this key relative to the array, or None if it is not
        one of its objects."""
        found = key_numbers(key, self.lead, self.separator, 1 + len(self.row))
        return None if found is None or found[0] >= self.objects or any(found[1:]) else found[0]

    def locate_rows(self, number: int, size: int, index: Buffer) -> RowLocations:
        """Locate the rows of the stored object `number` in its `size` bytes; rows that are not stored or
        are beyond the array are left out. `index`: the bytes of a shard's index. Raises ValueError for an
        inconsistent object."""
        if self.inner:
            starts, sizes = read_shard_index(size, index, self.pieces, checked=self.index_crc)
        else:
            starts, sizes = np.zeros(1, np.int64), np.array([size], np.int64)
        there = np.flatnonzero(starts != MISSING)
        starts, sizes, each = starts[there], sizes[there], self.inner or self.chunk
        if each > 1:
            self._check_sizes(sizes, each)
            sizes = np.full(there.size * each, self.row_bytes, np.int64)
        within = np.arange(each if there.size else 0, dtype=np.int64)
        rows = (number * self.chunk + there[:, None] * each + within).ravel()
        offsets = (starts[:, None] + within * self.row_bytes).ravel()
        inside = rows < self.rows
        return RowLocations(rows[inside], offsets[inside], sizes[inside])

    def _check_sizes(self, sizes: Integers, rows: int) -> None:
        wrong = np.flatnonzero(sizes != rows * self.row_bytes)
        if wrong.size:
            length = int(sizes[wrong[0]])
            raise ValueError(f"a chunk has {length} bytes instead of {rows} rows of {self.row_bytes} bytes")


def parse_array(document: bytes, name: str) -> SourceArray:
    """Parse an array's `zarr.json`. Raises PlanError at `name` if it is invalid or the array cannot be read
    by rows."""
    found = parse_layout(document, name)
    shape, chunk, inner, smallest = found.shape, found.chunk, found.inner, found.smallest
    if chunk[1:] != shape[1:] or smallest[1:] != shape[1:] or (inner and chunk[0] % inner[0]):
        whole = ", ".join(map(str, ("n", *shape[1:])))
        raise PlanError(
            name,
            "a row is cut into several chunks; open it with mesh.open_zarr, or with kind='chunks' and the op "
            f"zarr_chunk, or write it with chunks of [{whole}]",
        )
    if found.encodings and smallest[0] != 1:
        raise PlanError(
            name,
            f"{smallest[0]} rows are encoded together ({', '.join(found.encodings)}); open it with "
            "mesh.open_zarr, or with kind='chunks', or write it with chunks (or inner chunks of shards) of "
            "one row, or without compression",
        )
    made = SourceArray(
        found.dtype,
        shape[0],
        shape[1:],
        chunk[0],
        inner[0] if inner else 0,
        found.encodings,
        found.swapped,
        found.lead,
        found.separator,
        found.index_end,
        found.index_crc,
    )
    if not 1 <= made.row_bytes <= MAX_ROW_BYTES or made.objects > MAX_OBJECTS or chunk[0] > MAX_CHUNK_ROWS:
        raise PlanError(
            name, "rows that are empty or larger than 1 GiB, or too many chunks or rows per chunk"
        )
    if made.pieces > MAX_SHARD_PIECES:
        raise PlanError(name, f"shards of {made.pieces} chunks; a shard may have at most {MAX_SHARD_PIECES}")
    return made


def row_numbers(arrays: Sequence[StoredArray]) -> int:
    """Return the common number of samples of all arrays. Raises PlanError if they differ."""
    counts = {array.rows for array in arrays}
    if len(counts) != 1:
        differing = " and ".join(map(str, sorted(counts)))
        what = "rows" if isinstance(arrays[0], SourceArray) else "chunks"
        raise PlanError("fields", f"the arrays have {differing} {what}; they must have the same number")
    return counts.pop()


def shard_starts(arrays: Sequence[StoredArray], kept: Integers) -> Integers:
    """Return the shard boundaries of the samples `kept` (rising row numbers): a shard is the samples in one
    object of the array with the largest rows."""
    main = max(arrays, key=lambda array: array.row_bytes)
    begins = np.flatnonzero(np.diff(kept // main.chunk, prepend=-1))
    return np.append(begins, kept.size).astype(np.int64)


MAX_PIECES = 1 << 18  # per shard
MAX_CHUNKS = 1 << 26


@dataclass(frozen=True)
class ChunkedArray:
    """An array whose samples are chunks of `shape`."""

    layout: ZarrLayout

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
        """Chunks per stored object along each axis."""
        return tuple(outer // inner for outer, inner in zip(self.layout.chunk, self.shape, strict=True))

    @property
    def rows(self) -> int:
        return math.prod(self.grid)

    @property
    def left_out(self) -> int:
        """Chunks that extend beyond the array."""
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

    def object_key(self, number: int) -> str:
        """Return the key of a stored object, relative to the array."""
        return self.layout.lead + self.layout.separator.join(map(str, self._place(number)))

    def _place(self, number: int) -> list[int]:
        return [int(part) for part in np.unravel_index(number, self._objects)]

    def object_number(self, key: str) -> int | None:
        """Return the number of the stored object with this key relative to the array, or None if it is not
        one of its objects."""
        found = key_numbers(key, self.layout.lead, self.layout.separator, len(self._objects))
        if found is None or any(at >= count for at, count in zip(found, self._objects, strict=True)):
            return None
        return int(np.ravel_multi_index(found, self._objects))

    def _numbers(self, number: int, pieces: Integers) -> Integers:
        """Return the sample numbers of these pieces of a stored object; `rows` for pieces that are not
        samples."""
        inside = np.array(np.unravel_index(pieces, self._each), np.int64)
        firsts = np.array([at * each for at, each in zip(self._place(number), self._each, strict=True)])
        places = inside + firsts[:, None]
        whole = (places < np.array(self.grid)[:, None]).all(axis=0)
        found = np.full(pieces.size, self.rows, np.int64)
        found[whole] = np.ravel_multi_index(tuple(places[:, whole]), self.grid)
        return found

    def locate_rows(self, number: int, size: int, index: Buffer) -> RowLocations:
        """Locate the chunks of the stored object `number` in its `size` bytes, in its order; chunks that
        are not stored or extend beyond the array are left out. Raises ValueError."""
        if self.layout.inner:
            offsets, lengths = read_shard_index(size, index, self.chunk, checked=self.layout.index_crc)
        else:
            offsets, lengths = np.zeros(1, np.int64), np.array([size], np.int64)
        there = np.flatnonzero(offsets >= 0)
        wrong = np.flatnonzero(lengths[there] != self.row_bytes)
        if not self.layout.encodings and wrong.size:
            length = int(lengths[there][wrong[0]])
            raise ValueError(f"a chunk has {length} bytes instead of {self.row_bytes}")
        rows = self._numbers(number, there)
        kept = np.flatnonzero(rows < self.rows)
        return RowLocations(rows[kept], offsets[there[kept]], lengths[there[kept]])


def parse_chunked(document: bytes, name: str) -> ChunkedArray:
    """Parse an array's `zarr.json` for reading by chunks. Raises PlanError at `name`."""
    layout = parse_layout(document, name)
    if not all((*layout.chunk, *layout.smallest)) or len(layout.chunk) != len(layout.shape):
        raise PlanError(name, "the chunks are empty, or have another number of axes than the array")
    if any(outer % inner for outer, inner in zip(layout.chunk, layout.smallest, strict=True)):
        raise PlanError(name, "a shard does not hold a whole number of chunks along each axis")
    made = ChunkedArray(layout)
    if not made.rows:
        raise PlanError(
            name, f"an array of shape {list(layout.shape)} has no whole chunk of shape {list(made.shape)}"
        )
    many = made.objects > MAX_OBJECTS or made.chunk > MAX_PIECES or made.objects * made.chunk > MAX_CHUNKS
    if made.row_bytes > MAX_ROW_BYTES or many:
        raise PlanError(name, "chunks larger than 1 GiB, or too many chunks or stored objects")
    return made
