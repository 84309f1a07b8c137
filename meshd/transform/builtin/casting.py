"""Numbers of other types: normalised, cast, written as an `.npy` file.

Law: arithmetic is float32, rounded once to the type asked for; integers that do not fit are a bad sample, not
wrapped.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import BYTES, FieldType, channels_of
from meshd.transform.parameters import Parameter, choice, dtype, numbers
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.randomness import KeyedRandom


def _check_array(field: FieldType) -> None:
    if field.kind not in ("image", "array"):
        raise ValueError(f"needs an image or an array, not {field}; decode it first")


@operation(
    "normalize",
    Parameter("mean", numbers),
    Parameter("std", numbers),
    Parameter("scale", numbers, (255.0,)),
    Parameter("dtype", choice("float32", "float16"), "float32"),
    takes="an image [h, w, c], or an array […, n]",
    gives="float32 or float16, the same shape",
)
@dataclass(frozen=True, slots=True)
class Normalize:
    """(value / scale − mean) / std by channel (of an array: by column of the last axis), as float32 or
    float16. `scale` is 255 unless given: 1 for what are no pixels. uint8 is a quarter on the wire: where
    there is a GPU, normalise there."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: tuple[float, ...]
    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        _check_array(field)
        if field.layout == "chw":
            raise ValueError(f"needs the channels last, not {field}; put it before to_chw")
        channels = channels_of(field) if field.layout else field.shape[-1] if field.shape else 1
        for name, given in (("mean", self.mean), ("std", self.std), ("scale", self.scale)):
            if len(given) not in (1, channels):
                raise ValueError(f"{name} has {len(given)} numbers for the {channels} channels of {field}")
        if any(value == 0 for value in (*self.std, *self.scale)):
            raise ValueError("std and scale must not be 0")
        return FieldType("array", self.dtype, field.shape, field.layout)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        mean, std, scale = (np.array(given, np.float32) for given in (self.mean, self.std, self.scale))
        result: npt.NDArray[Any] = value.astype(np.float32) * (np.float32(1.0) / (scale * std)) - mean / std
        return result.astype(self.dtype, copy=False)


@operation(
    "cast",
    Parameter("dtype", dtype),
    takes="an image, an array or a label",
    gives="`dtype`, the same shape",
    refuses="a number does not fit an integer `dtype`, or is none",
)
@dataclass(frozen=True, slots=True)
class Cast:
    """The same numbers in another type. To an integer type, numbers are rounded to even; one that does not
    fit is a bad sample."""

    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "label":
            _check_array(field)
        return FieldType("array", self.dtype, field.shape, field.layout)

    def apply(self, value: npt.NDArray[Any] | int, random: KeyedRandom) -> npt.NDArray[Any]:
        return self._cast(np.asarray(value))

    def _cast(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        wanted = np.dtype(self.dtype)
        if wanted.kind not in "iu" or value.size == 0:
            return value.astype(wanted)
        rounded = np.rint(value) if value.dtype.kind == "f" else value
        info = np.iinfo(wanted)
        if value.dtype.kind == "f" and not np.isfinite(rounded).all():
            raise BadSampleError("the array holds values that are no numbers")
        if rounded.min() < info.min or rounded.max() > info.max:
            raise BadSampleError(f"the array holds values outside {info.min}…{info.max}")
        return rounded.astype(wanted)


@operation(
    "to_npy",
    takes="an image or an array",
    gives="bytes of an `.npy` file",
)
@dataclass(frozen=True, slots=True)
class ToNpy:
    """An image or array as the bytes of an `.npy` file (version 1.0)."""

    def infer(self, field: FieldType) -> FieldType:
        _check_array(field)
        return BYTES

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> bytes:
        out = io.BytesIO()
        npy_format.write_array(out, np.ascontiguousarray(value), version=(1, 0), allow_pickle=False)
        return out.getvalue()
