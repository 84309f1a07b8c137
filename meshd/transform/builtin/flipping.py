"""Mirror images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2

from meshd.transform.builtin.resampling import pixels
from meshd.transform.parameters import Parameter, probability
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshwire.randomness import KeyedRandom


@operation(
    "hflip",
    Parameter("p", probability, 0.5),
    random=True,
    takes="uint8 [h, w, c]",
    gives="the same type",
)
@dataclass(frozen=True, slots=True)
class HorizontalFlip:
    """Left and right swapped with probability `p`."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "hwc":
            what = "put it before to_chw" if field.layout == "chw" else "decode it first"
            raise ValueError(f"needs an image with its channels last, not {field}; {what}")
        return field

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return pixels(cv2.flip(value, 1)) if random.chance(self.p) else value
