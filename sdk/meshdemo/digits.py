"""1,797 handwritten digits as PNG files, one fifth of each class held out.

Law: deterministic; the held-out part never takes part in training.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (its test set), UCI Machine
Learning Repository, doi 10.24432/C50P49, CC BY 4.0; the numbers are kept in `digits.npz`, in its order.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_OUT_EVERY = 5
LEVELS = 16
"""The digits are 8×8 with grey levels 0 to 16."""
_FILE = Path(__file__).with_name("digits.npz")


@dataclass(frozen=True, slots=True)
class Digit:
    """One PNG; `key` says part, class and number: `train/3/00017.png`."""

    key: str
    png: bytes


def as_png(levels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return the levels as a gray PNG of 8×8."""
    out = io.BytesIO()
    Image.fromarray((levels * (255 / LEVELS)).round().astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def digits(limit: int | None = None) -> Iterator[Digit]:
    """Yield the digits (the first `limit`) in the source's order; every fifth of a class goes to `test/`."""
    with np.load(_FILE) as data:
        images, labels = data["levels"][:limit], data["labels"][:limit].tolist()
    seen = [0] * 10
    for number, (levels, label) in enumerate(zip(images, labels, strict=True)):
        part = "test" if seen[label] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        seen[label] += 1
        yield Digit(f"{part}/{label}/{number:05d}.png", as_png(levels))
