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
from meshd.transform.parameters import OF_OBJECTS, Parameter, dtype, extents
from meshd.transform.registry import operation
from meshwire.documents import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.parameters import Extents
    from meshwire.randomness import KeyedRandom

_HEADER_LIMIT = 10_000


@operation(
    "raw",
    takes="bytes",
    gives="uint8, ragged",
)
@dataclass(frozen=True, slots=True)
class Raw:
    """The bytes as they are, uint8 and ragged: what a field without ops gives, too."""

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs the source's bytes, not {field}; make it the first op")
        return BYTES

    def apply(self, value: bytes, random: KeyedRandom) -> bytes:
        return value


@operation(
    "npy",
    Parameter("dtype", dtype),
    Parameter("shape", extents, None),
    takes="bytes of an `.npy` file",
    gives="`dtype` of `shape`; ragged, and flat, without a `shape`",
    refuses="no such file, another dtype or shape, Python objects, fewer or more bytes than the header says",
)
@dataclass(frozen=True, slots=True)
class Npy:
    """An array of an `.npy` file, which must have this dtype and, if given, this shape.

    Without a dtype, a plan takes that and the number of axes of the dataset's first sample.
    """

    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """The arguments with dtype and number of axes of the first sample, unless given. Raises
        BadSampleError."""
        if "dtype" in args:
            return dict(args)
        found_shape, _, found, _ = _header(first())
        return {"shape": [None] * len(found_shape), **args, "dtype": found.newbyteorder("=").name}

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs the source's bytes, not {field}; make it the first op")
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        found_shape, fortran, found, start = _header(value)
        if found.hasobject:
            raise BadSampleError(OF_OBJECTS)
        if found.newbyteorder("=") != np.dtype(self.dtype):
            raise BadSampleError(f"the array has dtype {found}, the plan says {self.dtype}")
        count, room = math.prod(found_shape), len(value) - start
        if any(extent < 0 for extent in found_shape) or count * found.itemsize != room:
            raise BadSampleError(
                f"the array claims {count} values of {found}, the file has {room} bytes of them"
            )
        flat = np.frombuffer(value, found, count, start)
        array = flat.reshape(found_shape, order="F" if fortran else "C")
        made = np.ascontiguousarray(array, dtype=self.dtype)  # of a number alone it makes one axis
        return checked_shape(made if self.shape else made.reshape(found_shape), self.shape)


def _extents(value: Any, path: str) -> Extents:
    """The extents of the array, at most one of them null; [] is a number."""
    shape = extents(value, path)
    if shape is None or shape.count(None) > 1 or 0 in shape:
        raise PlanError(path, "expected a list of extents above 0, at most one of them null")
    return shape


@operation(
    "frombuffer",
    Parameter("dtype", dtype),
    Parameter("shape", _extents, ()),
    takes="bytes of numbers as they lie in memory, little endian, such as a column of MDS",
    gives="`dtype` of `shape`; ragged where an extent is null",
    refuses="another number of bytes",
)
@dataclass(frozen=True, slots=True)
class FromBuffer:
    """Numbers that are written one after the other and nothing else. An extent that is null is as large as
    there are bytes for."""

    dtype: str
    shape: Extents

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs bytes, not {field}; make it the first op")
        return FieldType("array", self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        shape, kind = self.shape, np.dtype(self.dtype)
        row = kind.itemsize * math.prod(extent for extent in shape if extent is not None)
        if len(value) % row or (None not in shape and len(value) != row):
            raise BadSampleError(
                f"{len(value)} bytes; {row} of them are an array of {self.dtype}{list(shape)}"
            )
        found = np.frombuffer(value, np.uint8 if self.dtype == "bool" else kind.newbyteorder("<"))
        numbers = found != 0 if self.dtype == "bool" else found.astype(kind, copy=False)
        return numbers.reshape([-1 if extent is None else extent for extent in shape])


def array_type(dtype: str, shape: Extents | None) -> FieldType:
    """Of arrays with these extents; without a shape any array is taken, flattened."""
    return FieldType("array", dtype, (None,) if shape is None else shape)


def checked_shape(array: npt.NDArray[Any], shape: Extents | None) -> npt.NDArray[Any]:
    """The array if it has the shape, None standing for any extent. Raises BadSampleError."""
    if shape is None:
        return array.reshape(-1)
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, extent) for wanted, extent in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise BadSampleError(f"the array has shape {array.shape}, the plan says {shape}")
    return array


def _header(value: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """(shape, fortran order, dtype, where the data begins) of an npy file. Raises BadSampleError."""
    file = io.BytesIO(value)
    try:
        version = npy_format.read_magic(file)
        reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        found_shape, fortran, found = reader(file, max_header_size=_HEADER_LIMIT)
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not an npy file: {error}") from error
    return tuple(found_shape), bool(fortran), found, file.tell()
