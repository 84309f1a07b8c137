"""Resize, center_crop and random_resized_crop: ops that keep a window of an image, resampled.

Law: a window follows from the image's height and width and the draws alone, so that `decode` can make less
than the whole image. How a window is resampled: see `resample_window`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from meshd.transform.builtin.resample_window import RESAMPLED, ResampleWindow, resample_window
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import channels_of, check_image, image
from meshd.transform.parameters import MAX_SIDE, Parameter, choice, interval, side_or_size, size
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.builtin.resample_window import Filter
    from meshd.transform.image_annotations import Motion
    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

_ATTEMPTS = 10
_FILTERS_1 = choice("antialias", "nearest")


def _filter_1(value: Any, path: str) -> Filter:
    return "nearest" if _FILTERS_1(value, path) == "nearest" else "fast"


_filter_1.__doc__ = _FILTERS_1.__doc__
_FILTERS = choice("bilinear", "bicubic", "box", "nearest", "fast")


def _filter(value: Any, path: str) -> Filter:
    return "fast" if value == "antialias" else _FILTERS(value, path)  # the name in version 1


_filter.__doc__ = _FILTERS.__doc__


@runtime_checkable
class WindowOp(Protocol):
    """An op that equals `resample_window(image, window(height, width, random))`."""

    def window(self, height: int, width: int, random: KeyedRandom) -> ResampleWindow:
        """Return the window to keep of an image of this size. Raises BadSampleError if it does not fit."""
        ...


def _check_dtype(field: FieldType, filter: Filter) -> None:
    """Raises ValueError unless the filter takes the dtype."""
    if filter != "nearest" and field.dtype != "uint8" and (filter == "fast" or field.dtype not in RESAMPLED):
        others = "" if field.dtype not in RESAMPLED else ', or "bilinear"'
        raise ValueError(f'the filter "{filter}" does not take {field}; use filter "nearest"{others}')


def _resized_type(field: FieldType, size: tuple[int | None, int | None]) -> FieldType:
    return image(*size, channels_of(field), dtype=field.dtype)


class _Resize(msgspec.Struct, frozen=True):
    """What both versions of `resize` do."""

    size: int | tuple[int, int]
    filter: Filter

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        _check_dtype(field, self.filter)
        if isinstance(self.size, tuple):
            return _resized_type(field, self.size)
        height, width = field.shape[0], field.shape[1]
        if height is None or width is None:
            return _resized_type(field, (None, None))
        return _resized_type(field, _shorter_to(self.size, height, width))

    def window(self, height: int, width: int, random: KeyedRandom) -> ResampleWindow:
        out = self.size if isinstance(self.size, tuple) else _shorter_to(self.size, height, width)
        if max(out) > MAX_SIDE:
            raise BadSampleError(f"an image of {width}×{height} would become {out[1]}×{out[0]} pixels")
        return ResampleWindow(0, 0, height, width, *out, self.filter)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return resample_window(value, self.window(value.shape[0], value.shape[1], random))

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        return self.window(height, width, random).motion()


@operation("resize", Parameter("size", side_or_size), Parameter("filter", _filter_1, "fast"))
class ResizeFast(_Resize, frozen=True):
    """Version 1: its "antialias" is the filter "fast" of version 2."""


@operation(
    "resize",
    Parameter("size", side_or_size),
    Parameter("filter", _filter, "bilinear"),
    version="2",
    takes='[h, w, c] of uint8; of uint16, int32 or float32, unless `filter` is "fast"; with "nearest", of '
    "any dtype",
    gives="the same dtype [height, width, c]",
    refuses="a side would exceed 16,384 pixels",
)
class Resize(_Resize, frozen=True):
    """Resized to [height, width], or so that the shorter side has `size` pixels and the aspect ratio stays.
    "bilinear", "bicubic" and "box" give Pillow's and torchvision's pixels (antialiased). "nearest" creates no
    new values: use it for masks. "fast" is close to "bilinear", and decodes a large JPEG at a smaller
    size."""


def _shorter_to(side: int, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) with `side` as the shorter one, the other rounded down (as torchvision does)."""
    if height <= width:
        return side, max(1, side * width // height)
    return max(1, side * height // width), side


@operation("center_crop", Parameter("size", size))
class CenterCropFloor(msgspec.Struct, frozen=True):
    """Version 1: an odd margin is rounded down."""

    size: tuple[int, int]

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        height, width = field.shape[0], field.shape[1]
        if (height is not None and height < self.size[0]) or (width is not None and width < self.size[1]):
            raise ValueError(f"cannot cut {self.size[0]}×{self.size[1]} out of {field}; resize first")
        return _resized_type(field, self.size)

    def window(self, height: int, width: int, random: KeyedRandom) -> ResampleWindow:
        rows, columns = self.size
        if height < rows or width < columns:
            raise BadSampleError(
                f"an image of {width}×{height} is smaller than the crop of {columns}×{rows}; resize"
            )
        return ResampleWindow(
            self._half(height - rows), self._half(width - columns), rows, columns, rows, columns
        )

    @staticmethod
    def _half(margin: int) -> int:
        return margin // 2

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return resample_window(value, self.window(value.shape[0], value.shape[1], random))

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        return self.window(height, width, random).motion()


@operation(
    "center_crop",
    Parameter("size", size),
    version="2",
    takes="[h, w, c] of any dtype",
    gives="the same dtype [height, width, c]",
    refuses="the image is smaller than the crop",
)
class CenterCrop(CenterCropFloor, frozen=True):
    """The central [height, width] pixels; a smaller image is a bad sample. Half of an odd margin is rounded
    to the even number, as torchvision does."""

    @staticmethod
    def _half(margin: int) -> int:
        return round(margin / 2)


_SCALE = Parameter("scale", interval(0.0, 1.0), (0.08, 1.0))
_RATIO = Parameter("ratio", interval(0.0, 100.0), (0.75, 1.3333333333333333))


@operation(
    "random_resized_crop",
    Parameter("size", size),
    _SCALE,
    _RATIO,
    Parameter("filter", _filter_1, "fast"),
    random=True,
    moves=True,
)
class RandomResizedCropFast(msgspec.Struct, frozen=True):
    """Version 1, with the filters "antialias" (which is "fast") and "nearest"."""

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    filter: Filter = "fast"

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        _check_dtype(field, self.filter)
        return _resized_type(field, self.size)

    def window(self, height: int, width: int, random: KeyedRandom) -> ResampleWindow:
        area = height * width
        for _ in range(_ATTEMPTS):
            wanted = area * random.uniform(*self.scale)
            ratio = random.log_uniform(*self.ratio)
            columns, rows = _rounded_root(wanted * ratio), _rounded_root(wanted / ratio)
            if 0 < columns <= width and 0 < rows <= height:
                top, left = random.integer(height - rows + 1), random.integer(width - columns + 1)
                return ResampleWindow(top, left, rows, columns, *self.size, self.filter)
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> ResampleWindow:
        """Return the largest central window of an allowed aspect ratio, for when no draw fits."""
        rows, columns = height, width
        if width < self.ratio[0] * height:
            rows = max(1, min(height, math.floor(width / self.ratio[0] + 0.5)))
        elif width > self.ratio[1] * height:
            columns = max(1, min(width, math.floor(height * self.ratio[1] + 0.5)))
        top, left = (height - rows) // 2, (width - columns) // 2
        return ResampleWindow(top, left, rows, columns, *self.size, self.filter)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return resample_window(value, self.window(value.shape[0], value.shape[1], random))

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        return self.window(height, width, random).motion()


@operation(
    "random_resized_crop",
    Parameter("size", size),
    _SCALE,
    _RATIO,
    Parameter("filter", _filter, "fast"),
    version="2",
    random=True,
    moves=True,
    takes="[h, w, c] of uint8; of other dtypes as in `resize`",
    gives="the same dtype [height, width, c]",
)
class RandomResizedCrop(RandomResizedCropFast, frozen=True):
    """A random part of the image, with a share of the area in `scale` and width:height in `ratio`, resampled
    to `size` by a `filter` of `resize`; for masks, use "nearest"."""


def _rounded_root(value: float) -> int:
    return math.floor(math.sqrt(value) + 0.5)
