"""What was measured of each stage, and what follows: stalls by differences.

Law: pure. The four runs differ by one stage each: with everything, without fetching, without preprocessing,
without the network. So the stalls and the compute ceiling add up to the time of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def slowest(ranks: Sequence[Split]) -> Split:
    """Of the ranks of a job, which wait for each other: the one with the longest step."""
    return max(ranks, key=lambda each: each.step)
