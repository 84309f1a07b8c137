"""Where OpenCV's and Pillow's arithmetic depends on the processor, NumPy's equals what they give on x86-64.

`make arm64` runs the ops on arm64, and compares their results with the frozen ones.
"""

from __future__ import annotations

import platform
import re

import cv2
import numpy as np
import pytest
from PIL import Image

from meshd.transform.builtin import portable_pixels
from meshd.transform.builtin.portable_pixels import blend_portable, linear_resize_portable
from tests.golden.ops_results import CHAINS, digest
from tests.golden.test_ops_vectors import FROZEN

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 is what all others must equal")


def images(seed: int, count: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = [(*random.integers(1, 300, 2), random.integers(1, 5)) for _ in range(count)]
    return [random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def test_linear_resize_equals_opencv() -> None:
    for number, picture in enumerate(images(1, 150)):
        height, width = (int(size) for size in np.random.default_rng(number).integers(1, 300, 2))
        expected = cv2.resize(picture, (width, height), interpolation=cv2.INTER_LINEAR)
        made = linear_resize_portable(picture, height, width)
        assert np.array_equal(made, expected.reshape(made.shape)), (picture.shape, height, width)


def test_blend_equals_pillow() -> None:
    for number, first in enumerate(images(2, 60)):
        first, second = first[:, :, :1].repeat(3, axis=2), 255 - first[::-1, :, :1].repeat(3, axis=2)
        factor = float(np.random.default_rng(number).uniform(0, 4))
        expected = np.asarray(Image.blend(Image.fromarray(first), Image.fromarray(second), factor))
        assert np.array_equal(blend_portable(first, second, factor), expected), factor


@pytest.mark.parametrize(
    "name", [name for name in CHAINS if re.search("resize|color_jitter|rand_augment", name)]
)
def test_ops_give_the_frozen_results_by_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_pixels, "_X86", False)
    assert digest(name) == FROZEN[name]
