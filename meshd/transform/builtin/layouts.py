"""Where the channels of an image stand: first (PyTorch's habit) or last (the decoder's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from meshd.transform.fieldtypes import FieldType, channels_of
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.randomness import KeyedRandom


@operation(
    "to_chw",
    takes="uint8 or float [h, w, c]",
    gives="the same dtype [c, h, w]",
)
@dataclass(frozen=True, slots=True)
class ToChw:
    """Channels first: [height, width, channels] to [channels, height, width]."""

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "hwc":
            raise ValueError(f"needs an image with its channels last, not {field}")
        shape = (channels_of(field), field.shape[0], field.shape[1])
        return FieldType(field.kind, field.dtype, shape, "chw")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return np.ascontiguousarray(value.transpose(2, 0, 1))

    def place(self, value: npt.NDArray[Any], row: npt.NDArray[Any], random: KeyedRandom) -> None:
        if splits_into(value, row):
            split_into(value, row)
        else:
            np.copyto(row, value.transpose(2, 0, 1), casting="no")


def splits_into(value: npt.NDArray[Any], row: npt.NDArray[Any]) -> bool:
    """Whether `split_into` can do it."""
    planes = value.shape[2] == 3 and value.dtype == row.dtype and value.dtype in (np.uint8, np.float32)
    return bool(planes and row.flags.c_contiguous and value.shape[:2] == row.shape[1:])


def split_into(value: npt.NDArray[Any], row: npt.NDArray[Any]) -> None:
    """Planes straight into the row: 9 µs for 224×224 RGB, where a transposing copy takes 44."""
    cv2.split(value, [row[0], row[1], row[2]])


@operation(
    "to_hwc",
    takes="uint8 or float [c, h, w]",
    gives="the same dtype [h, w, c]",
)
@dataclass(frozen=True, slots=True)
class ToHwc:
    """Channels last: [channels, height, width] to [height, width, channels]."""

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "chw":
            raise ValueError(f"needs an image with its channels first, not {field}")
        shape = (field.shape[1], field.shape[2], channels_of(field))
        return FieldType(field.kind, field.dtype, shape, "hwc")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return np.ascontiguousarray(value.transpose(1, 2, 0))
