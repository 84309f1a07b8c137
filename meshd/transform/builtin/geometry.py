"""Where pixels stand: vertical mirror, padding, random windows, rotation.

Law: the size of the result follows from the arguments and the image's size, never from a draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from meshd.transform.builtin.resampling import pixels
from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import channels_of, image
from meshd.transform.parameters import MAX_SIDE, Parameter, pair, probability, sides, size, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom

    Pixels = npt.NDArray[np.uint8]


def _check_image(field: FieldType) -> None:
    if field.layout != "hwc":
        what = "put it before to_chw" if field.layout == "chw" else "decode it first"
        raise ValueError(f"needs an image with its channels last, not {field}; {what}")


@operation(
    "vflip",
    Parameter("p", probability, 0.5),
    random=True,
    takes="uint8 [h, w, c]",
    gives="the same type",
)
@dataclass(frozen=True, slots=True)
class VerticalFlip:
    """Top and bottom swapped with probability `p`."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return pixels(cv2.flip(value, 0)) if random.chance(self.p) else value


@operation(
    "pad",
    Parameter("border", sides),
    Parameter("fill", whole(0, 255), 0),
    takes="uint8 [h, w, c]",
    gives="uint8 [h + top + bottom, w + left + right, c]",
    refuses="a side would exceed 16,384 pixels",
)
@dataclass(frozen=True, slots=True)
class Pad:
    """A border of `fill` around the image: one width in pixels, or [top, right, bottom, left]."""

    border: tuple[int, int, int, int]
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        top, right, bottom, left = self.border
        height, width = field.shape[0], field.shape[1]
        return image(
            None if height is None else height + top + bottom,
            None if width is None else width + left + right,
            channels_of(field),
        )

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        top, right, bottom, left = self.border
        if value.shape[0] + top + bottom > MAX_SIDE or value.shape[1] + left + right > MAX_SIDE:
            raise BadSampleError(f"the padded image would exceed {MAX_SIDE} pixels a side")
        shape = value.shape[0] + top + bottom, value.shape[1] + left + right, value.shape[2]
        padded = np.full(shape, self.fill, dtype=np.uint8)
        padded[top : top + value.shape[0], left : left + value.shape[1]] = value
        return padded


@operation(
    "random_crop",
    Parameter("size", size),
    random=True,
    takes="uint8 [h, w, c]",
    gives="uint8 [height, width, c]",
    refuses="the image is smaller than the crop",
)
@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A random window of [height, width] pixels, not resampled; a smaller image is a bad sample."""

    size: tuple[int, int]

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        for known, wanted in zip(field.shape[:2], self.size, strict=True):
            if known is not None and known < wanted:
                raise ValueError(f"cannot cut {self.size} out of {field}; pad or resize first")
        return image(*self.size, channels_of(field))

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        rows, columns = self.size
        height, width = value.shape[:2]
        if height < rows or width < columns:
            raise BadSampleError(f"an image of {width}×{height} is smaller than the crop of {columns}×{rows}")
        top, left = random.integer(height - rows + 1), random.integer(width - columns + 1)
        return np.ascontiguousarray(value[top : top + rows, left : left + columns])


@operation(
    "rotate",
    Parameter("degrees", pair(-360.0, 360.0)),
    Parameter("fill", whole(0, 255), 0),
    random=True,
    takes="uint8 [h, w, c]",
    gives="the same type",
)
@dataclass(frozen=True, slots=True)
class Rotate:
    """Turned about its middle by an angle of [lowest, highest] degrees, counter-clockwise; bilinear, the size
    kept, corners `fill`."""

    degrees: tuple[float, float]
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        _check_image(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return affine(value, rotation(value, random.uniform(*self.degrees)), self.fill)


def rotation(value: Pixels, degrees: float) -> npt.NDArray[np.float64]:
    """Source coordinates of every target pixel, as [2, 3], for a turn about the middle."""
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = (value.shape[1] - 1) / 2, (value.shape[0] - 1) / 2
    return np.array([[cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]])


def affine(value: Pixels, source: npt.NDArray[np.float64], fill: int) -> Pixels:
    """The image seen through `source` ([2, 3]: target to source coordinates); bilinear, same size."""
    height, width = value.shape[:2]
    warped: Any = cv2.warpAffine(
        value,
        source,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(fill,) * 4,
    )
    return pixels(warped)
