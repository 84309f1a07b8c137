"""Arrays from files: npy, npz, safetensors, raw numbers, and numeric features of `tf.Example`.

Law: no pickle, ever. The size that a header claims is checked against a bound and the available bytes
before anything is allocated. A feature of another type or length is a bad sample, never cut or padded.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.lib import format as npy_format

from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import BYTES, LABEL, FieldType
from meshd.transform.parameters import (
    OBJECT_DTYPE_REFUSED,
    Parameter,
    choice,
    dtype,
    extents,
    whole,
    with_description,
)
from meshd.transform.registry import operation
from meshwire.formats.tf_example import ExampleError, parse_numbers
from meshwire.frame.tensor_frame import DTYPES, FrameError, parse_frame_header
from meshwire.strict_json import PlanError, checked_text, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.parameters import Extents
    from meshwire.frame.tensor_frame import TensorSlot
    from meshwire.plan.keyed_random import KeyedRandom


_HEADER_LIMIT = 10_000


@operation(
    "raw",
    takes="bytes",
    gives="uint8, ragged",
)
class Raw(msgspec.Struct, frozen=True):
    """The unchanged bytes, uint8 and ragged; the same as a field without ops."""

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
    refuses="not an `.npy` file, another dtype or shape, Python objects, or not of the size in its header",
)
class Npy(msgspec.Struct, frozen=True):
    """The array of an `.npy` file, which must have this dtype and, if given, this shape.

    Without a dtype, a plan takes it and the number of axes from the dataset's first sample.
    """

    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, with dtype and number of axes of the first sample unless given.

        Raises BadSampleError.
        """
        if "dtype" in args:
            return dict(args)
        found_shape, _, found, _ = read_npy_header(first())
        return {"shape": [None] * len(found_shape), **args, "dtype": found.newbyteorder("=").name}

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "bytes":
            raise ValueError(f"needs the source's bytes, not {field}; make it the first op")
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        found_shape, fortran, found, start = read_npy_header(value)
        if found.hasobject:
            raise BadSampleError(OBJECT_DTYPE_REFUSED)
        if found.newbyteorder("=") != np.dtype(self.dtype):
            raise BadSampleError(f"the array has dtype {found}, the plan says {self.dtype}")
        count, room = math.prod(found_shape), len(value) - start
        if any(extent < 0 for extent in found_shape) or count * found.itemsize != room:
            raise BadSampleError(
                f"the header claims {count} values of {found}, but the file has {room} bytes of data"
            )
        flat = np.frombuffer(value, found, count, start)
        array = flat.reshape(found_shape, order="F" if fortran else "C")
        made = np.ascontiguousarray(array, dtype=self.dtype)  # gives a single number an axis
        return checked_shape(made if self.shape else made.reshape(found_shape), self.shape)


def _extents(value: Any, path: str) -> Extents:
    """The extents of the array, at most one of them null; [] for a single number."""
    shape = extents(value, path)
    if shape is None or shape.count(None) > 1 or 0 in shape:
        raise PlanError(path, "expected a list of extents above 0, at most one of them null")
    return shape


@operation(
    "frombuffer",
    Parameter("dtype", dtype),
    Parameter("shape", _extents, ()),
    takes="bytes of numbers in little-endian memory layout, such as an MDS column",
    gives="`dtype` of `shape`; ragged if an extent is null",
    refuses="a number of bytes that does not fit `shape`",
)
class FromBuffer(msgspec.Struct, frozen=True):
    """Consecutive numbers without a header. An extent of null takes as many elements as there are bytes
    for."""

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
            raise BadSampleError(f"{len(value)} bytes; an array of {self.dtype}{list(shape)} takes {row}")
        found = np.frombuffer(value, np.uint8 if self.dtype == "bool" else kind.newbyteorder("<"))
        numbers = found != 0 if self.dtype == "bool" else found.astype(kind, copy=False)
        return numbers.reshape([-1 if extent is None else extent for extent in shape])


def array_type(dtype: str, shape: Extents | None) -> FieldType:
    """Return the type of arrays with these extents; without a shape, any array is accepted, flattened."""
    return FieldType("array", dtype, (None,) if shape is None else shape)


def checked_shape(array: npt.NDArray[Any], shape: Extents | None) -> npt.NDArray[Any]:
    """Return the array if it has the shape; None stands for any extent. Raises BadSampleError."""
    if shape is None:
        return array.reshape(-1)
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, extent) for wanted, extent in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise BadSampleError(f"the array has shape {list(array.shape)}, the plan says {list(shape)}")
    return array


def read_npy_header(value: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return (shape, Fortran order, dtype, offset of the data) of an npy file. Raises BadSampleError."""
    file = io.BytesIO(value)
    try:
        version = npy_format.read_magic(file)
        reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        found_shape, fortran, found = reader(file, max_header_size=_HEADER_LIMIT)
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not an npy file: {error}") from error
    return tuple(found_shape), bool(fortran), found, file.tell()


MAX_ARRAY_BYTES = 1 << 30
_MAX_MEMBERS = 10_000
_ENCODINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def _name(value: Any, path: str) -> str:
    """The array's name in the file."""
    return checked_text(value, path, at_most=1000)


@operation(
    "npz",
    Parameter("name", _name),
    Parameter("dtype", dtype),
    Parameter("shape", extents, None),
    takes="bytes of an `.npz` file",
    gives="`dtype` of `shape`; ragged without a `shape`",
    refuses="not an `.npz` file, no such array, another dtype or shape, Python objects, damaged, over 1 GiB",
)
class Npz(msgspec.Struct, frozen=True):
    """The array `name` of an `.npz` file, which must have this dtype and, if given, this shape. Without a
    dtype, a plan takes it and the number of axes from the dataset's first sample."""

    name: str
    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, with the dtype of the first sample unless given. Raises BadSampleError."""
        if "dtype" in args or not isinstance(args.get("name"), str):
            return dict(args)
        return Npy.complete(args, lambda: _member(first(), args["name"]))

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        return Npy(self.dtype, self.shape).apply(_member(value, self.name), random)


def _member(value: bytes, name: str) -> bytes:
    """Return the npy file of an array. Raises BadSampleError."""
    try:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            info = _entry(archive, name)
            with archive.open(info) as file:
                data = file.read(info.file_size + 1)  # one byte more, to notice a larger member
    except BadSampleError:
        raise
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not an npz file: {error}") from error
    if len(data) != info.file_size:
        raise BadSampleError(f"the array {shown_value(name)} does not have the size that the file claims")
    return data


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    entries = {info.filename: info for info in archive.infolist()[:_MAX_MEMBERS]}
    info = entries.get(f"{name}.npy") or entries.get(name)
    if info is None:
        there = ", ".join(sorted(entries)[:8])
        raise BadSampleError(f"the file has no array {shown_value(name)}; it has {shown_value(there)}")
    if info.file_size > MAX_ARRAY_BYTES or info.compress_type not in _ENCODINGS:
        raise BadSampleError(
            f"the array {shown_value(name)} claims {info.file_size} bytes, or has an unsupported compression"
        )
    return info


@operation(
    "safetensors",
    Parameter("name", _name),
    Parameter("dtype", dtype),
    Parameter("shape", extents, None),
    takes="bytes of a `.safetensors` file",
    gives="`dtype` of `shape`; ragged without a `shape`. BF16 becomes float32, exactly",
    refuses="not a `.safetensors` file, no such tensor, another dtype or shape, damaged",
)
class Safetensors(msgspec.Struct, frozen=True):
    """The tensor `name` of a `.safetensors` file, which must have this dtype and, if given, this shape.
    Without a dtype, a plan takes it and the number of axes from the dataset's first sample."""

    name: str
    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, with the dtype of the first sample unless given. Raises BadSampleError."""
        if "dtype" in args or not isinstance(args.get("name"), str):
            return dict(args)
        slot = _slot(first(), args["name"])
        return {"shape": [None] * len(slot.shape), **args, "dtype": _dtype_of(slot)}

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        slot = _slot(value, self.name)
        if _dtype_of(slot) != self.dtype:
            raise BadSampleError(f"the tensor has dtype {slot.dtype}, the plan says {self.dtype}")
        array = slot.view(value)
        if slot.dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return checked_shape(array, self.shape)


def _dtype_of(slot: TensorSlot) -> str:
    return "float32" if slot.dtype == "BF16" else DTYPES[slot.dtype].name


def _slot(value: bytes, name: str) -> TensorSlot:
    """Return the entry of a tensor. Raises BadSampleError."""
    try:
        header = parse_frame_header(value)
    except FrameError as error:
        raise BadSampleError(f"not a safetensors file: {error}") from error
    if header.size != len(value):
        raise BadSampleError(
            f"the safetensors header says {header.size} bytes, but the file has {len(value)} bytes"
        )
    slot = header.tensors.get(name)
    if slot is None:
        there = ", ".join(sorted(header.tensors)[:8])
        raise BadSampleError(f"the file has no tensor {shown_value(name)}; it has {shown_value(there)}")
    return slot


FeatureType = Literal["integer", "integers", "number", "numbers"]
_MAX_LENGTH = 1 << 24


@operation(
    "feature",
    Parameter("type", choice("integer", "integers", "number", "numbers")),
    Parameter(
        "length", with_description(whole(0, _MAX_LENGTH), "the number of values; 0: samples differ"), 0
    ),
    takes="bytes of a numeric feature, from a dataset of kind tfrecord",
    gives='int64 ("integer"), int64 [n] ("integers"), float32 ("number"), float32 [n] ("numbers")',
    refuses="a feature of bytes or of the other numeric type, another number of values; over 16 MiB",
)
class FeatureNumbers(msgspec.Struct, frozen=True):
    """The numbers of a feature of a `tf.Example`: exactly one, or a list; with a `length`, it is dense."""

    type: FeatureType
    length: int

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.type == "integer":
            return LABEL
        if self.type == "number":
            return FieldType("array", "float32", ())
        return FieldType("array", "int64" if self.type == "integers" else "float32", (self.length or None,))

    def apply(self, value: bytes, random: KeyedRandom) -> Any:
        try:
            found = parse_numbers(value)
        except ExampleError as error:
            raise BadSampleError(f"not a numeric feature: {error}") from error
        if found.dtype != ("int64" if self.type.startswith("integer") else "float32"):
            raise BadSampleError(f"a feature of {found.dtype}, not of {self.type}")
        wanted = self.length if self.type.endswith("s") else 1
        if wanted and found.size != wanted:
            raise BadSampleError(f"a feature of {found.size} values, not of {wanted}")
        if self.type.endswith("s"):
            return found
        return int(found[0]) if self.type == "integer" else found[0]
