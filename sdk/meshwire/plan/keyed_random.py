"""Keyed random numbers: draws of (seed, epoch, position, stream), identical on every machine and release.

Law: splitmix64 over integers, and floats only through exact IEEE 754 operations (no libm, whose last bit
differs). Changing any constant changes the content of every plan: golden vectors pin them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_TO_UNIT = 2.0**-53
# The upper bits of ln 2: k times it is exact for |k| < 2**20.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def mix64(value: int) -> int:
    """Apply splitmix64's finaliser: a bijection of 64-bit integers in which each bit depends on all."""
    value = ((value ^ (value >> 30)) * _MIX_A) & MASK64
    value = ((value ^ (value >> 27)) * _MIX_B) & MASK64
    return value ^ (value >> 31)


def mix64_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply `mix64` to each value; returns a new array."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(_MIX_A)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_B)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derive_key(*words: int) -> int:
    """Derive a 64-bit key from the words, in order; each counts modulo 2**64."""
    key = len(words)
    for word in words:
        key = mix64(((key ^ word) + GAMMA) & MASK64)
    return key


class KeyedRandom:
    """The sequence of draws for one (seed, epoch, position, stream); `stream` distinguishes uses at the
    same position.

    A draw costs about half a microsecond. Not suitable for secrets.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, epoch: int, position: int, stream: int = 0) -> None:
        self._state = derive_key(seed, epoch, position, stream)

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = state = (self._state + GAMMA) & MASK64
        state = ((state ^ (state >> 30)) * _MIX_A) & MASK64
        state = ((state ^ (state >> 27)) * _MIX_B) & MASK64
        return state ^ (state >> 31)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a float in [low, high): 53 random bits, scaled. (Rounding may give `high` if it is not
        1.)"""
        return low + (high - low) * ((self.bits() >> 11) * _TO_UNIT)

    def chance(self, probability: float) -> bool:
        """Return True with this probability; 0 is never and 1 always."""
        return (self.bits() >> 11) * _TO_UNIT < probability

    def integer(self, n: int) -> int:
        """Return an unbiased integer in [0, n). Raises ValueError unless 1 ≤ n ≤ 2**63."""
        if not 1 <= n <= 1 << 63:
            raise ValueError(f"integer(n) needs 1 ≤ n ≤ 2**63, got {n}")
        threshold = (1 << 64) % n  # Lemire's method: reject the few draws that would favour small results
        while True:
            product = self.bits() * n
            if product & MASK64 >= threshold:
                return product >> 64

    def log_uniform(self, low: float, high: float) -> float:
        """Return a float in [low, high] whose logarithm is uniform. Raises ValueError unless 0 < low ≤
        high."""
        start, extent = _logarithms(low, high)
        drawn = portable_exp(start + extent * self.uniform())
        return min(max(drawn, low), high)

    def symmetric_beta(self, alpha: float) -> float:
        """Return a float in [0, 1] from Beta(alpha, alpha). Raises ValueError unless 0.01 ≤ alpha ≤ 100.

        Uses Jöhnk's method below 1 and Ulrich's polar method from 1 (Devroye 1986, IX.3 and IX.4).
        """
        if not 0.01 <= alpha <= 100.0:
            raise ValueError(f"symmetric_beta needs 0.01 ≤ alpha ≤ 100, got {alpha}")
        return self._johnk(alpha) if alpha < 1.0 else self._ulrich(alpha)

    def _johnk(self, alpha: float) -> float:
        while True:  # in logarithms, because a power of 1/alpha underflows
            x, y = portable_log(self._positive()) / alpha, portable_log(self._positive()) / alpha
            top = max(x, y)
            spread = portable_exp(max(min(x, y) - top, -700.0))  # the ratio of the smaller to the larger
            if top < -700.0 or portable_exp(top) * (1.0 + spread) <= 1.0:
                share = 1.0 / (1.0 + spread)
                return share if x >= y else 1.0 - share

    def _ulrich(self, alpha: float) -> float:
        while True:
            u, v = self.uniform(), self.uniform(-1.0, 1.0)
            square = u * u + v * v
            if 0.0 < square <= 1.0:
                power = portable_exp(max(portable_log(square) * (2.0 / (2.0 * alpha - 1.0)), -700.0))
                return 0.5 + u * v / square * math.sqrt(max(0.0, 1.0 - power))

    def _positive(self) -> float:
        """Return a float in (0, 1]."""
        return 1.0 - self.uniform()

    def __repr__(self) -> str:
        return f"KeyedRandom(state={self._state:#018x})"


@lru_cache(64)
def _logarithms(low: float, high: float) -> tuple[float, float]:
    """Return the logarithms of `low` and of `high / low`; cached because bounds are the same for every
    sample."""
    if not 0 < low <= high < math.inf:
        raise ValueError(f"log_uniform needs 0 < low ≤ high, got {low}, {high}")
    start = portable_log(low)
    return start, portable_log(high) - start


def portable_log(value: float) -> float:
    """Return the natural logarithm of a positive float to about 4 units in the last place, bit-equal
    everywhere."""
    mantissa, exponent = math.frexp(value)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)  # log m = 2 artanh((m-1)/(m+1)), |ratio| ≤ 0.1716
    square = ratio * ratio
    series = 0.0
    for odd in (23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        series = series * square + 1.0 / odd
    series *= square
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * (ratio + ratio * series))


def portable_exp(value: float) -> float:
    """Return e to the power of a float in [-700, 700], to about 2 units in the last place, bit-equal on
    every machine.
    """
    power = math.floor(value / 0.6931471805599453 + 0.5)
    rest = (value - power * _LN2_HIGH) - power * _LN2_LOW  # |rest| ≤ ln 2 / 2
    series = 1.0
    for term in range(16, 0, -1):
        series = 1.0 + series * rest / term
    return math.ldexp(series, power)
