"""Augmentation policies: some of a fixed set of changes, drawn at random, all of one strength.

Law: the set and its order are part of the version. Source: RandAugment (Cubuk et al., 2019), with the ranges
of torchvision's `_augmentation_space` for 31 strengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from meshd.transform.builtin.colours import check_colours
from meshd.transform.builtin.geometry import affine, rotation
from meshd.transform.parameters import Parameter, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom

    Pixels = npt.NDArray[np.uint8]

STRENGTHS = 31
Change = Callable[["Pixels", float, int], "Pixels"]
"""(image, strength of [−1, 1], fill) → image; a change without a direction takes the strength's size."""


def _shear(horizontal: bool) -> Change:
    def change(value: Pixels, strength: float, fill: int) -> Pixels:
        slope = 0.3 * strength
        across, down = (slope, 0.0) if horizontal else (0.0, slope)
        source = np.array([[1.0, across, 0.0], [down, 1.0, 0.0]])
        return affine(value, source, fill)

    return change


def _translate(axis: int) -> Change:
    def change(value: Pixels, strength: float, fill: int) -> Pixels:
        distance = 150.0 / 331.0 * value.shape[1 - axis] * strength
        source = np.array([[1.0, 0.0, distance if axis == 0 else 0.0], [0.0, 1.0, distance if axis else 0.0]])
        return affine(value, source, fill)

    return change


def _rotate(value: Pixels, strength: float, fill: int) -> Pixels:
    return affine(value, rotation(value, 30.0 * strength), fill)


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Change:
    def change(value: Pixels, strength: float, fill: int) -> Pixels:
        return np.asarray(kind(Image.fromarray(value)).enhance(1.0 + 0.9 * strength))

    return change


def _posterize(value: Pixels, strength: float, fill: int) -> Pixels:
    return np.asarray(ImageOps.posterize(Image.fromarray(value), 8 - round(4 * abs(strength))))


def _solarize(value: Pixels, strength: float, fill: int) -> Pixels:
    return np.asarray(ImageOps.solarize(Image.fromarray(value), round(255 - 255 * abs(strength))))


def _autocontrast(value: Pixels, strength: float, fill: int) -> Pixels:
    return np.asarray(ImageOps.autocontrast(Image.fromarray(value)))


def _equalize(value: Pixels, strength: float, fill: int) -> Pixels:
    return np.asarray(ImageOps.equalize(Image.fromarray(value)))


def _nothing(value: Pixels, strength: float, fill: int) -> Pixels:
    return value


CHANGES: tuple[tuple[str, Change], ...] = (
    ("identity", _nothing),
    ("shear_x", _shear(horizontal=True)),
    ("shear_y", _shear(horizontal=False)),
    ("translate_x", _translate(0)),
    ("translate_y", _translate(1)),
    ("rotate", _rotate),
    ("brightness", _enhance(ImageEnhance.Brightness)),
    ("color", _enhance(ImageEnhance.Color)),
    ("contrast", _enhance(ImageEnhance.Contrast)),
    ("sharpness", _enhance(ImageEnhance.Sharpness)),
    ("posterize", _posterize),
    ("solarize", _solarize),
    ("autocontrast", _autocontrast),
    ("equalize", _equalize),
)


@operation(
    "rand_augment",
    Parameter("count", whole(1, 16), 2),
    Parameter("strength", whole(0, STRENGTHS - 1), 9),
    Parameter("fill", whole(0, 255), 0),
    random=True,
    takes="uint8 [h, w, 3]",
    gives="the same type",
    refuses="a change that moves pixels is drawn for an image of more than 32,000 a side",
)
@dataclass(frozen=True, slots=True)
class RandAugment:
    """`count` changes one after the other, each drawn from the fourteen of the set, of `strength` 0…30 in
    either direction."""

    count: int
    strength: int
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        check_colours(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        size = self.strength / (STRENGTHS - 1)
        for _ in range(self.count):
            _, change = CHANGES[random.integer(len(CHANGES))]
            sign = -1.0 if random.chance(0.5) else 1.0
            value = change(value, sign * size, self.fill)
        return value
