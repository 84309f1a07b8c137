"""A few hundred photographs of ImageNet's habit: random cut-outs of the real ones that scikit-image and
-learn ship.

Law: deterministic; photograph i is the same whatever the count. About 500×375 at quality 90, some 100 KB
each.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20
QUALITY = 90
GRAIN = 6.0
"""Standard deviation of the grey noise: a cut-out that was enlarged has less detail than a camera's
picture.
"""

SKIMAGE = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "ihc.png",
    "hubble_deep_field.jpg",
    "motorcycle_left.png",
    "retina.jpg",
)
SKLEARN = ("china.jpg", "flower.jpg")


@dataclass(frozen=True, slots=True)
class Photograph:
    """One JPEG; its class is the picture it was cut from."""

    kind: str
    index: int
    jpeg: bytes

    @property
    def name(self) -> str:
        """`<class>/<index>.jpg`."""
        return f"{self.kind}/{self.index:06d}.jpg"


@cache
def originals() -> tuple[tuple[str, Image.Image], ...]:
    """(class, picture) of the pictures that the installed packages hold."""
    import skimage
    import sklearn

    folders = (Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images")
    files = [folders[0] / name for name in SKIMAGE] + [folders[1] / name for name in SKLEARN]
    found = [file for file in files if file.exists()]
    if not found:
        raise FileNotFoundError(
            f"no photographs in {folders[0]} or {folders[1]}: install scikit-image and scikit-learn"
        )
    return tuple((file.stem, Image.open(file).convert("RGB")) for file in found)


def cut(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A cut-out of half to all of each side, brought to about 500×375, with grain."""
    share = rng.uniform(0.5, 1.0)
    width, height = (int(side * share) for side in picture.size)
    left = int(rng.integers(0, picture.width - width + 1))
    top = int(rng.integers(0, picture.height - height + 1))
    across = int(rng.normal(500, 40))
    size = (across, across * 3 // 4)
    part = picture.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    grain = rng.normal(0, GRAIN, (size[1], size[0], 1))
    return Image.fromarray((np.asarray(part) + grain).clip(0, 255).astype(np.uint8))


def photograph(index: int) -> Photograph:
    """Number `index` of the endless row."""
    kind, picture = originals()[index % len(originals())]
    out = io.BytesIO()
    cut(picture, np.random.default_rng((SEED, index))).save(out, "JPEG", quality=QUALITY)
    return Photograph(kind, index, out.getvalue())


def photographs(count: int) -> Iterator[Photograph]:
    """The first `count`, in order."""
    return map(photograph, range(count))
