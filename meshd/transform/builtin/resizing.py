"""Ops that keep a window of an image and give it a size: resize, center_crop, random_resized_crop.

Law: a window is computed from the full-size image's height and width alone, so that a decoder can be asked
for less than the whole (see `decoding`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from meshd.transform.builtin.resampling import Window, cut
from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import channels_of, image
from meshd.transform.parameters import MAX_SIDE, Parameter, choice, interval, side_or_size, size
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom

_ATTEMPTS = 10
Filter = Literal["antialias", "nearest"]
FILTER = choice("antialias", "nearest")


@runtime_checkable
class Windowing(Protocol):
    """An op that is `cut(image, window(height, width, random))`."""

    def window(self, height: int, width: int, random: KeyedRandom) -> Window:
        """What is kept of an image of this size. Raises BadSampleError when it does not fit."""
        ...


def _check_image(field: FieldType) -> None:
    if field.layout != "hwc":
        what = "put it before to_chw" if field.layout == "chw" else "decode it first"
        raise ValueError(f"needs an image with its channels last, not {field}; {what}")


@operation(
    "resize",
    Parameter("size", side_or_size),
    Parameter("filter", FILTER, "antialias"),
    takes="uint8 [h, w, c]",
    gives="uint8 [height, width, c]",
    refuses="a side would exceed 16,384 pixels",
)
@dataclass(frozen=True, slots=True)
class Resize:
    """To [height, width]; or the shorter side to `size` pixels, the shape kept. With `filter` "nearest" no
    new values come about: for masks."""

    size: int | tuple[int, int]
    filter: Filter = "antialias"

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        if isinstance(self.size, tuple):
            return image(*self.size, channels_of(field))
        height, width = field.shape[0], field.shape[1]
        if height is None or width is None:
            return image(None, None, channels_of(field))
        return image(*_shorter_to(self.size, height, width), channels_of(field))

    def window(self, height: int, width: int, random: KeyedRandom) -> Window:
        out = self.size if isinstance(self.size, tuple) else _shorter_to(self.size, height, width)
        if max(out) > MAX_SIDE:
            raise BadSampleError(f"an image of {width}×{height} would become {out[1]}×{out[0]} pixels")
        return Window(0, 0, height, width, *out, self.filter == "nearest")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return cut(value, self.window(value.shape[0], value.shape[1], random))


def _shorter_to(side: int, height: int, width: int) -> tuple[int, int]:
    """(height, width) with the shorter one `side`, the other rounded down (as torchvision does)."""
    if height <= width:
        return side, max(1, side * width // height)
    return max(1, side * height // width), side


@operation(
    "center_crop",
    Parameter("size", size),
    takes="uint8 [h, w, c]",
    gives="uint8 [height, width, c]",
    refuses="the image is smaller than the crop",
)
@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The middle [height, width] pixels; a smaller image is a bad sample."""

    size: tuple[int, int]

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        height, width = field.shape[0], field.shape[1]
        if (height is not None and height < self.size[0]) or (width is not None and width < self.size[1]):
            raise ValueError(f"cannot cut {self.size[0]}×{self.size[1]} out of {field}; resize first")
        return image(*self.size, channels_of(field))

    def window(self, height: int, width: int, random: KeyedRandom) -> Window:
        rows, columns = self.size
        if height < rows or width < columns:
            raise BadSampleError(
                f"an image of {width}×{height} is smaller than the crop of {columns}×{rows}; resize"
            )
        return Window((height - rows) // 2, (width - columns) // 2, rows, columns, rows, columns)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return cut(value, self.window(value.shape[0], value.shape[1], random))


@operation(
    "random_resized_crop",
    Parameter("size", size),
    Parameter("scale", interval(0.0, 1.0), (0.08, 1.0)),
    Parameter("ratio", interval(0.0, 100.0), (0.75, 1.3333333333333333)),
    Parameter("filter", FILTER, "antialias"),
    random=True,
    takes="uint8 [h, w, c]",
    gives="uint8 [height, width, c]",
)
@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random part of the area in `scale` and of width:height in `ratio`, resampled to `size`; for masks
    with `filter` "nearest"."""

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    filter: Filter = "antialias"

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        return image(*self.size, channels_of(field))

    def window(self, height: int, width: int, random: KeyedRandom) -> Window:
        area = height * width
        for _ in range(_ATTEMPTS):
            wanted = area * random.uniform(*self.scale)
            ratio = random.log_uniform(*self.ratio)
            columns, rows = _rounded_root(wanted * ratio), _rounded_root(wanted / ratio)
            if 0 < columns <= width and 0 < rows <= height:
                top, left = random.integer(height - rows + 1), random.integer(width - columns + 1)
                return Window(top, left, rows, columns, *self.size, self.filter == "nearest")
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> Window:
        """The largest central part whose shape is allowed: when no draw fitted."""
        rows, columns = height, width
        if width < self.ratio[0] * height:
            rows = max(1, min(height, math.floor(width / self.ratio[0] + 0.5)))
        elif width > self.ratio[1] * height:
            columns = max(1, min(width, math.floor(height * self.ratio[1] + 0.5)))
        top, left = (height - rows) // 2, (width - columns) // 2
        return Window(top, left, rows, columns, *self.size, self.filter == "nearest")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return cut(value, self.window(value.shape[0], value.shape[1], random))


def _rounded_root(value: float) -> int:
    return math.floor(math.sqrt(value) + 0.5)
