"""Clock skew between nodes: which clock is wrong, and by how much.

Law: pure. Each clock is compared with the time that the majority shows, because no node knows the
correct time. When only two clocks differ, both are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SKEW: Final = 300.0
"""Seconds from which on two nodes refuse each other's requests."""
REPORTED_SKEW: Final = 60.0
"""Seconds from which on a clock is told to be wrong: NTP keeps one within a fraction of a second."""


@dataclass(frozen=True, slots=True)
class ClockComparison:
    """`agree`: whether more than half of them show the same time. `ahead`: by id, seconds that a clock is
    ahead of that time (negative: behind); where they do not agree, ahead of the clock of the node that
    looked."""

    agree: bool
    ahead: Mapping[str, int]

    def skew_of(self, node_id: str) -> int:
        """How far the clock of the node that looked is ahead: of those that agree, or of the one that it
        differs most from."""
        if self.agree:
            return self.ahead[node_id]
        return -max(self.ahead.values(), key=abs)


def compare_clocks(ahead: Mapping[str, float]) -> ClockComparison:
    """Judges clocks by how many seconds each is ahead of that of the node that looked, which is among them
    with 0."""
    groups = (
        [other for other in ahead.values() if abs(other - own) < REPORTED_SKEW] for own in ahead.values()
    )
    largest = max(groups, key=len)
    agree = 2 * len(largest) > len(ahead)
    right = median(largest) if agree else 0.0
    return ClockComparison(agree, {node_id: round(own - right) for node_id, own in ahead.items()})
