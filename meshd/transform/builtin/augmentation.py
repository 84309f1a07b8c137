"""Color augmentation: grayscale, color jitter and RandAugment.

Law: the color arithmetic is Pillow's, on uint8, so results can be checked with Pillow alone. Draws are
made in the same order for every image. The set of RandAugment operations and its order are part of the
version. Source: RandAugment (Cubuk et al., 2019), with torchvision's `_augmentation_space` for 31
strengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from meshd.transform.builtin.geometry import affine, rotation
from meshd.transform.builtin.portable_pixels import enhance
from meshd.transform.op_types import channels_of, check_image, image
from meshd.transform.parameters import Parameter, number, probability, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

    Pixels = npt.NDArray[np.uint8]


def require_rgb(field: FieldType) -> None:
    """Raises ValueError unless the type is an image with 3 channels, in the last axis."""
    check_image(field)
    if channels_of(field) != 3:
        raise ValueError(f"needs 3 channels, not {field}")
    if field.dtype != "uint8":
        raise ValueError(f"needs uint8, not {field}; put it before normalize and cast")


@operation(
    "grayscale",
    Parameter("p", probability, 1.0),
    random=True,
    takes="uint8 [h, w, 3]",
    gives="the same type",
)
class Grayscale(msgspec.Struct, frozen=True):
    """With probability `p`, the ITU-R 601 luma in all three channels; the shape stays [height, width, 3]."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        require_rgb(field)
        return image(field.shape[0], field.shape[1], 3)

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        if not self.draws(random)["applied"]:
            return value
        luma = np.asarray(Image.fromarray(value).convert("L"))
        return np.repeat(luma[:, :, None], 3, axis=2)

    def draws(self, random: KeyedRandom) -> dict[str, bool]:
        return {"applied": random.chance(self.p)}


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
class ColorJitter(msgspec.Struct, frozen=True):
    """Brightness, contrast and saturation scaled by factors in [max(0, 1−x), 1+x] and hue turned by [−x, x]
    of the color circle, in random order, as torchvision's ColorJitter does."""

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def infer(self, field: FieldType) -> FieldType:
        require_rgb(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        for name, drawn in self.draws(random).items():
            picture = Image.fromarray(value)
            value = turn_hue(picture, drawn) if name == "hue" else enhance(_ENHANCERS[name](picture), drawn)
        return value

    def draws(self, random: KeyedRandom) -> dict[str, float]:
        """Return the factors, and the turn of the hue, in the order in which they are applied."""
        strengths = (self.brightness, self.contrast, self.saturation)
        drawn = [random.uniform(max(0.0, 1.0 - strength), 1.0 + strength) for strength in strengths]
        drawn.append(random.uniform(-self.hue, self.hue))
        given = (*strengths, self.hue)
        return {_CHANGED[which]: drawn[which] for which in _shuffle(4, random) if given[which]}


_CHANGED = ("brightness", "contrast", "saturation", "hue")
_ENHANCERS: dict[str, Any] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


def turn_hue(picture: Image.Image, turn: float) -> Pixels:
    """Return the image with every hue turned by `turn` of the color circle, in 256 steps."""
    hue, saturation, value = picture.convert("HSV").split()
    moved = np.asarray(hue) + np.uint8(round(turn * 255) % 256)
    turned = Image.merge("HSV", (Image.fromarray(moved), saturation, value))
    return np.asarray(turned.convert("RGB"))


def _shuffle(count: int, random: KeyedRandom) -> list[int]:
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = random.integer(last + 1)
        order[last], order[other] = order[other], order[last]
    return order


STRENGTHS = 31
Change = Callable[["Pixels", float, int], "Pixels"]
"""(image, strength in [−1, 1], fill) → image; a change without a direction uses the absolute strength."""


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
        return enhance(kind(Image.fromarray(value)), 1.0 + 0.9 * strength)

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
    moves=True,
    takes="uint8 [h, w, 3]",
    gives="the same type",
    refuses="a geometric change is drawn for an image of more than 32,000 pixels a side",
)
class RandAugment(msgspec.Struct, frozen=True):
    """`count` changes in sequence, each drawn from a set of fourteen, with `strength` 0…30 in either
    direction."""

    count: int
    strength: int
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        require_rgb(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        for which, strength in self._draw_changes(random):
            value = CHANGES[which][1](value, strength, self.fill)
        return value

    def draws(self, random: KeyedRandom) -> dict[str, list[str]]:
        return {
            "changes": [
                f"{CHANGES[which][0]} {strength:+.2f}" for which, strength in self._draw_changes(random)
            ]
        }

    def _draw_changes(self, random: KeyedRandom) -> list[tuple[int, float]]:
        size = self.strength / (STRENGTHS - 1)
        return [
            (random.integer(len(CHANGES)), -size if random.chance(0.5) else size) for _ in range(self.count)
        ]
