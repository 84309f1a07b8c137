"""Array ops: window, gather_columns, one_hot, normalize, cast, as_image and to_npy.

Law: a window that does not fit in its array is a bad sample. Arithmetic is float32, rounded once to the
target type; integers that do not fit are a bad sample, not wrapped.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.lib import format as npy_format

from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import BYTES, FieldType, channels_of, image
from meshd.transform.parameters import (
    MAX_CLASSES,
    Parameter,
    choice,
    dtype,
    extents,
    numbers,
    whole,
    whole_or_none,
    with_description,
)
from meshd.transform.registry import operation
from meshwire.strict_json import PlanError, checked_integer, checked_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.transform.parameters import Extents
    from meshwire.plan.keyed_random import KeyedRandom


def _window(value: Any, path: str) -> Extents:
    """The extents of the window along each axis of the array, null for a whole axis."""
    found = extents(value, path)
    if not found or 0 in found:
        raise PlanError(path, "expected a list of extents above 0, with null for a whole axis")
    return found


def _number_or_none(value: Any, path: str) -> float | None:
    """A number, or null."""
    return None if value is None else checked_number(value, path, -(2.0**63), 2.0**64)


def fitting_value(value: float, dtype: str) -> Any:
    """Return `value` in the dtype. Raises ValueError if it does not fit."""
    wanted = np.dtype(dtype)
    if wanted.kind not in "iu":
        return wanted.type(value)
    info = np.iinfo(wanted)
    if not value.is_integer() or not info.min <= int(value) <= info.max:
        raise ValueError(f"the value {value:g} does not fit into {dtype}")
    return wanted.type(int(value))


@operation(
    "window",
    Parameter("extents", _window),
    Parameter("at", choice("random", "center", "first"), "random"),
    Parameter("pad", _number_or_none, None),
    random=True,
    moves=True,
    takes="an array",
    gives="the same dtype, with the window's extents",
    refuses="an axis shorter than the window, without `pad`",
)
class Window(msgspec.Struct, frozen=True):
    """A window of the array along each axis: at a random place, in the middle, or at the beginning. With
    `pad`, an array that is shorter is filled up at its end with this number."""

    extents: Extents
    at: Literal["random", "center", "first"]
    pad: float | None = None

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.pixel_layout or len(field.shape) != len(self.extents):
            raise ValueError(f"needs an array of {len(self.extents)} axes, not {field}")
        if self.pad is not None:
            fitting_value(self.pad, field.dtype)
        for axis, (wanted, extent) in enumerate(zip(self.extents, field.shape, strict=True)):
            if self.pad is None and wanted is not None and extent is not None and wanted > extent:
                raise ValueError(f"axis {axis} has {extent}, less than the window's {wanted}")
        shape = (
            extent if wanted is None else wanted
            for wanted, extent in zip(self.extents, field.shape, strict=True)
        )
        return FieldType("array", field.dtype, tuple(shape), rate=field.rate)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        places = tuple(slice(*place) for place in self.places(value.shape, random))
        return self.padded(np.ascontiguousarray(value[places]))

    def places(self, shape: Sequence[int], random: KeyedRandom) -> list[tuple[int, int]]:
        """Return (start, stop) of the window along each axis, within the array. Raises BadSampleError."""
        places = []
        for axis, (wanted, extent) in enumerate(zip(self.extents, shape, strict=True)):
            if wanted is None or (extent < wanted and self.pad is not None):
                places.append((0, extent))
                continue
            room = extent - wanted
            if room < 0:
                raise BadSampleError(f"axis {axis} has {extent}, less than the window's {wanted}")
            first = {"first": 0, "center": room // 2}.get(self.at)
            start = random.integer(room + 1) if first is None else first
            places.append((start, start + wanted))
        return places

    def padded(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the part of an array that is in the window, filled up to the window's extents."""
        shape = tuple(
            extent if wanted is None else wanted
            for wanted, extent in zip(self.extents, value.shape, strict=True)
        )
        if shape == value.shape:
            return value
        full = np.full(shape, fitting_value(self.pad or 0.0, value.dtype.name), value.dtype)
        full[tuple(slice(extent) for extent in value.shape)] = value
        return full


def _columns(value: Any, path: str) -> tuple[int, ...]:
    """Column numbers, starting at 0; negative ones count from the end."""
    given = [value] if isinstance(value, int) else value
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CLASSES:
        raise PlanError(path, f"expected a list of 1…{MAX_CLASSES} column numbers")
    bound = 1 << 31
    return tuple(checked_integer(item, f"{path}[{i}]", -bound, bound) for i, item in enumerate(given))


@operation(
    "gather_columns",
    Parameter("columns", _columns),
    takes="an array […, n]",
    gives="the same dtype […, number of `columns`]",
    refuses="a column does not exist",
)
@dataclass(frozen=True, slots=True)
class GatherColumns:
    """The given columns of the last axis, in the given order; a column may be repeated."""

    columns: tuple[int, ...]
    _indices: npt.NDArray[np.intp] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_indices", np.array(self.columns, np.intp))

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.pixel_layout or not field.shape:
            raise ValueError(f"needs an array with at least one axis, not {field}")
        if field.shape[-1] is not None:
            self._check(field.shape[-1])
        return FieldType("array", field.dtype, (*field.shape[:-1], len(self.columns)))

    def _check(self, width: int) -> None:
        wrong = next((column for column in self.columns if not -width <= column < width), None)
        if wrong is not None:
            raise ValueError(f"there is no column {wrong} in {width} columns")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        try:
            self._check(value.shape[-1])
        except ValueError as error:
            raise BadSampleError(str(error)) from error
        return value[..., self._indices]


@operation(
    "one_hot",
    Parameter("classes", with_description(whole(1, MAX_CLASSES), f"the number of classes, 1…{MAX_CLASSES}")),
    Parameter("dtype", choice("uint8", "float16", "float32"), "float32"),
    takes="a label, or an array of integers […]",
    gives="`dtype` […, `classes`]: 1 at the number of the class, else 0",
    refuses="a number outside 0…classes − 1",
)
class OneHot(msgspec.Struct, frozen=True):
    """A class number as a one-hot vector of `classes` elements."""

    classes: int
    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        if field.kind not in ("label", "array") or field.layout or np.dtype(field.dtype).kind not in "iu":
            raise ValueError(f"needs a label or integers, not {field}")
        return FieldType("array", self.dtype, (*field.shape, self.classes))

    def apply(self, value: Any, random: KeyedRandom) -> npt.NDArray[Any]:
        numbers = np.asarray(value)
        if numbers.size and not (int(numbers.min()) >= 0 and int(numbers.max()) < self.classes):
            raise BadSampleError(f"a class outside 0…{self.classes - 1}")
        vectors = np.zeros((numbers.size, self.classes), self.dtype)
        vectors[np.arange(numbers.size), numbers.reshape(-1).astype(np.intp)] = 1
        return vectors.reshape(*numbers.shape, self.classes)


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
class Normalize(msgspec.Struct, frozen=True):
    """(value / scale − mean) / std per channel (for an array, per column of the last axis), as float32 or
    float16. `scale` defaults to 255; use 1 for values that are not pixels. uint8 takes a quarter of the
    bandwidth of float32: normalize on the GPU if there is one."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: tuple[float, ...]
    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        _check_array(field)
        if field.layout == "chw":
            raise ValueError(f"needs the channels last, not {field}; put it before to_chw")
        channels = channels_of(field) if field.pixel_layout else field.shape[-1] if field.shape else 1
        for name, given in (("mean", self.mean), ("std", self.std), ("scale", self.scale)):
            if len(given) not in (1, channels):
                raise ValueError(f"{name} has {len(given)} numbers for the {channels} channels of {field}")
        if any(value == 0 for value in (*self.std, *self.scale)):
            raise ValueError("std and scale must not be 0")
        return FieldType("array", self.dtype, field.shape, field.pixel_layout)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        mean, std, scale = (np.array(given, np.float32) for given in (self.mean, self.std, self.scale))
        result: npt.NDArray[Any] = value.astype(np.float32) * (np.float32(1.0) / (scale * std)) - mean / std
        return result.astype(self.dtype, copy=False)


@operation(
    "cast",
    Parameter("dtype", dtype),
    takes="an image, an array or a label",
    gives="`dtype`, the same shape",
    refuses="a number does not fit into an integer `dtype`, or is not finite",
)
class Cast(msgspec.Struct, frozen=True):
    """The same numbers in another type. For an integer type, numbers are rounded half to even; one that does
    not fit is a bad sample."""

    dtype: str

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "label":
            _check_array(field)
        return FieldType("array", self.dtype, field.shape, field.pixel_layout)

    def apply(self, value: npt.NDArray[Any] | int, random: KeyedRandom) -> npt.NDArray[Any]:
        return self.convert(np.asarray(value))

    def convert(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers in this dtype. Raises BadSampleError."""
        wanted = np.dtype(self.dtype)
        if wanted.kind not in "iu" or value.size == 0:
            return value.astype(wanted)
        rounded = np.rint(value) if value.dtype.kind == "f" else value
        info = np.iinfo(wanted)
        if value.dtype.kind == "f" and not np.isfinite(rounded).all():
            raise BadSampleError("the array holds values that are not finite numbers")
        if rounded.min() < info.min or rounded.max() > info.max:
            raise BadSampleError(f"the array holds values outside {info.min}…{info.max}")
        return rounded.astype(wanted)


_MOST_CHANNELS = 4
_IMAGE_DTYPES = ("uint8", "uint16", "int16", "int32", "uint32", "float32", "float64")
"""Those that `decode` gives: the ops on images are tested with them."""


@operation(
    "as_image",
    Parameter("layout", choice("hwc", "chw"), "hwc"),
    Parameter("channels", whole_or_none(1, _MOST_CHANNELS), None),
    takes='an array [h, w], [h, w, c], or [c, h, w] with `layout` "chw"',
    gives="an image [h, w, c] of the same dtype",
    refuses="an empty array, or another number of channels",
)
class AsImage(msgspec.Struct, frozen=True):
    """An array as an image of 1 to 4 channels, such as a mask or a depth map of an `.npy` file: from here on,
    the ops on images apply to it. [h, w] gets one channel. Give `channels` where the type of the array does
    not say how many it has."""

    layout: Literal["hwc", "chw"]
    channels: int | None

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.layout or len(field.shape) not in (2, 3):
            raise ValueError(f"needs an array of 2 or 3 axes, not {field}")
        if field.dtype not in _IMAGE_DTYPES:
            raise ValueError(f"images have {', '.join(_IMAGE_DTYPES)}, not {field.dtype}: put cast before it")
        known: int | None
        if len(field.shape) == 2:
            (height, width), known = field.shape, 1
        elif self.layout == "hwc":
            height, width, known = field.shape
        else:
            known, height, width = field.shape
        channels = self.channels if known is None else known
        if channels is None:
            raise ValueError(f"{field} does not say how many channels there are: pass channels, 1 to 4")
        if channels > _MOST_CHANNELS or self.channels not in (None, channels):
            wanted = f"1 to {_MOST_CHANNELS}" if self.channels is None else str(self.channels)
            raise ValueError(f"needs an array of {wanted} channels, not {field}; gather_columns takes some")
        return image(height, width, channels, dtype=field.dtype)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        if value.ndim == 2:
            value = value[:, :, None]
        elif self.layout == "chw":
            value = np.ascontiguousarray(value.transpose(1, 2, 0))
        if value.size == 0:
            raise BadSampleError("the array is empty")
        if self.channels not in (None, value.shape[2]):
            raise BadSampleError(f"the array has {value.shape[2]} channels, the plan says {self.channels}")
        return value


@operation(
    "to_npy",
    takes="an image or an array",
    gives="bytes of an `.npy` file",
)
class ToNpy(msgspec.Struct, frozen=True):
    """An image or array as the bytes of an `.npy` file (version 1.0)."""

    def infer(self, field: FieldType) -> FieldType:
        _check_array(field)
        return BYTES

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> bytes:
        out = io.BytesIO()
        npy_format.write_array(out, np.ascontiguousarray(value), version=(1, 0), allow_pickle=False)
        return out.getvalue()
