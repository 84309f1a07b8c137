"""The mel scale, decibels and the DCT: numbers of spectra that depend on arguments alone.

Law: logarithms and powers come from additions and multiplications alone (`portable_log`), so that they are
equal on all processors. Slaney's scale: Auditory Toolbox; HTK's: 2595 · log10(1 + f / 700).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from meshwire.plan.keyed_random import portable_exp, portable_log

if TYPE_CHECKING:
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]

MelScale = Literal["htk", "slaney"]
Norm = Literal["none", "slaney"]
_HTK = 2595.0 / math.log(10.0)
_LINEAR_HZ = 200.0 / 3.0  # hertz of a mel of Slaney's scale, below a kilohertz
_KNEE_HZ, _KNEE_MELS = 1000.0, 15.0
_LOG_STEP = math.log(6.4) / 27.0
_LN2 = 0.6931471805599453
_DB = 10.0 / math.log(10.0)


class MelFilters(msgspec.Struct, frozen=True):
    """Triangular filters over the bins of a spectrum: for each band its first bin and its weights."""

    bands: tuple[tuple[int, Doubles], ...]

    def sum_bands(self, powers: Doubles, made: Doubles) -> None:
        """Write the weighted sums of `powers` [bins, frames] to `made` [bands, frames]."""
        for number, (first, weights) in enumerate(self.bands):
            row = made[number]
            row[:] = 0.0
            for offset, weight in enumerate(weights.tolist()):
                row += weight * powers[first + offset]


@lru_cache(maxsize=16)
def mel_filters(
    rate: int, n_fft: int, bands: int, low: float, high: float, scale: MelScale, norm: Norm
) -> MelFilters:
    """Return filters between `low` and `high` hertz, evenly spaced on the mel scale.

    With `norm` "slaney", the area of each is 1 hertz; otherwise its peak is 1.
    """
    bottom, top = _to_mels(low, scale), _to_mels(high, scale)
    step = (top - bottom) / (bands + 1)
    corners = [_to_hertz(bottom + step * number, scale) for number in range(bands + 2)]
    bins = np.arange(n_fft // 2 + 1) * (rate / n_fft)
    made = []
    for left, center, right in zip(corners, corners[1:], corners[2:], strict=False):
        weights = np.maximum(
            0.0, np.minimum((bins - left) / (center - left), (right - bins) / (right - center))
        )
        if norm == "slaney":
            weights *= 2.0 / (right - left)
        covered = np.nonzero(weights)[0]
        first, end = (int(covered[0]), int(covered[-1]) + 1) if len(covered) else (0, 0)
        made.append((first, weights[first:end]))
    return MelFilters(tuple(made))


def _to_mels(hertz: float, scale: MelScale) -> float:
    if scale == "htk":
        return _HTK * portable_log(1.0 + hertz / 700.0)
    if hertz < _KNEE_HZ:
        return hertz / _LINEAR_HZ
    return _KNEE_MELS + portable_log(hertz / _KNEE_HZ) / _LOG_STEP


def _to_hertz(mels: float, scale: MelScale) -> float:
    if scale == "htk":
        return 700.0 * (portable_exp(mels / _HTK) - 1.0)
    if mels < _KNEE_MELS:
        return mels * _LINEAR_HZ
    return _KNEE_HZ * portable_exp((mels - _KNEE_MELS) * _LOG_STEP)


def natural_logs(values: Doubles) -> Doubles:
    """Return the natural logarithms of positive numbers, to about 4 units in the last place."""
    mantissa, exponent = np.frexp(values)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(square, 1.0 / 23.0)
    for odd in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        series *= square
        series += 1.0 / odd
    return (exponent - small) * _LN2 + 2.0 * (ratio + ratio * square * series)


def decibels_of(powers: Doubles, floor: float, range_db: float) -> Doubles:
    """Return 10 · log10(max(power, floor)), raised to `range_db` below the highest unless that is 0."""
    levels = natural_logs(np.maximum(powers, floor)) * _DB
    return np.maximum(levels, levels.max(initial=-math.inf) - range_db) if range_db else levels


@lru_cache(maxsize=16)
def dct_matrix(coefficients: int, bands: int) -> Doubles:
    """Return the orthonormal DCT-II [coefficients, bands]."""
    rows = [
        [math.cos(math.pi / bands * (band + 0.5) * number) for band in range(bands)]
        for number in range(coefficients)
    ]
    made = np.array(rows) * math.sqrt(2.0 / bands)
    made[0] *= math.sqrt(0.5)
    return made
