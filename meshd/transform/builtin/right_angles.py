"""The op `rotate90`: rotations by right angles, which change no value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import Motion
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, whole_or_none
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.plan.keyed_random import KeyedRandom


@operation(
    "rotate90",
    Parameter("turns", whole_or_none(0, 3), None),
    random=True,
    moves=True,
    takes="[h, w, c] of any dtype; a square without `turns`",
    gives="the same dtype [h, w, c], or [w, h, c] after an odd number of turns",
    refuses="the image is not square, and `turns` is null",
)
class Rotate90(msgspec.Struct, frozen=True):
    """Rotated counter-clockwise by right angles: by a random number of them, which needs a square, or by the
    number `turns`."""

    turns: int | None

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "hwc":
            raise ValueError(f"needs an image with its channels last, not {field}")
        height, width, channels = field.shape
        if self.turns is None and height != width:
            raise ValueError(f"needs a square to turn at random, not {field}; crop one, or give turns")
        sides = (width, height) if (self.turns or 0) % 2 else (height, width)
        return FieldType(field.kind, field.dtype, (*sides, channels), field.layout)

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        turns = self._draw_turns(value.shape[0], value.shape[1], random)
        return np.ascontiguousarray(np.rot90(value, turns))

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion | None:
        turns = self._draw_turns(height, width, random)
        return (
            None,
            Motion(width, height, xx=0.0, xy=1.0, yx=-1.0, yy=0.0, y0=width),
            Motion(height, width, xx=-1.0, x0=width, yy=-1.0, y0=height),
            Motion(width, height, xx=0.0, xy=-1.0, x0=height, yx=1.0, yy=0.0),
        )[turns]

    def _draw_turns(self, height: int, width: int, random: KeyedRandom) -> int:
        if self.turns is not None:
            return self.turns
        if height != width:
            raise BadSampleError(f"an image of {width}×{height} is not a square; give turns, or crop it")
        return random.integer(4)
