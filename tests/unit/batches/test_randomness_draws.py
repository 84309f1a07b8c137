"""KeyedRandom: splitmix64's published sequence, ranges, and logarithms without libm."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwire.plan.keyed_random import (
    GAMMA,
    MASK64,
    KeyedRandom,
    derive_key,
    mix64,
    mix64_many,
    portable_exp,
    portable_log,
)


def test_mix64_is_splitmix64() -> None:
    # The first outputs for the seed 1234567, as published with the reference implementation.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64((1234567 + (i + 1) * GAMMA) & MASK64) for i in range(4)] == published


def test_many_equals_one() -> None:
    values = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], dtype=np.uint64)
    assert mix64_many(values).tolist() == [mix64(value) for value in values.tolist()]


def test_words_count_in_their_order_and_number() -> None:
    assert len({derive_key(), derive_key(0), derive_key(0, 0), derive_key(1, 2), derive_key(2, 1)}) == 5
    assert derive_key(2**64 + 5) == derive_key(5)


def test_uniform_lies_in_its_range_and_fills_it() -> None:
    draws = np.array([KeyedRandom(7, 0, position, 0).uniform() for position in range(20_000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 6 * (2 * 49) ** 0.5
    scaled = [KeyedRandom(7, 0, position, 1).uniform(-3, 5) for position in range(1000)]
    assert -3 <= min(scaled) < -2.9 < 4.9 < max(scaled) <= 5


def test_streams_and_positions_are_independent() -> None:
    first = np.array([KeyedRandom(7, 0, position, 0).uniform() for position in range(5000)])
    second = np.array([KeyedRandom(7, 0, position, 1).uniform() for position in range(5000)])
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06


def test_integer_covers_its_range_without_bias() -> None:
    random = KeyedRandom(1, 2, 3, 4)
    counts = np.bincount([random.integer(10) for _ in range(10_000)], minlength=10)
    assert counts.size == 10
    assert ((counts - 1000) ** 2 / 1000).sum() < 9 + 6 * 18**0.5
    assert KeyedRandom(1, 2, 3).integer(1) == 0
    assert 0 <= KeyedRandom(1, 2, 3).integer(2**63) < 2**63


@pytest.mark.parametrize("n", [0, -1, 2**63 + 1])
def test_impossible_ranges_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="integer"):
        KeyedRandom(1, 2, 3).integer(n)


def test_chance_has_its_ends() -> None:
    random = KeyedRandom(1, 2, 3)
    assert not any(random.chance(0.0) for _ in range(100))
    assert all(random.chance(1.0) for _ in range(100))
    assert 400 < sum(random.chance(0.5) for _ in range(1000)) < 600


def test_log_uniform_is_uniform_in_the_logarithm() -> None:
    random = KeyedRandom(1, 2, 3)
    draws = [random.log_uniform(0.75, 4 / 3) for _ in range(4000)]
    assert min(draws) >= 0.75
    assert max(draws) <= 4 / 3
    assert abs(sum(draw < 1 for draw in draws) - 2000) < 200
    assert random.log_uniform(2.0, 2.0) == 2.0
    for low, high in ((0, 1), (2, 1), (1, math.inf), (math.nan, 1)):
        with pytest.raises(ValueError, match="log_uniform"):
            random.log_uniform(low, high)


def test_portable_functions_are_as_good_as_the_library() -> None:
    for value in [*np.geomspace(1e-300, 1e300, 1501).tolist(), 1.0, 0.5, 2.0, 0.7071067811865476, 5e-324]:
        assert math.isclose(portable_log(value), math.log(value), rel_tol=1e-15, abs_tol=1e-16)
    for value in np.linspace(-700, 700, 1501).tolist():
        assert math.isclose(portable_exp(value), math.exp(value), rel_tol=2e-15)
