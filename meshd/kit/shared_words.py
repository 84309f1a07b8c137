"""A version and a time that processes share as one 64-bit word, so that no reader sees one without the other.

Law: whatever must be consistent between processes is one aligned 64-bit word. Python has no memory fences,
and ARM64 may reorder two stores of one process, or two loads of another: with the version and the time in
words of their own, a reader could combine the time of a new lease with the version of an old map, in whatever
order the code names them. One aligned 64-bit load or store is indivisible on every 64-bit machine.

An item of a `memoryview` cast to "Q" is such a load or store: CPython copies it by `memcpy` with the constant
size 8, which compilers turn into one instruction. `struct.pack_into` is not: it clears the bytes first, and
readers see 0 in between.
"""

from __future__ import annotations

import mmap
from math import floor
from typing import Final

_TIME_BITS: Final = 37
_PER_SECOND: Final = 64
_MAX_TICKS: Final = (1 << _TIME_BITS) - 1  # 68 years of the monotonic clock
MAX_VERSION: Final = (1 << 64 - _TIME_BITS) - 1  # 134 million
TICK: Final = 1 / _PER_SECOND
"""Seconds between two times that can be told apart."""


def shared_words(count: int) -> memoryview:
    """`count` words, all 0, which this process shares with those that it forks from now on."""
    return memoryview(mmap.mmap(-1, 8 * count)).cast("Q")


class VersionTimes:
    """`count` pairs of a version and a time (seconds of the monotonic clock), all (0, 0.0) at first. Make it
    before the processes that share it are forked; each pair has one writer at a time."""

    def __init__(self, count: int) -> None:
        self._words = shared_words(count)

    def __repr__(self) -> str:
        return f"<VersionTimes {len(self._words)}>"

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[int, float]:
        word = self._words[index]  # one load: both halves are of one store
        return word >> _TIME_BITS, (word & _MAX_TICKS) / _PER_SECOND

    def __setitem__(self, index: int, pair: tuple[int, float]) -> None:
        """The time is rounded down to a TICK. Raises OverflowError when one of the two does not fit."""
        version, ticks = pair[0], floor(pair[1] * _PER_SECOND)
        if not (0 <= version <= MAX_VERSION and 0 <= ticks <= _MAX_TICKS):
            raise OverflowError(f"version {version} at {pair[1]} s does not fit into a 64-bit word")
        self._words[index] = version << _TIME_BITS | ticks
