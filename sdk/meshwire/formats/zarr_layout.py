"""How a Zarr v3 array is stored: its metadata, the keys of its objects, and the index of a shard.

Law: an array whose codecs or chunk grid are not supported is rejected, and so is a shard index that does not
fit its shard. https://zarr-specs.readthedocs.io/en/latest/v3/core/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.strict_json import PlanError, read_json, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer


ENCODINGS = ("gzip", "zstd", "crc32c")
MAX_AXES = 32
MAX_CODECS = 8
MISSING = -1
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
_SEPARATORS = {"default": "/", "v2": "."}


@dataclass(frozen=True, slots=True)
class ZarrLayout:
    """How an array is stored, from its metadata: shapes of the array, of a stored object and, if that is a
    shard, of its pieces. `encodings` of a chunk or piece, in order of encoding; `swapped`: big endian;
    `separator` and `lead` of the chunk keys; `index_end`, `index_crc`: of a shard's index."""

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
        raise PlanError(
            name,
            f"the codec {shown_value(wrong[0])} is not supported; supported: {known}; with mesh.open_zarr "
            "also blosc and others",
        )
    endian = first.get("configuration", {}).get("endian", "little")
    return endian == "big", tuple(codec["name"] for codec in more)


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
