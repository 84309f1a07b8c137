"""Resampling of sounds: a band-limited interpolation, with the filters of torchaudio's `resample`.

Law: every value of the result depends on a few values around its place, by the same float32 operations in the
same order wherever the computation begins. So a window of a resampled sound equals the resampled
sound's window to the bit. Smith, Digital Audio Resampling, ccrma.stanford.edu/~jos/resample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

Quality = Literal["standard", "best"]
ReadFrames = Callable[[int, int], "Floats"]
"""Maps (start, stop) to these frames, [stop − start, channels]."""
_CHUNK = 1 << 14  # values that are computed at once: what stays in the CPU cache
_KAISER_BETA = 14.769656459379492


class Resampler(msgspec.Struct, frozen=True):
    """Converts sounds from one rate to another; the rates are divided by their greatest common divisor.

    `taps` [new, width]: the filter of each of the `new` positions between two inputs. `first` [new]: where it
    begins, relative to the input at which the group of `new` outputs begins.
    """

    old: int
    new: int
    taps: Floats
    first: npt.NDArray[np.int64]

    def length(self, frames: int) -> int:
        """Return the number of frames that this many become."""
        return -(-frames * self.new // self.old)

    def resample(self, read: ReadFrames, frames: int, start: int, stop: int) -> Floats:
        """Return the values start…stop of the result for a sound of `frames`; beyond its ends are zeros."""
        if start == stop:
            return read(0, 0)
        group, end = start // self.new, -(-stop // self.new)
        lowest = group * self.old + int(self.first[0])
        highest = (end - 1) * self.old + int(self.first[-1]) + self.taps.shape[1]
        inside = read(max(0, lowest), max(0, min(frames, highest)))
        padding = (max(0, -lowest), max(0, highest - max(frames, lowest)))
        made = np.empty((stop - start, inside.shape[1]), np.float32)
        for channel in range(inside.shape[1]):
            sound = np.pad(inside[:, channel], padding)
            made[:, channel] = self._filter(sound, end - group)[
                start - group * self.new : stop - group * self.new
            ]
        return made

    def _filter(self, sound: Floats, groups: int) -> Floats:
        """Return groups × new values; `sound` begins where the first filter does."""
        made = np.empty((groups, self.new), np.float32)
        at = self.first - self.first[0]
        step = max(1, _CHUNK // self.new)
        for begin in range(0, groups, step):
            count = min(step, groups - begin)
            places = (np.arange(begin, begin + count) * self.old)[:, None] + at
            total = np.zeros((count, self.new), np.float32)
            for tap in range(self.taps.shape[1]):
                total += sound[places] * self.taps[:, tap]
                places += 1
            made[begin : begin + count] = total
        return made.reshape(-1)


@lru_cache(maxsize=8)
def resampler(old_rate: int, new_rate: int, quality: Quality) -> Resampler:
    """Return the resampler between two rates in hertz; of coprime ones, the filters take up to a second."""
    divisor = math.gcd(old_rate, new_rate)
    old, new = old_rate // divisor, new_rate // divisor
    zeros, rolloff = (6, 0.99) if quality == "standard" else (64, 0.9475937167399596)
    cutoff = min(old, new) * rolloff  # in units of which the distance of zero crossings is 1 / cutoff
    reach = zeros * old / cutoff
    centers = np.arange(new) * old / new
    first = np.ceil(centers - reach).astype(np.int64)
    width = math.floor(2 * reach) + 1
    distance = (first[:, None] + np.arange(width) - centers[:, None]) * (cutoff / old)
    distance = np.clip(distance, -zeros, zeros)
    taps = np.sinc(distance) * _window(distance / zeros, quality) * (cutoff / old)
    return Resampler(old, new, taps.astype(np.float32), first)


def _window(place: npt.NDArray[np.float64], quality: Quality) -> npt.NDArray[np.float64]:
    """Return the window of a filter at places −1…1: Hann, or Kaiser of 14.77."""
    if quality == "standard":
        return np.asarray(np.cos(place * (math.pi / 2)) ** 2)
    return np.asarray(np.i0(_KAISER_BETA * np.sqrt(1 - place**2)) / np.i0(_KAISER_BETA))
