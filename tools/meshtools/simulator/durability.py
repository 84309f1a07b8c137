"""Durability: years of disk failures, and what of the data loses all copies, beside the formula.

Law: failures are a Poisson process for each disk. A slot's part on a disk is lost when all its owners' disks
of that number are down at once; a disk has its data again `repair_seconds` after its failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import simpy

from meshtools.simulator.cluster_model import ClusterModel

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    from meshtools.simulator.scenario import Scenario

YEAR_SECONDS = 365.25 * 86_400


@dataclass(frozen=True, slots=True)
class Durability:
    """failures: of disks. lost: parts of the data that lost all copies, of `parts`; expected: by the formula,
    over all years. Both are counts, so a run is judged by the square root of `expected`."""

    failures: int
    parts: int
    years: float
    lost: int
    expected: float

    @property
    def nines(self) -> float:
        """−log10 of the share of the data that is lost in a year, by the formula."""
        share = self.expected / self.parts / self.years
        return math.inf if share == 0 else -math.log10(share)

    @property
    def simulated_nines(self) -> float:
        """The same by the simulation; infinite if nothing was lost."""
        return -math.log10(self.lost / self.parts / self.years) if self.lost else math.inf


def expected_losses(copies: int, failures_per_year: float, repair_seconds: float) -> float:
    """Return how often a year one part loses all copies: k λ (λ T)^(k−1), for λ T far below 1."""
    down = failures_per_year * repair_seconds / YEAR_SECONDS
    return copies * failures_per_year * down ** (copies - 1)


def simulate_failures(
    scenario: Scenario, on_progress: Callable[[float], None] = lambda _: None
) -> Durability:
    """Run the years of a scenario with `disks`. A part is the share of a slot on one number of disk."""
    assert scenario.disks is not None
    mesh, disks = scenario.mesh, scenario.disks
    owners = ClusterModel(mesh).owners()
    drawn = np.random.default_rng(scenario.seed)
    env = simpy.Environment()
    whole = mesh.nodes * mesh.disks_per_node
    rate = whole * disks.failures_per_year / YEAR_SECONDS
    down_until = np.zeros((mesh.nodes, mesh.disks_per_node))
    of_node = [np.flatnonzero((owners == node).any(axis=1)) for node in range(mesh.nodes)]
    counted = {"failures": 0, "lost": 0}

    def fail() -> Generator[simpy.Event, Any, None]:
        while True:
            yield env.timeout(float(drawn.exponential(1 / rate)))
            node, disk = divmod(int(drawn.integers(whole)), mesh.disks_per_node)
            if down_until[node, disk] > env.now:
                continue
            counted["failures"] += 1
            down_until[node, disk] = env.now + disks.repair_seconds
            there = owners[of_node[node]]
            counted["lost"] += int((down_until[there, disk] > env.now).all(axis=1).sum())
            on_progress(env.now / YEAR_SECONDS / disks.years)

    env.process(fail())
    env.run(until=disks.years * YEAR_SECONDS)
    parts = mesh.slots * mesh.disks_per_node
    each = expected_losses(mesh.copies, disks.failures_per_year, disks.repair_seconds)
    return Durability(counted["failures"], parts, disks.years, counted["lost"], each * parts * disks.years)
