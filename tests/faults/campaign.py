"""Schedules one after the other, until there were enough; what they found, counted.

Law: several schedules share a testbed, for starting one takes longer than a fault; after one that found
something the next begins on a new testbed, so that it does not find the same again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from tests.faults.clients import now
from tests.faults.running import Testbed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.faults.running import Outcome
    from tests.faults.schedules import Kind

_SHARING: Final = 10
"""Schedules of one testbed."""


class Campaign:
    """`harsh`: in how many schedules of four faults may overlap; the seed says in which."""

    def __init__(
        self, length: int, *, hosts: int, harsh: int, kinds: Sequence[Kind] | None, report: Path | None
    ) -> None:
        self._length, self._hosts, self._harsh, self._kinds = length, hosts, harsh, kinds
        self._report, self._began = report, now()
        self.outcomes: list[Outcome] = []

    def __repr__(self) -> str:
        return f"<Campaign {self.summary()}>"

    @property
    def injected(self) -> int:
        """Faults so far."""
        return sum(outcome.injected for outcome in self.outcomes)

    @property
    def wrong(self) -> list[int]:
        """The seeds of the schedules that found something."""
        return [outcome.seed for outcome in self.outcomes if outcome.wrong]

    def run(self, first: int, seeds: int, faults: int | None) -> None:
        """Seeds from `first` on: so many, or until there were so many faults."""
        last = first + seeds
        while (first < last) if faults is None else (self.injected < faults):
            with Testbed(self._hosts) as testbed:
                for seed in range(first, first + _SHARING):
                    first = seed + 1
                    if self._next(testbed, seed) or (faults is None and first >= last):
                        break
                    if faults is not None and self.injected >= faults:
                        break

    def _next(self, testbed: Testbed, seed: int) -> bool:
        """Whether something was wrong."""
        harsh = seed % 4 < self._harsh
        outcome = testbed.run(seed, self._length, harsh=harsh, kinds=self._kinds)
        self.note(outcome)
        print(outcome, self.summary(), sep="\n", flush=True)
        return outcome.wrong

    def note(self, outcome: Outcome) -> None:
        """Count an outcome, and write the report anew."""
        self.outcomes.append(outcome)
        if self._report is not None:
            self._report.write_text(json.dumps(self.report(), indent=1) + "\n")

    def summary(self) -> str:
        """One line."""
        broken = sum(len(outcome.faults) for outcome in self.outcomes)
        acknowledged = sum(outcome.acknowledged for outcome in self.outcomes)
        text = (
            f"{self.injected} faults in {len(self.outcomes)} schedules, {acknowledged} acknowledged writes, "
            f"{broken} lost or wrong, {(now() - self._began) / 60:.1f} minutes"
        )
        return f"{text}; seeds with findings: {self.wrong}" if self.wrong else text

    def report(self) -> dict[str, Any]:
        """Everything, for a JSON document."""
        totals = sum((Counter(outcome.counts) for outcome in self.outcomes), Counter[str]())
        return {
            "faults": self.injected,
            "schedules": len(self.outcomes),
            "nodes_lost": sum(outcome.lost for outcome in self.outcomes),
            "acknowledged": sum(outcome.acknowledged for outcome in self.outcomes),
            "wrong": sum(len(outcome.faults) for outcome in self.outcomes),
            "failing_seeds": self.wrong,
            "minutes": round((now() - self._began) / 60, 2),
            "counts": dict(totals),
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }
