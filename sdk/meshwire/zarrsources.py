"""Zarr v3 arrays as sources of samples: where each row of the first axis lies in the stored objects.

Law: a row is read alone, so what is taken are chunks (or the inner chunks of a shard) of one row, encoded or
not, and plain chunks of any number of rows; what would have to be decoded for its neighbours' sake is refused
with what to do. Pure: metadata and shard indexes in, places out. As the Zarr v3 core specification has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshwire.crcs import crc32c
from meshwire.documents import PlanError, read_json, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.columns import Integers
    from meshwire.frames import Buffer

METADATA = "zarr.json"
ENCODINGS = ("gzip", "zstd", "crc32c")
MAX_ROW_BYTES = 1 << 30
MAX_CHUNK_ROWS = 1 << 24
MAX_OBJECTS = 1 << 22
MISSING = -1
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_SEPARATORS = {"default": "/", "v2": "."}


class Stored(Protocol):
    """An array as samples: `rows` of them, of `row_bytes`, `chunk` a stored object; `left_out` are none."""

    @property
    def rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def objects(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def index_end(self) -> bool: ...
    def key(self, number: int) -> str: ...
    def numbers(self, number: int) -> Integers: ...
    def places(self, size: int, index: Buffer) -> tuple[Integers, Integers]: ...


@dataclass(frozen=True, slots=True)
class SourceArray:
    """`rows` of shape `row`; `chunk` rows a stored object, of which a shard holds pieces of `inner` rows (0:
    no shard). `encodings` of a chunk or piece, in the order of encoding; `swapped`: big endian; `separator`
    and `lead` of the chunks' keys; `index_end`, `index_crc`: of a shard's index.
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
        """How many objects there are, if none is missing."""
        return -(-self.rows // self.chunk)

    @property
    def pieces(self) -> int:
        """Inner chunks a shard has; 1 without shards."""
        return self.chunk // self.inner if self.inner else 1

    @property
    def index_bytes(self) -> int:
        return 16 * self.pieces + 4 * self.index_crc if self.inner else 0

    def key(self, number: int) -> str:
        """Of a stored object, below the array."""
        numbers = [str(number), *("0" for _ in self.row)]
        return self.lead + self.separator.join(numbers)

    def numbers(self, number: int) -> Integers:
        """The rows of a stored object; those from `rows` on are none."""
        return number * self.chunk + np.arange(self.chunk, dtype=np.int64)

    def places(self, size: int, index: Buffer) -> tuple[Integers, Integers]:
        """(offsets, lengths) of the rows of one stored object of `size` bytes; MISSING where there is none.
        `index` are the bytes of a shard's. Raises ValueError for an object that lies."""
        if not self.inner:
            return self._rows_of(0, size, self.chunk)
        offsets, lengths = read_shard_index(size, index, self.pieces, checked=self.index_crc)
        each = [
            self._rows_of(*place, self.inner)
            for place in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]
        return np.concatenate([one for one, _ in each]), np.concatenate([two for _, two in each])

    def _rows_of(self, start: int, length: int, rows: int) -> tuple[Integers, Integers]:
        if start == MISSING:
            return np.full(rows, MISSING, np.int64), np.zeros(rows, np.int64)
        if rows == 1:
            return np.array([start], np.int64), np.array([length], np.int64)
        if length != rows * self.row_bytes:
            raise ValueError(f"a chunk of {length} bytes where {rows} rows of {self.row_bytes} should be")
        sizes = np.full(rows, self.row_bytes, np.int64)
        return start + np.arange(rows, dtype=np.int64) * self.row_bytes, sizes


def read_shard_index(size: int, index: Buffer, pieces: int, *, checked: bool) -> tuple[Integers, Integers]:
    """(offsets, lengths) of the pieces of a shard of `size` bytes; MISSING where there is none. Raises
    ValueError."""
    raw, wanted = bytes(index), 16 * pieces + 4 * checked
    if len(raw) != wanted:
        raise ValueError(f"a shard of {size} bytes has no room for its index of {wanted}")
    if checked and crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise ValueError("the shard's index does not have its checksum")
    pairs = np.frombuffer(raw[: 16 * pieces], "<u8").reshape(-1, 2)
    missing = pairs[:, 0] == np.uint64((1 << 64) - 1)
    pairs = np.where(missing[:, None], 0, pairs)
    if (pairs > size).any() or (pairs.sum(axis=1) > size).any():
        raise ValueError("the shard's index reaches beyond it")
    offsets = np.where(missing, MISSING, pairs[:, 0].astype(np.int64))
    return offsets, pairs[:, 1].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Layout:
    """What an array's metadata says of how it is stored: extents of the array, of a stored object and, where
    that is a shard, of its pieces; the rest as in `SourceArray`."""

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
        """What is encoded together."""
        return self.inner or self.chunk


def parse_array(document: bytes, name: str) -> SourceArray:
    """Of an array's `zarr.json`. Raises PlanError, at `name`, for what is none or cannot be read by rows."""
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
        raise PlanError(name, "rows of nothing or of more than 1 GiB, or too many rows a chunk, or chunks")
    return made


def parse_layout(document: bytes, name: str) -> Layout:
    """Of any array whose codecs are known here. Raises PlanError."""
    meta = read_json(document, name)
    try:
        return _layout(meta, name)
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(name, f"not the metadata of a Zarr v3 array: {shown(str(error))}") from error


def _layout(meta: Any, name: str) -> Layout:
    if meta["zarr_format"] != 3 or meta["node_type"] != "array":
        raise PlanError(name, "expected an array of Zarr v3")
    dtype, shape = meta["data_type"], _extents(meta["shape"])
    if dtype not in _DTYPES or not shape:
        raise PlanError(name, f"an array of {shown(dtype)} and {len(shape)} axes has no rows of numbers")
    if meta["chunk_grid"]["name"] != "regular":
        raise PlanError(name, "expected a regular chunk grid")
    chunk = _extents(meta["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, index = meta["codecs"], dict[str, Any]()
    inner: tuple[int, ...] = ()
    if codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        if len(codecs) > 1:
            raise PlanError(name, "a shard that is encoded as a whole cannot be read in parts")
        inner, codecs, index = _extents(settings["chunk_shape"]), settings["codecs"], settings
    smallest = inner or chunk
    if not chunk[0] or not smallest[0] or len(smallest) != len(chunk):
        raise PlanError(name, "chunks of no rows")
    swapped, encodings = _encodings(codecs, name)
    keys = meta["chunk_key_encoding"]
    separator = keys.get("configuration", {}).get("separator", _SEPARATORS[keys["name"]])
    ending = [codec["name"] for codec in index.get("index_codecs", ())]
    if separator not in ("/", ".") or ending[:1] not in ([], ["bytes"]):
        raise PlanError(name, "an index of shards, or keys, of an unknown kind")
    return Layout(
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
    if not all(type(item) is int and 0 <= item < 1 << 48 for item in value):
        raise ValueError("extents are integers from 0 on")
    return tuple(value)


def _encodings(codecs: Sequence[Any], name: str) -> tuple[bool, tuple[str, ...]]:
    first, *more = codecs
    wrong = [first["name"]] if first["name"] != "bytes" else []
    wrong += [codec["name"] for codec in more if codec["name"] not in ENCODINGS]
    if wrong:
        known = f"bytes, {', '.join(ENCODINGS)}"
        raise PlanError(name, f"the codec {shown(wrong[0])} is not known here; known: {known}")
    endian = first.get("configuration", {}).get("endian", "little")
    return endian == "big", tuple(codec["name"] for codec in more)


def row_numbers(arrays: Sequence[Stored]) -> int:
    """The samples that all arrays have. Raises PlanError when they differ."""
    counts = {array.rows for array in arrays}
    if len(counts) != 1:
        differing = " and ".join(map(str, sorted(counts)))
        what = "rows" if isinstance(arrays[0], SourceArray) else "chunks"
        raise PlanError("fields", f"the arrays have {differing} {what}; they must agree")
    return counts.pop()


def boundaries(arrays: Sequence[Stored]) -> list[int]:
    """Where shards of samples begin, and the end: the objects of the array with the largest rows."""
    main = max(arrays, key=lambda array: array.row_bytes)
    return [*range(0, main.rows, main.chunk), main.rows]
