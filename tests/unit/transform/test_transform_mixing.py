"""Mixing's arithmetic: exact weights, the promised distribution, the same draws for ever."""

from __future__ import annotations

import numpy as np
import pytest

from meshd.transform.builtin.mixup import STEPS, blend, cut_mix, mix_up
from meshwire.plan.keyed_random import KeyedRandom

GOLDEN = [
    ["0x1.fb8335689d448p-1", "0x1.ffff4459ec81ap-1"],
    ["0x1.d0d38f9de7825p-1", "0x1.14da9943eb018p-1"],
    ["0x1.833e20e0724a4p-1", "0x1.092144126e3d5p-1"],
]


def draws(stream: int = 0) -> KeyedRandom:
    return KeyedRandom(7, 1, 4, stream)


def test_uint8_is_blended_as_exact_arithmetic_would_and_rounded_to_even() -> None:
    value, other = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    for share in range(STEPS + 1):
        exact = (value.astype(np.float64) * share + other.astype(np.float64) * (STEPS - share)) / STEPS
        mixed = blend(value[:, :, None], other[:, :, None], share)
        np.testing.assert_array_equal(mixed[:, :, 0], np.rint(exact))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_floats_keep_their_type(dtype: str) -> None:
    value, other = np.full((2, 2, 1), 3, dtype), np.full((2, 2, 1), -1, dtype)
    mixed = blend(value, other, 64)
    assert mixed.dtype == dtype
    assert (mixed == 0.0).all()
    assert np.array_equal(blend(value, other, STEPS), value)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.8, 1.0, 2.0, 30.0])
def test_weights_are_beta_distributed(alpha: float) -> None:
    drawn = np.array([KeyedRandom(3, 0, number).symmetric_beta(alpha) for number in range(8000)])
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)


def test_the_draws_of_plans_made_long_ago() -> None:
    found = [[draws(stream).symmetric_beta(alpha) for stream in range(2)] for alpha in (0.2, 1.0, 4.0)]
    assert [[value.hex() for value in row] for row in found] == GOLDEN


@pytest.mark.parametrize("alpha", [0.0, -1.0, 101.0, float("nan")])
def test_alphas_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        draws().symmetric_beta(alpha)


def test_a_weight_of_one_changes_nothing() -> None:
    value, other = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)
    for position in range(200):
        mixed, weight = mix_up(value, other, 0.05, KeyedRandom(1, 0, position))
        assert float(mixed.max()) == np.rint(255 * (1 - weight))
        assert weight * STEPS == int(weight * STEPS)


def test_a_rectangle_never_leaves_the_image_and_its_share_is_exact() -> None:
    value, other = np.zeros((9, 5, 3), np.uint8), np.ones((9, 5, 3), np.uint8)
    for position in range(300):
        mixed, weight = cut_mix(value, other, 1.0, KeyedRandom(1, 0, position))
        assert mixed[:, :, 0].sum() == pytest.approx((1 - weight) * 45, abs=1e-9)
    assert not value.any(), "the neighbour's source is not written to"
