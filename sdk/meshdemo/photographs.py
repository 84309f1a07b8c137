"""A few hundred photographs of ImageNet's habit: random cut-outs of the real ones that scikit-image and
scikit-learn ship, or, where neither is installed, of drawn pictures with the spectrum of real ones.

Law: deterministic; photograph i is the same whatever the count. About 500×375 at quality 90, some 100 KB
each.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
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
DRAWN = tuple(f"drawn-{number}" for number in range(8))


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


def _installed_files() -> list[Path]:
    """Files of the real photographs that installed packages hold."""
    found = []
    for package, folder, names in (("skimage", "data", SKIMAGE), ("sklearn", "datasets/images", SKLEARN)):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            found += [Path(spec.origin).parent / folder / name for name in names]
    return [file for file in found if file.exists()]


def origin() -> str:
    """Return where the photographs come from, in words."""
    return "real photographs" if _installed_files() else f"{len(DRAWN)} drawn pictures"


@cache
def originals() -> tuple[tuple[str, Image.Image], ...]:
    """Return (class, picture) of the pictures that are cropped."""
    files = _installed_files()
    if files:
        return tuple((file.stem, Image.open(file).convert("RGB")) for file in files)
    return tuple((kind, draw(number)) for number, kind in enumerate(DRAWN))


def draw(number: int) -> Image.Image:
    """Draw 800×600 pixels whose amplitudes fall with the frequency, as in photographs."""
    rng, (height, width) = np.random.default_rng((SEED, number, 1)), (600, 800)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None, :] * width)
    amplitude = 1 / np.maximum(frequency, 1) ** rng.uniform(1.0, 1.4)
    phases = np.exp(2j * np.pi * rng.random((3, height, width // 2 + 1)))
    waves = np.fft.irfft2(phases * amplitude, s=(height, width))
    waves /= waves.std(axis=(1, 2), keepdims=True)
    brightness, color = waves[0], waves[1:]
    red, blue = brightness + 0.4 * color[0], brightness + 0.4 * color[1]
    levels = 128 + 55 * np.stack([red, brightness, blue], axis=2)
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def cut(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Crop half to all of each side, resize to about 500×375, and add grain."""
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
    """Yield the first `count`, in order."""
    return map(photograph, range(count))
