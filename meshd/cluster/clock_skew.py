"""Clock skew between nodes: which clock is wrong, and by how much.

Law: pure. Each clock is compared with the time that the majority shows, because no node knows the
correct time. When only two clocks differ, both are reported.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SKEW: Final = 300.0
"""Seconds of skew from which on two nodes refuse each other's requests."""
REPORTED_SKEW: Final = 60.0
"""Seconds of skew from which on a clock is reported as wrong; NTP keeps clocks within a fraction of a
second."""


class ClockComparison(msgspec.Struct, frozen=True):
    """The result of comparing clocks. `agree`: more than half of them show the same time. `ahead`: by node
    id, the seconds that a clock is ahead of that time (negative: behind); if they do not agree, ahead of the
    local clock."""

    agree: bool
    ahead: Mapping[str, int]

    def skew_of(self, node_id: str) -> int:
        """Returns how far the local clock is ahead: of the majority, or of the clock that differs most from
        it."""
        if self.agree:
            return self.ahead[node_id]
        return -max(self.ahead.values(), key=abs)

    def refused(self) -> Mapping[str, int]:
        """Returns the entries of `ahead` from which on nodes refuse each other's requests."""
        return {node_id: ahead for node_id, ahead in self.ahead.items() if abs(ahead) >= MAX_SKEW}


def compare_clocks(ahead: Mapping[str, float]) -> ClockComparison:
    """Compares clocks, given how many seconds each is ahead of the local clock, which is included with 0."""
    groups = (
        [other for other in ahead.values() if abs(other - own) < REPORTED_SKEW] for own in ahead.values()
    )
    largest = max(groups, key=len)
    agree = 2 * len(largest) > len(ahead)
    right = median(largest) if agree else 0.0
    return ClockComparison(agree, {node_id: round(own - right) for node_id, own in ahead.items()})
