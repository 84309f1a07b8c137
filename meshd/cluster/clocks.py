"""Which clock of a mesh is wrong, and by how much.

Law: pure; clocks are compared with what most of them show, for nobody knows the right time. Two that differ
are both told.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SKEW: Final = 300.0
"""Seconds from which on two nodes refuse each other's requests."""
NOTED: Final = 60.0
"""Seconds from which on a clock is told to be wrong: NTP keeps one within a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """`agree`: whether more than half of them show the same time. `ahead`: by id, seconds that a clock is
    ahead of that time (negative: behind); where they do not agree, ahead of the clock of the node that
    looked."""

    agree: bool
    ahead: Mapping[str, int]

    def of(self, node_id: str) -> int:
        """How far the clock of the node that looked is ahead: of those that agree, or of the one that it
        differs most from."""
        if self.agree:
            return self.ahead[node_id]
        return -max(self.ahead.values(), key=abs)


def compared(ahead: Mapping[str, float]) -> Clocks:
    """Judges clocks by how many seconds each is ahead of that of the node that looked, which is among them
    with 0."""
    groups = ([other for other in ahead.values() if abs(other - own) < NOTED] for own in ahead.values())
    largest = max(groups, key=len)
    agree = 2 * len(largest) > len(ahead)
    right = median(largest) if agree else 0.0
    return Clocks(agree, {node_id: round(own - right) for node_id, own in ahead.items()})
