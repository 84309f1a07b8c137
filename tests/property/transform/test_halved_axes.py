"""An axis is halved by means of two pixels, a tie to the even number: as OpenCV's area resampling does, and
what plans have had from the first version on."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.builtin.resample_window import pixels, resample

EVEN = st.integers(1, 40).map(lambda half: 2 * half)


def _mean(one: Any, other: Any) -> Any:
    total = one.astype(np.uint16) + other
    return ((total + (total >> 1 & 1)) >> 1).astype(np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@given(height=EVEN, width=EVEN, top=st.integers(0, 3), left=st.integers(0, 3), seed=st.integers(0, 1000))
def test_half_an_axis_is_the_even_mean_of_two(
    channels: int, height: int, width: int, top: int, left: int, seed: int
) -> None:
    whole = np.random.default_rng(seed).integers(0, 256, (height + 4, width + 4, channels), dtype=np.uint8)
    window = whole[top : top + height, left : left + width]  # of a larger image, as a crop is
    kept = whole.copy()
    narrow, low = resample(window, height, width // 2), resample(window, height // 2, width)
    np.testing.assert_array_equal(narrow, _mean(window[:, ::2], window[:, 1::2]))
    np.testing.assert_array_equal(low, _mean(window[::2], window[1::2]))
    for made, size in ((narrow, (width // 2, height)), (low, (width, height // 2))):
        np.testing.assert_array_equal(
            made, pixels(cv2.resize(window, size, interpolation=cv2.INTER_AREA)), str(size)
        )
    np.testing.assert_array_equal(whole, kept)
