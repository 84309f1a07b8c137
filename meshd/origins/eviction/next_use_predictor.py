"""Next use: the number of reads until an item is read again, exact from plans, else estimated from counts.

The unit is reads, so that exact and estimated distances are comparable. Counts cover a window that slides by
halves; an item without a read in the window is not expected to be read again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.origins.eviction.policy_api import Item

_MARGIN = 2
"""Reads by which a new item must lead. Two items of shuffled epochs differ by this much by chance."""


class ReadSchedule:
    """The order in which a plan reads, and its present position."""

    def __init__(self, order: Iterable[Item]) -> None:
        self._uses: dict[Item, list[int]] = defaultdict(list)
        self.length = self.position = 0
        for self.length, item in enumerate(order, 1):
            self._uses[item].append(self.length - 1)

    def __repr__(self) -> str:
        return f"<ReadSchedule at {self.position} of {self.length}>"

    def distance(self, item: Item) -> int | None:
        """Return the reads until the item's next use in this plan; None if there is none."""
        uses = self._uses.get(item, ())
        at = bisect_left(uses, self.position)
        return uses[at] - self.position if at < len(uses) else None

    def covers(self, item: Item) -> bool:
        return item in self._uses


class NextUsePredictor:
    """Predicts from read counts and plans."""

    def __init__(self, window: int, tracked: int) -> None:
        self.plans: dict[str, ReadSchedule] = {}
        self.clock = 0  # bytes read so far
        self._window, self._tracked = window, tracked
        self._ends = window
        self._now: dict[Item, int] = {}
        self._before: dict[Item, int] = {}
        self._reads_now = self._reads_before = 0

    def __repr__(self) -> str:
        counted = len(self._now) + len(self._before)
        return f"<NextUsePredictor {counted} items counted, {len(self.plans)} plans>"

    def record_read(self, item: Item, size: int) -> None:
        """Count a read."""
        if self.clock >= self._ends or len(self._now) >= self._tracked:
            self._ends = self.clock + self._window
            self._before, self._now = self._now, {}
            self._reads_before, self._reads_now = self._reads_now, 0
        self.clock += size
        self._reads_now += 1
        self._now[item] = self._now.get(item, 0) + 1

    def forget(self, item: Item) -> None:
        self._now.pop(item, None)
        self._before.pop(item, None)

    def distance(self, item: Item) -> float:
        """Return the predicted distance of a cached item."""
        known, at_least = self._planned_use(item)
        if known is not None:
            return known
        count = self._now.get(item, 0) + self._before.get(item, 0)
        return max(at_least, (self._reads_now + self._reads_before) / count if count else inf)

    def admission_distance(self, item: Item) -> float:
        """Return the predicted distance of a new item; estimates count against it, since it displaces
        another."""
        known, at_least = self._planned_use(item)
        if known is not None:
            return known
        lead = self._now.get(item, 0) + self._before.get(item, 0) - _MARGIN
        reads = self._reads_now + self._reads_before
        return max(at_least, reads / lead if lead > 0 else 2.0 * reads)

    def _planned_use(self, item: Item) -> tuple[int | None, int]:
        """Return the nearest planned use; without one, the number of reads for which plans rule a use out."""
        nearest: int | None = None
        at_least = 0
        for plan in self.plans.values():
            distance = plan.distance(item)
            if distance is None:
                if plan.covers(item):
                    at_least = max(at_least, plan.length - plan.position)
            elif nearest is None or distance < nearest:
                nearest = distance
        return nearest, at_least
