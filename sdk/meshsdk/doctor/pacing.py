"""How long a step takes, from when each block of steps ended: robust, and with what is not known of it.

Law: pure. Batches that were asked for together arrive together, so single steps say nothing; a block has as
many as any such clump divides, and its length is the clumps' pace. What disturbs a quarter of the blocks (a
busy machine, a collection of garbage) disturbs the result not at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SURE: Final = 0.03
"""A pace that is known to this share of itself is known well enough."""
_MOST: Final = 8  # times the steps that were asked for, while they vary
_LONGEST: Final = 20.0  # seconds of a run that goes on only because its steps vary
_STUDENT: Final = (12.7, 4.3, 3.2, 2.8, 2.6, 2.5, 2.4, 2.3)  # of 95 %, by degrees of freedom
_NORMAL: Final = 2.1


def block_size(connections: int) -> int:
    """Steps of a block: of clumps of up to four a whole number, of larger ones six or more."""
    if connections < 3:
        return connections
    return 12 if connections <= 4 else 24 * ceil(connections / 4)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step; `doubt`: half the width of what it may be, as a share of it (95 %; inf: unknown)."""

    step: float
    doubt: float

    @property
    def sure(self) -> bool:
        return self.doubt <= SURE


def pace_of(marks: Sequence[float], block: int) -> Pace:
    """The mean of the middle half of the blocks' lengths. `marks`: when each ended, after when the first
    began."""
    lengths = sorted(end - begin for begin, end in itertools.pairwise(marks))
    if not lengths:
        return Pace(0.0, inf)
    middle = _middle(lengths)
    if len(lengths) == 1:
        return Pace(middle / block, inf)
    # Of winsorised lengths: the quarters that do not count are as long as the next that does.
    quarter = len(lengths) // 4
    low, high = lengths[quarter], lengths[-1 - quarter]
    spread = stdev(min(max(length, low), high) for length in lengths)
    counted = len(lengths) - 2 * quarter
    factor = _STUDENT[counted - 2] if counted - 2 < len(_STUDENT) else _NORMAL
    half = factor * spread * sqrt(len(lengths)) / counted
    return Pace(middle / block, half / middle if middle else 0.0)


def _middle(lengths: Sequence[float]) -> float:
    """The mean without a quarter at each end; what the quarter cuts through counts in part."""
    cut = len(lengths) / 4
    whole = int(cut)
    kept = lengths[whole : len(lengths) - whole]
    share = 1 - (cut - whole)
    if len(kept) < 3 or share == 1:
        return fmean(kept)
    inner = kept[1:-1]
    return (share * (kept[0] + kept[-1]) + sum(inner)) / (2 * share + len(inner))


@dataclass(frozen=True, slots=True)
class Length:
    """How many steps a run has: whole blocks, `least` at least, `most` at most."""

    block: int
    least: int
    most: int

    def ended(self, marks: Sequence[float]) -> bool:
        """Whether the blocks so far are enough."""
        steps = (len(marks) - 1) * self.block
        if steps < self.least:
            return False
        return steps >= self.most or marks[-1] - marks[0] > _LONGEST or pace_of(marks, self.block).sure


def length_of(steps: int, connections: int, room: int) -> Length:
    """Of a run of `steps` at least, and of as many as there is `room` for and are worth it."""
    block = block_size(connections)
    least = block * ceil(steps / block)
    return Length(block, least, max(least, min(_MOST * least, room // block * block)))
