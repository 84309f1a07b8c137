"""Mirror images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from meshd.transform.builtin.layouts import ToChw, split_into, splits_into
from meshd.transform.builtin.resampling import pixels
from meshd.transform.parameters import Parameter, probability
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.fieldtypes import FieldType
    from meshd.transform.registry import Operation
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
        return _mirrored(value) if random.chance(self.p) else value

    def fuse(self, following: Operation) -> Operation | None:
        return _FlippedToChw(self, following) if isinstance(following, ToChw) else None


@dataclass(frozen=True, slots=True)
class _FlippedToChw:
    """hflip and to_chw: the planes are swapped on their way into the row, 44 µs for 224×224 RGB in place of
    70."""

    flip: HorizontalFlip
    planes: ToChw

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return self.planes.apply(self.flip.apply(value, random), random)

    def place(self, value: npt.NDArray[Any], row: npt.NDArray[Any], random: KeyedRandom) -> None:
        if not random.chance(self.flip.p):
            self.planes.place(value, row, random)
        elif splits_into(value, row):
            planes = np.empty_like(row)
            split_into(value, planes)
            lines = -1, row.shape[2]
            cv2.flip(planes.reshape(lines), 1, row.reshape(lines))
        else:
            self.planes.place(_mirrored(value), row, random)


def _mirrored(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return pixels(cv2.flip(value, 1))
