"""Bytes as arrays: `npy` files, and bytes as they are.

Law: no pickle, ever. The header's claim is checked against the bytes that are there before anything is made.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import BYTES, FieldType
from meshd.transform.parameters import Parameter, dtype, shape
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.randomness import KeyedRandom

_HEADER_LIMIT = 10_000


@operation("raw")
@dataclass(frozen=True, slots=True)
class Raw:
    """The bytes as they are, uint8 and ragged: what a field without ops gives, too."""

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs the source's bytes, not {field}; make it the first op")
        return BYTES

    def apply(self, value: bytes, random: KeyedRandom) -> bytes:
        return value


@operation("npy", Parameter("dtype", dtype, "float32"), Parameter("shape", shape, None))
@dataclass(frozen=True, slots=True)
class Npy:
    """An array of an `.npy` file, which must have this dtype and, if given, this shape."""

    dtype: str
    shape: tuple[int, ...] | None

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs the source's bytes, not {field}; make it the first op")
        return FieldType("array", self.dtype, (None,) if self.shape is None else self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        found_shape, fortran, found = _header(value)
        if found.hasobject or found.newbyteorder("=") != np.dtype(self.dtype):
            raise BadSampleError(f"the array has dtype {found}, the plan says {self.dtype}")
        if self.shape is not None and found_shape != self.shape:
            raise BadSampleError(f"the array has shape {found_shape}, the plan says {self.shape}")
        return _body(value, found_shape, found, fortran=fortran).astype(self.dtype, copy=False)


def _header(value: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, fortran order, dtype) of an npy file. Raises BadSampleError."""
    file = io.BytesIO(value)
    try:
        version = npy_format.read_magic(file)
        reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        found_shape, fortran, found = reader(file, max_header_size=_HEADER_LIMIT)
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not an npy file: {error}") from error
    return tuple(found_shape), bool(fortran), found


def _body(
    value: bytes, found_shape: tuple[int, ...], found: np.dtype[Any], *, fortran: bool
) -> npt.NDArray[Any]:
    count = math.prod(found_shape)
    size = count * found.itemsize
    if any(extent < 0 for extent in found_shape) or size > len(value):
        raise BadSampleError(f"the array claims {size} bytes, the file has {len(value)}; it was cut short")
    flat = np.frombuffer(value, found, count, offset=len(value) - size) if count else np.empty(0, found)
    return np.ascontiguousarray(flat.reshape(found_shape, order="F" if fortran else "C"))
