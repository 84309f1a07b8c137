"""Time of each pipeline stage: stalls by difference between runs, and robust step times.

Law: pure. The four runs differ by one stage each (all, no fetching, no preprocessing, no network), so
stalls and compute add up to the step time. Steps are timed in blocks, and the median keeps the result
stable while a quarter of the blocks is disturbed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import ceil, inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


RUNS: Final = ("fetch", "preprocessing", "network", "compute")
"""In the order in which they are run: each leaves out the stage of the one before."""
STALLS: Final = ("network", "preprocessing", "fetch")
TITLES: Final = {
    "compute": "compute",
    "network": "network and copy",
    "preprocessing": "preprocessing",
    "fetch": "fetch",
}
WORTH: Final = 0.05
"""A stall below this share of a step is not worth a change."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `steps`: `seconds` in all, `rows` of this rank. Of the seconds `waited` for batches; `fetch`
    is what the nodes themselves called fetching of that. `pace`: seconds of a step as `pacing` has it, where
    there is more than their mean; `doubt` as there."""

    steps: int
    seconds: float
    rows: int
    waited: float = 0.0
    fetch: float = 0.0
    pace: float | None = None
    doubt: float = 0.0

    @property
    def step(self) -> float:
        return self.seconds / self.steps if self.pace is None else self.pace

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of a step: the compute ceiling, and the stalls on top of it. `rows` a step, of all ranks."""

    compute: float
    network: float
    preprocessing: float
    fetch: float
    rows: float

    @property
    def step(self) -> float:
        return self.compute + self.network + self.preprocessing + self.fetch

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.rows / self.step if self.step else 0.0

    @property
    def ceiling(self) -> float:
        """Samples a second, had data always been there; 0 where nothing is computed."""
        return self.rows / self.compute if self.computes else 0.0

    @property
    def computes(self) -> bool:
        """Whether a step does anything but take its batch."""
        return self.compute > self.step / 1000

    @property
    def au(self) -> float:
        """Accelerator utilisation, 0…1: compute as a share of the whole, as MLPerf Storage has it."""
        return self.compute / self.step if self.step else 0.0

    def share(self, stage: str) -> float:
        """Of a step's time, 0…1."""
        return float(getattr(self, stage)) / self.step if self.step else 0.0

    def without(self, stage: str, left: float = 0.0) -> float:
        """How many times as fast the job is when only `left` (0…1) of a stall remains."""
        step = self.step - (1 - left) * getattr(self, stage)
        return self.step / step if step > 0 else float("inf")

    @property
    def dominant(self) -> str:
        """The longest stall; `compute` when none is worth a change."""
        worst = max(STALLS, key=lambda stage: float(getattr(self, stage)))
        return worst if self.share(worst) >= WORTH else "compute"


def split(runs: Mapping[str, Measured], world: int = 1) -> Split:
    """The split of one rank's four runs.

    What the nodes still spent on fetching in the run without it (a disk that does not keep what it read,
    another node that has to be asked each time) belongs to fetch, not to preprocessing.
    """
    compute = runs["compute"].step
    network = max(runs["network"].step, compute)
    prepared = max(runs["preprocessing"].step, network)
    fetched = max(runs["fetch"].step, prepared)
    again = min(runs["preprocessing"].fetch / runs["preprocessing"].steps, prepared - network)
    return Split(
        compute=compute,
        network=network - compute,
        preprocessing=prepared - network - again,
        fetch=fetched - prepared + again,
        rows=world * runs["compute"].rows / runs["compute"].steps,
    )


def slowest_rank(ranks: Sequence[Split]) -> Split:
    """Of the ranks of a job, which wait for each other: the one with the longest step."""
    return max(ranks, key=lambda each: each.step)


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


def measure_pace(marks: Sequence[float], block: int) -> Pace:
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
        return steps >= self.most or marks[-1] - marks[0] > _LONGEST or measure_pace(marks, self.block).sure


def run_length(steps: int, connections: int, room: int) -> Length:
    """Of a run of `steps` at least, and of as many as there is `room` for and are worth it."""
    block = block_size(connections)
    least = block * ceil(steps / block)
    return Length(block, least, max(least, min(_MOST * least, room // block * block)))
