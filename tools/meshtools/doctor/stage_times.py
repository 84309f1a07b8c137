"""Time of each pipeline stage: stalls from the differences between runs, and robust step times.

Law: pure. Each of the four runs leaves out one more stage (none, fetching, preprocessing, network), so stalls
and compute add up to the step time. Steps are timed in blocks, and the mean of the middle half of the blocks
is stable even if a quarter of them is disturbed.
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
"""The runs in their order: each leaves out the stage that the one before it is named for."""
STALLS: Final = ("network", "preprocessing", "fetch")
TITLES: Final = {
    "compute": "compute",
    "network": "network and copy",
    "preprocessing": "preprocessing",
    "fetch": "fetch",
}
WORTH: Final = 0.05
"""A stall below this share of a step is not worth optimizing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `steps`. `seconds`: its duration; `rows`: of this rank; `waited`: seconds waited for
    batches; `fetch`: the part of these that the nodes reported as fetching. `pace`: seconds per step from
    `measure_pace`, None if only the mean is known; `doubt`: its uncertainty."""

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
    """Seconds of a step: the compute ceiling and the stalls on top of it. `rows`: per step, of all ranks."""

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
        """Samples per second."""
        return self.rows / self.step if self.step else 0.0

    @property
    def ceiling(self) -> float:
        """Samples per second if no batch were ever waited for; 0 if no step computes."""
        return self.rows / self.compute if self.computes else 0.0

    @property
    def computes(self) -> bool:
        """Whether a step does more than take its batch."""
        return self.compute > self.step / 1000

    @property
    def au(self) -> float:
        """Accelerator utilisation as MLPerf Storage defines it: compute as a share of the step, 0…1."""
        return self.compute / self.step if self.step else 0.0

    def share(self, stage: str) -> float:
        """Returns the share of a stage in the time of a step, 0…1."""
        return float(getattr(self, stage)) / self.step if self.step else 0.0

    def without(self, stage: str, left: float = 0.0) -> float:
        """Returns the speed-up, as a factor, if only `left` (0…1) of a stall remains."""
        step = self.step - (1 - left) * getattr(self, stage)
        return self.step / step if step > 0 else float("inf")

    @property
    def dominant(self) -> str:
        """The longest stall, or `compute` if no stall is worth a change."""
        worst = max(STALLS, key=lambda stage: float(getattr(self, stage)))
        return worst if self.share(worst) >= WORTH else "compute"


def split(runs: Mapping[str, Measured], world: int = 1) -> Split:
    """Returns the split of one rank's four runs.

    Time that the nodes spent on fetching even in the run without it (a disk read past the page cache, rows
    that another node has to send each time) counts as fetch, not as preprocessing.
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
    """Returns the split with the longest step: the ranks of a job wait for each other."""
    return max(ranks, key=lambda each: each.step)


SURE: Final = 0.03
"""The uncertainty, as a share of the step time, at which a run is long enough."""
_MOST: Final = 8  # times the requested steps, while step times vary
_LONGEST: Final = 20.0  # seconds of a run that continues only because step times vary
_STUDENT: Final = (12.7, 4.3, 3.2, 2.8, 2.6, 2.5, 2.4, 2.3)  # Student's t for 95 %, by degrees of freedom
_NORMAL: Final = 2.1


def block_size(connections: int) -> int:
    """Returns the steps of a block. With `connections` requests in flight, batches arrive in clumps of up to
    that size: a block holds a whole number of clumps of up to four, or at least six larger clumps."""
    if connections < 3:
        return connections
    return 12 if connections <= 4 else 24 * ceil(connections / 4)


@dataclass(frozen=True, slots=True)
class Pace:
    """`step`: seconds per step; `doubt`: half the width of its 95 % confidence interval, as a share of it
    (inf: unknown)."""

    step: float
    doubt: float

    @property
    def sure(self) -> bool:
        return self.doubt <= SURE


def measure_pace(marks: Sequence[float], block: int) -> Pace:
    """Returns the mean of the middle half of the blocks' durations. `marks`: the time when the first block
    began, then the end of each."""
    lengths = sorted(end - begin for begin, end in itertools.pairwise(marks))
    if not lengths:
        return Pace(0.0, inf)
    middle = _middle(lengths)
    if len(lengths) == 1:
        return Pace(middle / block, inf)
    # Winsorised durations: those in the outer quarters are replaced by the nearest one in the middle half.
    quarter = len(lengths) // 4
    low, high = lengths[quarter], lengths[-1 - quarter]
    spread = stdev(min(max(length, low), high) for length in lengths)
    counted = len(lengths) - 2 * quarter
    factor = _STUDENT[counted - 2] if counted - 2 < len(_STUDENT) else _NORMAL
    half = factor * spread * sqrt(len(lengths)) / counted
    return Pace(middle / block, half / middle if middle else 0.0)


def _middle(lengths: Sequence[float]) -> float:
    """Returns the mean without a quarter at each end. A value that the cut goes through counts in part."""
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
    """The length of a run in steps: whole blocks, from `least` to `most`."""

    block: int
    least: int
    most: int

    def ended(self, marks: Sequence[float]) -> bool:
        """Returns whether the blocks so far are enough."""
        steps = (len(marks) - 1) * self.block
        if steps < self.least:
            return False
        return steps >= self.most or marks[-1] - marks[0] > _LONGEST or measure_pace(marks, self.block).sure


def run_length(steps: int, connections: int, room: int) -> Length:
    """Returns the length of a run of at least `steps`, which may continue to `room` steps while its step
    time is uncertain."""
    block = block_size(connections)
    least = block * ceil(steps / block)
    return Length(block, least, max(least, min(_MOST * least, room // block * block)))
