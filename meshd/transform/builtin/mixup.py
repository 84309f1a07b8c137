"""Mixup and CutMix: mix the two rows of a pair.

Law: both rows of a pair draw the same weight and rectangle independently, so a pair is mixed
identically wherever it is computed. Weights are exact in binary: the weight in the frame is the one
applied. Sources: mixup (Zhang et al., 2017), CutMix (Yun et al., 2019).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cv2
import msgspec
import numpy as np

from meshd.transform.op_types import check_image
from meshd.transform.parameters import Parameter, fields, number, probability
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

    Values = npt.NDArray[Any]

STEPS = 256  # steps of a mixup weight: products with 8 bits of color stay exact in float32
_BLENDED = ("uint8", "float16", "float32")
_ALPHA = number(0.01, 100.0)


def _check_blended(field: FieldType) -> None:
    if field.kind not in ("image", "array") or field.dtype not in _BLENDED:
        raise ValueError(f"mixes images and arrays of {', '.join(_BLENDED)}, not {field}")
    _check_fixed(field)


def _check_pasted(field: FieldType) -> None:
    check_image(field)
    _check_fixed(field)


def _check_fixed(field: FieldType) -> None:
    if field.fixed is None:
        raise ValueError(f"both rows need the same shape, but this field is {field}; crop or resize first")


def blend(value: Values, other: Values, share: int) -> Values:
    """Return share/256 of `value` plus the rest of `other`.

    uint8 is rounded half to even, floats are rounded once to their type.
    """
    if value.dtype == np.uint8:
        weight = share / STEPS
        flat: Values = cv2.addWeighted(value.reshape(-1, 1), weight, other.reshape(-1, 1), 1 - weight, 0.0)
        return flat.reshape(value.shape)
    own, rest = np.float32(share / STEPS), np.float32(1 - share / STEPS)
    mixed = value.astype(np.float32) * own + other.astype(np.float32) * rest
    return mixed.astype(value.dtype, copy=False)


def mix_up(value: Values, other: Values, alpha: float, random: KeyedRandom) -> tuple[Values, float]:
    """Return (blend, weight); the weight is drawn from Beta(alpha, alpha) in steps of 1/256."""
    share = math.floor(random.symmetric_beta(alpha) * STEPS + 0.5)
    return blend(value, other, share), share / STEPS


def cut_mix(value: Values, other: Values, alpha: float, random: KeyedRandom) -> tuple[Values, float]:
    """Return (`value` with a rectangle of `other`, the share of its own pixels)."""
    height, width = value.shape[:2]
    side = math.sqrt(1.0 - random.symmetric_beta(alpha))
    top, bottom = _span(height, side, random)
    left, right = _span(width, side, random)
    mixed = value.copy()
    mixed[top:bottom, left:right] = other[top:bottom, left:right]
    return mixed, 1.0 - (bottom - top) * (right - left) / (height * width)


def _span(extent: int, side: float, random: KeyedRandom) -> tuple[int, int]:
    """Return a span of `side` times the extent around a random pixel, clipped to the extent."""
    length, middle = math.floor(extent * side), random.integer(extent)
    first = middle - length // 2
    return max(0, first), min(extent, first + length)


@operation(
    "mixup",
    Parameter("alpha", _ALPHA, 0.2),
    Parameter("p", probability, 1.0),
    Parameter("labels", fields, None),
    random=True,
    takes="uint8, float16 or float32 of a fixed shape",
    gives="the same type; FIELD.weight float32, LABEL.other int64",
)
class Mixup(msgspec.Struct, frozen=True):
    """With probability `p`, a blend of the row and its neighbour in the batch, with a weight drawn from
    Beta(alpha, alpha)."""

    alpha: float
    p: float
    labels: tuple[str, ...] | None

    def infer(self, field: FieldType) -> FieldType:
        _check_blended(field)
        return field

    def apply(self, value: Values, random: KeyedRandom) -> Values:
        return value

    def mix(self, value: Values, other: Values, random: KeyedRandom) -> tuple[Values, float]:
        if not random.chance(self.p):
            return value, 1.0
        return mix_up(value, other, self.alpha, random)


@operation(
    "cutmix",
    Parameter("alpha", _ALPHA, 1.0),
    Parameter("p", probability, 1.0),
    Parameter("labels", fields, None),
    random=True,
    takes="an image [h, w, c] of a fixed shape",
    gives="the same type; FIELD.weight float32, LABEL.other int64",
)
class Cutmix(msgspec.Struct, frozen=True):
    """With probability `p`, the row with a rectangle of its neighbour in the batch, whose share of the area
    is drawn from Beta(alpha, alpha)."""

    alpha: float
    p: float
    labels: tuple[str, ...] | None

    def infer(self, field: FieldType) -> FieldType:
        _check_pasted(field)
        return field

    def apply(self, value: Values, random: KeyedRandom) -> Values:
        return value

    def mix(self, value: Values, other: Values, random: KeyedRandom) -> tuple[Values, float]:
        if not random.chance(self.p):
            return value, 1.0
        return cut_mix(value, other, self.alpha, random)


@operation(
    "mixup_or_cutmix",
    Parameter("mixup", _ALPHA, 0.8),
    Parameter("cutmix", _ALPHA, 1.0),
    Parameter("switch", probability, 0.5),
    Parameter("p", probability, 1.0),
    Parameter("labels", fields, None),
    random=True,
    takes="uint8, float16 or float32 image [h, w, c] of a fixed shape",
    gives="the same type; FIELD.weight float32, LABEL.other int64",
)
class MixupOrCutmix(msgspec.Struct, frozen=True):
    """With probability `p`, one of the two, drawn for each pair: cutmix with probability `switch`, else
    mixup. `mixup` and `cutmix` are their alphas."""

    mixup: float
    cutmix: float
    switch: float
    p: float
    labels: tuple[str, ...] | None

    def infer(self, field: FieldType) -> FieldType:
        _check_pasted(field)
        _check_blended(field)
        return field

    def apply(self, value: Values, random: KeyedRandom) -> Values:
        return value

    def mix(self, value: Values, other: Values, random: KeyedRandom) -> tuple[Values, float]:
        if not random.chance(self.p):
            return value, 1.0
        if random.chance(self.switch):
            return cut_mix(value, other, self.cutmix, random)
        return mix_up(value, other, self.mixup, random)
