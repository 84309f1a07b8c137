"""Files that hold several arrays by name: npz and safetensors; one array of each is taken.

Law: nothing is made before the file's own claim of its size was checked against a bound and the bytes that
are there; no pickle, ever.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.builtin.arrays import Npy, array_type, checked_shape
from meshd.transform.builtin.texts import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.parameters import Parameter, dtype, extents
from meshd.transform.registry import operation
from meshwire.documents import checked_text, shown
from meshwire.frames import DTYPES, FrameError, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshd.transform.parameters import Extents
    from meshwire.frames import TensorSlot
    from meshwire.randomness import KeyedRandom

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
    refuses="no such file or array, another dtype or shape, Python objects, damaged, more than 1 GiB",
)
@dataclass(frozen=True, slots=True)
class Npz:
    """The array `name` of an `.npz` file, which must have this dtype and, if given, this shape. Without a
    dtype, a plan takes that and the number of axes of the dataset's first sample."""

    name: str
    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """The arguments with the dtype of the first sample, unless given. Raises BadSampleError."""
        if "dtype" in args or not isinstance(args.get("name"), str):
            return dict(args)
        return Npy.complete(args, lambda: _member(first(), args["name"]))

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        return Npy(self.dtype, self.shape).apply(_member(value, self.name), random)


def _member(value: bytes, name: str) -> bytes:
    """The npy file of an array. Raises BadSampleError."""
    try:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            info = _entry(archive, name)
            with archive.open(info) as file:
                data = file.read(info.file_size + 1)  # never more than was claimed
    except BadSampleError:
        raise
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not an npz file: {error}") from error
    if len(data) != info.file_size:
        raise BadSampleError(f"the array {shown(name)} has not the size that the file claims")
    return data


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    entries = {info.filename: info for info in archive.infolist()[:_MAX_MEMBERS]}
    info = entries.get(f"{name}.npy") or entries.get(name)
    if info is None:
        there = ", ".join(sorted(entries)[:8])
        raise BadSampleError(f"the file has no array {shown(name)}; it has {shown(there)}")
    if info.file_size > MAX_ARRAY_BYTES or info.compress_type not in _ENCODINGS:
        raise BadSampleError(f"the array {shown(name)} claims {info.file_size} bytes, or is encoded oddly")
    return info


@operation(
    "safetensors",
    Parameter("name", _name),
    Parameter("dtype", dtype),
    Parameter("shape", extents, None),
    takes="bytes of a `.safetensors` file",
    gives="`dtype` of `shape`; ragged without a `shape`. BF16 is given as float32, exactly",
    refuses="no such file or tensor, another dtype or shape, damaged",
)
@dataclass(frozen=True, slots=True)
class Safetensors:
    """The tensor `name` of a `.safetensors` file, which must have this dtype and, if given, this shape.
    Without a dtype, a plan takes that and the number of axes of the dataset's first sample."""

    name: str
    dtype: str
    shape: Extents | None

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """The arguments with the dtype of the first sample, unless given. Raises BadSampleError."""
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
    """Raises BadSampleError."""
    try:
        header = parse_header(value)
    except FrameError as error:
        raise BadSampleError(f"not a safetensors file: {error}") from error
    if header.size != len(value):
        raise BadSampleError(f"a safetensors file of {header.size} bytes, of which {len(value)} are there")
    slot = header.tensors.get(name)
    if slot is None:
        there = ", ".join(sorted(header.tensors)[:8])
        raise BadSampleError(f"the file has no tensor {shown(name)}; it has {shown(there)}")
    return slot
