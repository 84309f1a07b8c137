"""Metadata of Zarr arrays of versions 2 and 3, in one form: shape, chunks, codecs, dimensions, attributes.

Law: what a reader would have to guess is refused by name. The codecs of version 3 are given as the
numcodecs configurations of version 2, so that one decoder serves both.
https://zarr-specs.readthedocs.io/en/latest/v3/core/ and …/v2/v2.0.html
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Document = dict[str, Any]
MAX_AXES: Final = 32
MAX_CODECS: Final = 8
MAX_CHUNK_BYTES: Final = 1 << 30
_COMPRESSORS = ("zlib", "gzip", "zstd", "bz2", "lzma", "blosc", "lz4", "crc32c_end", "grib")
_FILTERS = ("shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits")
CODECS: Final = frozenset([*_COMPRESSORS, *_FILTERS, "crc32", "adler32", "fletcher32", "jenkins_lookup3"])
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "M": (8,), "m": (8,)}
_V2_TYPE = re.compile(r"([<>|])([biufMm])([0-9]{1,2})(\[[^\]]*\])?")
_NAMED_FILLS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SAME_IN_V3 = ("gzip", "zstd", "blosc")


@dataclass(frozen=True, slots=True)
class ZarrVariable:
    """An array. `dtype`: of its stored numbers, with byte order ("<f4"); `chunk`: what is encoded together;
    `shard`: the shape of a stored object, equal to `chunk` without shards; `axes`: the stored order of the
    axes; `codecs`: numcodecs configurations in order of encoding; `fill`: of chunks that are not stored.

    `dims`: names of the axes; `attributes`: the user's. Of shards: whether their index is at the end, and has
    a checksum.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    axes: tuple[int, ...]
    codecs: tuple[Document, ...]
    fill: float | int | None
    dims: tuple[str, ...]
    attributes: Mapping[str, Any]
    lead: str
    separator: str
    masks_fill: bool = False
    """Whether xarray takes `fill` for missing values: of version 2, unless `_FillValue` says it."""
    index_end: bool = True
    index_crc: bool = True

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize

    def object_key(self, place: Sequence[int]) -> str:
        """Return the key of a stored object, relative to the array, from its place in the grid."""
        return self.lead + self.separator.join(map(str, place))


def parse_variable(document: bytes | str, attributes: bytes | str | None, name: str) -> ZarrVariable:
    """Parse `zarr.json`, or `.zarray` with the text of its `.zattrs`. Raises PlanError at `name`."""
    try:
        meta = json.loads(document)
        if meta.get("zarr_format") == 2:
            found = _version_2(meta, json.loads(attributes) if attributes else {}, name)
        else:
            found = _version_3(meta, name)
        _check(found, name)
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(name, f"not the metadata of a Zarr array: {shown_value(str(error))}") from error
    return found


def _check(found: ZarrVariable, name: str) -> None:
    if not found.shape:
        raise PlanError(name, "it is a single number without axes: no part of a window")
    if len(found.codecs) > MAX_CODECS:
        raise PlanError(name, f"{len(found.codecs)} codecs; a chain may have at most {MAX_CODECS}")
    unknown = next((codec["id"] for codec in found.codecs if codec["id"] not in CODECS), None)
    if unknown is not None:
        known = ", ".join(sorted(CODECS - {"crc32c_end"}))
        raise PlanError(
            name, f"the codec {shown_value(unknown)} is not supported; supported: crc32c, {known}"
        )
    if not len(found.shape) == len(found.chunk) == len(found.dims) or 0 in (*found.chunk, *found.shape):
        raise PlanError(name, "the chunks are empty, or have another number of axes than the array")
    if any(outer % inner for outer, inner in zip(found.shard, found.chunk, strict=True)):
        raise PlanError(name, "a shard does not hold a whole number of chunks along each axis")
    if not 1 <= found.chunk_bytes <= MAX_CHUNK_BYTES:
        raise PlanError(name, "chunks larger than 1 GiB")


def _version_2(meta: Document, attributes: Document, name: str) -> ZarrVariable:
    kind = meta["dtype"]
    match = _V2_TYPE.fullmatch(kind) if isinstance(kind, str) else None
    if match is None or int(match[3]) not in _SIZES[match[2]]:
        raise PlanError(name, f"the type {shown_value(kind)} has no numbers")
    order, letter, size, _ = match.groups()
    shape = _extents(meta["shape"])
    codecs = [*(meta.get("filters") or []), *([meta["compressor"]] if meta["compressor"] else [])]
    dims = attributes.get("_ARRAY_DIMENSIONS")
    forward = tuple(range(len(shape)))
    return ZarrVariable(
        ("<" if order == "|" else order) + {"M": "i", "m": "i"}.get(letter, letter) + size,
        shape,
        _extents(meta["chunks"]),
        _extents(meta["chunks"]),
        forward[::-1] if meta.get("order", "C") == "F" else forward,
        tuple({**codec, "id": str(codec["id"])} for codec in codecs),
        _fill(meta.get("fill_value"), name),
        _dims(dims, len(shape)),
        attributes,
        "",
        str(meta.get("dimension_separator", ".")),
        masks_fill=dims is not None and letter != "b",
    )


def _version_3(meta: Document, name: str) -> ZarrVariable:
    if meta["zarr_format"] != 3 or meta["node_type"] != "array":
        raise PlanError(name, "expected an array of Zarr version 2 or 3")
    kind, shape = meta["data_type"], _extents(meta["shape"])
    dtype = np.dtype(kind) if isinstance(kind, str) and not kind.startswith(("r", "complex")) else None
    if dtype is None or dtype.kind not in "biuf":
        raise PlanError(name, f"the type {shown_value(kind)} has no numbers")
    if meta["chunk_grid"]["name"] != "regular":
        raise PlanError(name, "expected a regular chunk grid")
    shard = chunk = _extents(meta["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, index = meta["codecs"], {}
    if codecs[0]["name"] == "sharding_indexed":
        index = codecs[0]["configuration"]
        if len(codecs) > 1:
            raise PlanError(name, "a shard that is encoded as a whole cannot be read in parts")
        chunk, codecs = _extents(index["chunk_shape"]), index["codecs"]
    axes, order, chain = _chain(codecs, len(shape), name)
    keys = meta["chunk_key_encoding"]
    separator = keys.get("configuration", {}).get("separator", "/" if keys["name"] == "default" else ".")
    ending = [codec["name"] for codec in index.get("index_codecs", ())]
    if separator not in ("/", ".") or ending[:1] not in ([], ["bytes"]):
        raise PlanError(name, "an unknown kind of shard index or chunk key")
    return ZarrVariable(
        order + dtype.str[1:],
        shape,
        chunk,
        shard,
        axes,
        chain,
        _fill(meta.get("fill_value"), name),
        _dims(meta.get("dimension_names"), len(shape)),
        meta.get("attributes", {}),
        f"c{separator}" if keys["name"] == "default" else "",
        separator,
        index_end=index.get("index_location", "end") == "end",
        index_crc="crc32c" in ending,
    )


def _chain(
    codecs: Sequence[Document], axes: int, name: str
) -> tuple[tuple[int, ...], str, tuple[Document, ...]]:
    """Return the order of axes, the byte order, and the codecs, of version 3 as those of version 2."""
    permutation, order, found = tuple(range(axes)), "<", list[Document]()
    for codec in codecs:
        kind, settings = str(codec["name"]), dict(codec.get("configuration", {}))
        if kind == "transpose":
            permutation = tuple(int(axis) for axis in settings["order"])
            if sorted(permutation) != list(range(axes)) or found:
                raise PlanError(name, "a transposition that is not the first codec, or of other axes")
        elif kind == "bytes":
            order = ">" if settings.get("endian", "little") == "big" else "<"
        elif kind == "crc32c":
            found.append({"id": "crc32c_end"})
        elif kind in _SAME_IN_V3:
            found.append({"id": kind})
        else:
            found.append({**settings, "id": kind.removeprefix("numcodecs.")})
    return permutation, order, tuple(found)


def _extents(value: Any) -> tuple[int, ...]:
    if len(value) > MAX_AXES or not all(type(item) is int and 0 <= item < 1 << 48 for item in value):
        raise ValueError(f"extents must be integers of 0 or more, for at most {MAX_AXES} axes")
    return tuple(value)


def _dims(names: Any, axes: int) -> tuple[str, ...]:
    if not isinstance(names, list) or len(names) != axes:
        names = [None] * axes
    return tuple(f"dim_{axis}" if name is None else str(name) for axis, name in enumerate(names))


def _fill(value: Any, name: str) -> float | int | None:
    """Return the value of chunks that are not stored; None if it is not determined. Raises PlanError."""
    if value is None or value == "":
        return None
    if isinstance(value, bool | int | float):
        return int(value) if isinstance(value, bool) else value
    if value in _NAMED_FILLS:
        return _NAMED_FILLS[value]
    raise PlanError(name, f"the fill value {shown_value(value)} is not a number")
