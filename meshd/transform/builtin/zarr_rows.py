"""Zarr rows: decode one row of a Zarr v3 array, or a chunk of one of version 2 or 3.

Law: the size of the decoded row is known before decoding starts, and nothing larger is allocated.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from awscrt.checksums import crc32c

from meshd.transform.assets import BadAssetError, asset
from meshd.transform.builtin.text import check_bytes
from meshd.transform.builtin.zarr_codecs import decode_chunk, require_codecs
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter
from meshd.transform.registry import operation
from meshwire.formats.zarr_metadata import ZarrVariable, parse_variable
from meshwire.formats.zarr_source import parse_array, parse_chunked
from meshwire.strict_json import PlanError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.assets import Asset
    from meshwire.formats.zarr_source import ChunkedArray, SourceArray
    from meshwire.plan.keyed_random import KeyedRandom


@operation(
    "zarr",
    Parameter("metadata", asset),
    takes="bytes of a row, from a dataset of kind zarr",
    gives="the array's dtype, and its shape without the first axis",
    refuses="damaged, or of another size than the metadata says",
)
@dataclass(frozen=True, slots=True)
class Zarr:
    """A row of a Zarr v3 array, decoded by its `metadata` (the array's `zarr.json`, an object): dtype, shape,
    and the codecs gzip, zstd and crc32c."""

    metadata: Asset
    _array: SourceArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_array", parse_array(self.metadata.data, "zarr.json"))
        except PlanError as error:
            raise BadAssetError("metadata", str(error)) from error

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return FieldType("array", self._array.dtype, self._array.row)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        array, data = self._array, value
        alone = array.inner == 1 or (not array.inner and array.chunk == 1)
        for encoding in reversed(array.encodings if alone else ()):
            data = _decode(encoding, data, array.row_bytes + 4)
        if len(data) != array.row_bytes:
            raise BadSampleError(f"a row of {len(data)} bytes; the metadata says {array.row_bytes}")
        kind = np.dtype(array.dtype)
        found = np.frombuffer(data, kind.newbyteorder(">" if array.swapped else "<"))
        return found.astype(kind, copy=False).reshape(array.row)


@operation(
    "zarr_chunk",
    Parameter("metadata", asset),
    takes="bytes of a chunk, from a dataset of kind chunks",
    gives="the array's dtype, and the shape of its chunks",
    refuses="damaged, or of another size than the metadata says",
)
@dataclass(frozen=True, slots=True)
class ZarrChunk:
    """A chunk of a Zarr array, decoded by its `metadata`, an object: `zarr.json` of version 3, `.zarray` of
    version 2. The codecs are those of `mesh.open_zarr`."""

    metadata: Asset
    _array: ChunkedArray | ZarrVariable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_array", _chunks_of(self.metadata.data))
        except (PlanError, ValueError) as error:
            raise BadAssetError("metadata", str(error)) from error

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if isinstance(self._array, ZarrVariable):
            return FieldType("array", np.dtype(self._array.dtype).name, self._array.chunk)
        return FieldType("array", self._array.dtype, self._array.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        array, data = self._array, value
        if isinstance(array, ZarrVariable):
            return _decoded_chunk(array, data)
        for encoding in reversed(array.layout.encodings):
            data = _decode(encoding, data, array.row_bytes + 4)
        if len(data) != array.row_bytes:
            raise BadSampleError(f"a chunk of {len(data)} bytes; the metadata says {array.row_bytes}")
        kind = np.dtype(array.dtype)
        found = np.frombuffer(data, kind.newbyteorder(">" if array.layout.swapped else "<"))
        return found.astype(kind, copy=False).reshape(array.shape)


def _chunks_of(document: bytes) -> ChunkedArray | ZarrVariable:
    """Parse metadata of either version. Raises PlanError, ValueError (the settings of a codec)."""
    try:
        return parse_chunked(document, "zarr.json")
    except PlanError as refused:
        try:
            found = parse_variable(document, None, "zarr.json")
        except PlanError as error:
            raise (refused if b'"chunk_grid"' in document else error) from error
        require_codecs(found.codecs)
        return found


def _decoded_chunk(array: ZarrVariable, data: bytes) -> npt.NDArray[Any]:
    kind = np.dtype(array.dtype)
    found = np.frombuffer(decode_chunk(array.codecs, data, array.chunk_bytes), kind)
    stored = found.reshape([array.chunk[axis] for axis in array.axes])
    return np.ascontiguousarray(stored.transpose(np.argsort(array.axes)), kind.newbyteorder("="))


def _decode(encoding: str, data: bytes, most: int) -> bytes:
    """Decode at most `most` bytes (a checksum may be included) plus one. Raises BadSampleError."""
    try:
        if encoding == "gzip":
            return zlib.decompressobj(wbits=31).decompress(data, most + 1)
        if encoding == "zstd":
            return bytes(zstd.ZstdDecompressor().decompress(data, most + 1))
    except (zlib.error, zstd.ZstdError, EOFError, ValueError) as error:
        raise BadSampleError(f"not {encoding}: {error}") from error
    if len(data) < 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise BadSampleError("the row does not match its crc32c")
    return data[:-4]
