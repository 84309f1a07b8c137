"""What a field holds at a point of its chain: kind, dtype, shape. Known before a byte is read.

Invariant: a type with no None in its shape is delivered as one dense tensor; any other as ragged data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["bytes", "image", "array", "label"]
Layout = Literal["", "hwc", "chw"]


@dataclass(frozen=True, slots=True)
class FieldType:
    """`shape`: None where samples differ. `layout`: of images only; channels last ("hwc") or first
    ("chw").
    """

    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]
    layout: Layout = ""

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """The shape when every sample has the same one, else None."""
        known = tuple(extent for extent in self.shape if extent is not None)
        return known if len(known) == len(self.shape) else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample of a fixed type; 0 for a ragged one."""
        shape = self.fixed
        return 0 if shape is None else math.prod(shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        sizes = "×".join("?" if extent is None else str(extent) for extent in self.shape)
        return f"{self.kind}{f' ({self.layout})' if self.layout else ''} {self.dtype}[{sizes}]"


def mismatch(field: FieldType, value: Any) -> str:
    """What is wrong with a value that should be of type `field`; "" when nothing is."""
    if isinstance(value, np.ndarray):
        right = value.dtype == field.dtype and _fits(field.shape, value.shape)
        return "" if right else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, bytes):
        right = field.dtype == "uint8" and _fits(field.shape, (len(value),))
        return "" if right else f"{len(value)} bytes"
    plain = isinstance(value, int | float | np.generic) and not isinstance(value, bool)
    if plain and not field.shape:
        return ""
    return "" if field.kind not in _CHECKED else f"a {type(value).__name__}"


def _fits(promised: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    if len(promised) != len(shape):
        return False
    return all(want is None or want == have for want, have in zip(promised, shape, strict=True))


_CHECKED = frozenset({"bytes", "image", "array", "label"})
BYTES = FieldType("bytes", "uint8", (None,))
LABEL = FieldType("label", "int64", ())


def image(height: int | None, width: int | None, channels: int, layout: Layout = "hwc") -> FieldType:
    """An uint8 image; height and width in pixels, None when they differ from sample to sample."""
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    return FieldType("image", "uint8", shape, layout)


def channels_of(field: FieldType) -> int:
    """Channels of an image type: always known."""
    found = field.shape[0] if field.layout == "chw" else field.shape[2]
    assert found is not None
    return found
