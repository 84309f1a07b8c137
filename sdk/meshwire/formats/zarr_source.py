"""Zarr v3 arrays as sources of samples: where each row or chunk is in the stored objects.

Law: a sample is stored or encoded on its own: a chunk (or inner chunk of a shard) of one row, a row of an
uncompressed chunk, or a whole chunk. An array whose rows could be read only by decoding their neighbours is
rejected with advice. Chunks that extend beyond the array are not samples; chunks are numbered along the
array's axes, the last axis fastest, as in the Zarr v3 core specification.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.strict_json import PlanError, read_json, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer


METADATA = "zarr.json"
ENCODINGS = ("gzip", "zstd", "crc32c")
MAX_ROW_BYTES = 1 << 30
MAX_CHUNK_ROWS = 1 << 24
MAX_OBJECTS = 1 << 22
MAX_SHARD_PIECES = 1 << 20
MAX_AXES = 32
MAX_CODECS = 8
MISSING = -1
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
_SEPARATORS = {"default": "/", "v2": "."}


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
    pieces of `inner` rows (0: no shard). `encodings` of a chunk or piece, in order of encoding; `swapped`:
    big endian; `separator` and `lead` of the chunk keys; `index_end`, `index_crc`: of a shard's index.
    """

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


def key_numbers(key: str, lead: str, separator: str, axes: int) -> tuple[int, ...] | None:
    """Return the chunk coordinates in a stored object's key, one per axis, or None for any other key."""
    parts = key[len(lead) :].split(separator, axes) if key.startswith(lead) else []
    if len(parts) != axes or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    return tuple(map(int, parts))


def read_shard_index(size: int, index: Buffer, pieces: int, *, checked: bool) -> tuple[Integers, Integers]:
    """Return (offsets, lengths) of the pieces of a shard of `size` bytes, MISSING for absent pieces. Raises
    ValueError."""
    raw, wanted = bytes(index), 16 * pieces + 4 * checked
    if len(raw) != wanted:
        raise ValueError(f"a shard of {size} bytes is too small for its index of {wanted} bytes")
    if checked and crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise ValueError("the shard's index does not match its checksum")
    pairs = np.frombuffer(raw[: 16 * pieces], "<u8").reshape(-1, 2)
    missing = pairs[:, 0] == np.uint64((1 << 64) - 1)
    pairs = np.where(missing[:, None], 0, pairs)
    if (pairs > size).any() or (pairs.sum(axis=1) > size).any():
        raise ValueError("the shard's index refers beyond its end")
    if (
        float(pairs[:, 1].sum(dtype=np.float64)) > size
    ):  # otherwise a few bytes could be any number of samples
        raise ValueError("the shard's index has pieces that overlap")
    offsets = np.where(missing, MISSING, pairs[:, 0].astype(np.int64))
    return offsets, pairs[:, 1].astype(np.int64)


@dataclass(frozen=True, slots=True)
class ZarrLayout:
    """How an array is stored, from its metadata: shapes of the array, of a stored object and, if that is a
    shard, of its pieces; the rest as in `SourceArray`."""

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    inner: tuple[int, ...]
    encodings: tuple[str, ...]
    swapped: bool
    lead: str
    separator: str
    index_end: bool
    index_crc: bool

    @property
    def smallest(self) -> tuple[int, ...]:
        """The shape of the unit that is encoded together."""
        return self.inner or self.chunk


def parse_array(document: bytes, name: str) -> SourceArray:
    """Parse an array's `zarr.json`. Raises PlanError at `name` if it is invalid or the array cannot be read
    by rows."""
    found = parse_layout(document, name)
    shape, chunk, inner, smallest = found.shape, found.chunk, found.inner, found.smallest
    if chunk[1:] != shape[1:] or smallest[1:] != shape[1:] or (inner and chunk[0] % inner[0]):
        whole = ", ".join(map(str, ("n", *shape[1:])))
        raise PlanError(
            name,
            f"a row is cut into several chunks; write it with chunks of [{whole}], or open it with "
            "kind='chunks' and the op zarr_chunk",
        )
    if found.encodings and smallest[0] != 1:
        raise PlanError(
            name,
            f"{smallest[0]} rows are encoded together ({', '.join(found.encodings)}); write it with chunks "
            "(or inner chunks of shards) of one row, or without compression, or open it with kind='chunks'",
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


def parse_layout(document: bytes, name: str) -> ZarrLayout:
    """Parse the metadata of any array whose codecs are supported. Raises PlanError."""
    meta = read_json(document, name)
    try:
        return _layout(meta, name)
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(name, f"not the metadata of a Zarr v3 array: {shown_value(str(error))}") from error


def _layout(meta: Any, name: str) -> ZarrLayout:
    if meta["zarr_format"] != 3 or meta["node_type"] != "array":
        raise PlanError(name, "expected a Zarr v3 array")
    dtype, shape = meta["data_type"], _extents(meta["shape"])
    if dtype not in _DTYPES or not shape:
        raise PlanError(
            name, f"an array of {shown_value(dtype)} and {len(shape)} axes has no rows of numbers"
        )
    if meta["chunk_grid"]["name"] != "regular":
        raise PlanError(name, "expected a regular chunk grid")
    chunk = _extents(meta["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, index = meta["codecs"], dict[str, Any]()
    inner: tuple[int, ...] = ()
    if codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        if len(codecs) > 1:
            raise PlanError(
                name,
                "a shard that is encoded as a whole cannot be read in parts; use codecs inside it only",
            )
        inner, codecs, index = _extents(settings["chunk_shape"]), settings["codecs"], settings
    smallest = inner or chunk
    if not chunk[0] or not smallest[0] or len(smallest) != len(chunk):
        raise PlanError(name, "the chunks have no rows")
    swapped, encodings = _encodings(codecs, name)
    keys = meta["chunk_key_encoding"]
    separator = keys.get("configuration", {}).get("separator", _SEPARATORS[keys["name"]])
    ending = [codec["name"] for codec in index.get("index_codecs", ())]
    if separator not in ("/", ".") or ending[:1] not in ([], ["bytes"]):
        raise PlanError(name, "an unknown kind of shard index or chunk key")
    return ZarrLayout(
        dtype,
        shape,
        chunk,
        inner,
        encodings,
        swapped,
        f"c{separator}" if keys["name"] == "default" else "",
        separator,
        index.get("index_location", "end") == "end",
        "crc32c" in ending,
    )


def _extents(value: Any) -> tuple[int, ...]:
    if len(value) > MAX_AXES or not all(type(item) is int and 0 <= item < 1 << 48 for item in value):
        raise ValueError(f"extents must be integers of 0 or more, for at most {MAX_AXES} axes")
    return tuple(value)


def _encodings(codecs: Sequence[Any], name: str) -> tuple[bool, tuple[str, ...]]:
    first, *more = codecs
    if len(codecs) > MAX_CODECS:
        raise PlanError(name, f"{len(codecs)} codecs; a chain may have at most {MAX_CODECS}")
    wrong = [first["name"]] if first["name"] != "bytes" else []
    wrong += [codec["name"] for codec in more if codec["name"] not in ENCODINGS]
    if wrong:
        known = f"bytes, {', '.join(ENCODINGS)}"
        raise PlanError(name, f"the codec {shown_value(wrong[0])} is not supported; supported: {known}")
    endian = first.get("configuration", {}).get("endian", "little")
    return endian == "big", tuple(codec["name"] for codec in more)


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
