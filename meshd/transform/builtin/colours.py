"""Colours: grayscale, and jitter of brightness, contrast, saturation and hue.

Law: the arithmetic is Pillow's, on uint8, so that a result can be checked with Pillow alone. Every draw is
made in the same order whatever the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageEnhance

from meshd.transform.fieldtypes import channels_of, image
from meshd.transform.parameters import Parameter, number, probability
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom

    Pixels = npt.NDArray[np.uint8]


def check_colours(field: FieldType) -> None:
    """Raise ValueError unless it is an image with its 3 channels last."""
    if field.layout != "hwc":
        what = "put it before to_chw" if field.layout == "chw" else "decode it first"
        raise ValueError(f"needs an image with its channels last, not {field}; {what}")
    if channels_of(field) != 3:
        raise ValueError(f"needs 3 channels, not {field}")


@operation(
    "grayscale",
    Parameter("p", probability, 1.0),
    random=True,
    takes="uint8 [h, w, 3]",
    gives="the same type",
)
@dataclass(frozen=True, slots=True)
class Grayscale:
    """With probability `p` the ITU-R 601 luma in all three channels; the shape stays [height, width, 3]."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        check_colours(field)
        return image(field.shape[0], field.shape[1], 3)

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        if not random.chance(self.p):
            return value
        luma = np.asarray(Image.fromarray(value).convert("L"))
        return np.repeat(luma[:, :, None], 3, axis=2)


@operation(
    "color_jitter",
    Parameter("brightness", number(0.0, 10.0), 0.0),
    Parameter("contrast", number(0.0, 10.0), 0.0),
    Parameter("saturation", number(0.0, 10.0), 0.0),
    Parameter("hue", number(0.0, 0.5), 0.0),
    random=True,
    takes="uint8 [h, w, 3]",
    gives="the same type",
)
@dataclass(frozen=True, slots=True)
class ColorJitter:
    """Brightness, contrast and saturation by factors of [max(0, 1−x), 1+x], hue by a turn of [−x, x] of the
    circle, in a random order, as torchvision's ColorJitter does."""

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def infer(self, field: FieldType) -> FieldType:
        check_colours(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        strengths = (self.brightness, self.contrast, self.saturation)
        factors = [random.uniform(max(0.0, 1.0 - strength), 1.0 + strength) for strength in strengths]
        turn = random.uniform(-self.hue, self.hue)
        picture = Image.fromarray(value)
        for which in _shuffled(4, random):
            if which == 3:
                picture = turn_hue(picture, turn) if self.hue else picture
            elif strengths[which]:
                picture = _ENHANCERS[which](picture).enhance(factors[which])
        return np.asarray(picture)


_ENHANCERS: tuple[Any, ...] = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def turn_hue(picture: Image.Image, turn: float) -> Image.Image:
    """Every hue moved by `turn` of the circle, in 256 steps."""
    hue, saturation, value = picture.convert("HSV").split()
    moved = np.asarray(hue) + np.uint8(round(turn * 255) % 256)
    return Image.merge("HSV", (Image.fromarray(moved), saturation, value)).convert("RGB")


def _shuffled(count: int, random: KeyedRandom) -> list[int]:
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = random.integer(last + 1)
        order[last], order[other] = order[other], order[last]
    return order
