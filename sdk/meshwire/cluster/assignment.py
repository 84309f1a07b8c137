"""Assignment: which node owns each slot in each rank, by the slots' preferences and the room of the nodes.

Law: as if slots chose in ascending order, each the cheapest node with room that is in a zone with as few of
its owners as possible; where none has room, the node with the lowest load for its weight. All slots apply
at once instead, nodes keep the lowest that they have room for, and the others apply to their next node:
all nodes prefer slots in the same order, so both give the same result.

Source: Gale and Shapley, "College admissions and the stability of marriage" (1962).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import Share
    from meshwire.cluster.preferences import PreferenceLists

    Integers = npt.NDArray[np.int64]

SLACK: Final = 0.1
_BLOCK: Final = 512  # slots whose complete lists are in memory at a time


def assign_slots(shares: tuple[Share, ...], lists: PreferenceLists, table: npt.NDArray[np.int16]) -> None:
    """Fill the table, rank by rank. `lists`: of the same nodes, for the first slots of the table; slot s has
    the list of s modulo their number."""
    for rank in range(min(table.shape[1], len(shares))):
        table[:, rank] = _Rank(shares, lists, table[:, :rank]).run()


class _Rank:
    """One rank. `own`: the owners in the earlier ranks."""

    def __init__(self, shares: tuple[Share, ...], lists: PreferenceLists, own: npt.NDArray[np.int16]) -> None:
        self._lists, self._own, self._slots = lists, own, len(own)
        names = [share.zone or f"\0{share.node_id}" for share in shares]
        numbers = {zone: number for number, zone in enumerate(dict.fromkeys(names))}
        self._zones = np.array([numbers[zone] for zone in names], np.int32)
        self._weights = np.array([share.weight for share in shares], np.float64)
        total = sum(share.weight for share in shares)
        self._room = np.array(
            [math.ceil((1 + SLACK) * self._slots * share.weight / total) for share in shares], np.int64
        )
        self._crowd = self._least_crowds(len(numbers))
        self._below = np.full(len(shares), self._slots, np.int64)  # a node takes the slots below this one
        self._chosen = np.full(self._slots, -1, np.int64)

    def run(self) -> Integers:
        """Return the owner of each slot in this rank."""
        slots = np.arange(self._slots, dtype=np.int64)
        left = self._apply(slots, *self._candidates(slots, self._lists, slots % self._lists.slots))
        lost: list[Integers] = []
        while left.size and self._lists.horizon is not None:  # their lists were too short
            some, left = left[:_BLOCK], left[_BLOCK:]
            refused = self._apply(some, *self._complete_candidates(some))
            at_end = np.isin(refused, some)
            lost.append(refused[at_end])
            left = np.union1d(left, refused[~at_end])
        self._crowd_in(np.unique(np.concatenate([left, *lost])))
        return self._chosen

    def _least_crowds(self, zones: int) -> Integers:
        """Return, by slot, how many owners the zone of its next one has: the fewest possible."""
        rank = self._own.shape[1]
        if zones > rank:
            return np.zeros(self._slots, np.int64)
        counts = np.zeros((self._slots, zones), np.int64)
        for column in self._own.T:
            counts[np.arange(self._slots), self._zones[column]] += 1
        sizes = np.bincount(self._zones, minlength=zones)
        least: Integers = np.where(counts < sizes, counts, rank + 1).min(axis=1)
        return least

    def _candidates(
        self, slots: Integers, lists: PreferenceLists, numbers: Integers
    ) -> tuple[npt.NDArray[np.int32], Integers]:
        """Return the candidates of slots, one list after the other, and where each begins. `numbers`: of the
        slots' lists."""
        sizes = np.diff(lists.starts)[numbers]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        if numbers.size == lists.slots:
            places = lists.places
        else:
            places = lists.places[
                np.repeat(lists.starts[numbers] - offsets[:-1], sizes) + np.arange(offsets[-1])
            ]
        if not self._own.shape[1]:
            return places, offsets
        theirs, zones = np.repeat(slots, sizes), self._zones[places]
        crowd, free = np.zeros(len(places), np.int8), np.ones(len(places), np.bool_)
        for column in self._own.T:
            owner = column[theirs]
            crowd += self._zones[owner] == zones
            free &= owner != places
        free &= crowd == self._crowd[theirs]
        return places[free], np.concatenate([[0], np.cumsum(free)])[offsets]

    def _complete_candidates(self, slots: Integers) -> tuple[npt.NDArray[np.int32], Integers]:
        lists = self._lists.complete(slots % self._lists.slots)
        return self._candidates(slots, lists, np.arange(slots.size))

    def _apply(self, slots: Integers, places: npt.NDArray[np.int32], starts: Integers) -> Integers:
        """Let slots apply to their candidates, until each has a node or none is left; return those without,
        in ascending order. Among them may be others that had a node before."""
        at, ends = np.zeros(self._slots, np.int64), np.zeros(self._slots, np.int64)
        at[slots], ends[slots] = starts[:-1], starts[1:]
        active = slots
        lost: list[Integers] = []
        while active.size:
            looking = active
            while looking.size:
                at_end = at[looking] >= ends[looking]
                if at_end.any():
                    lost.append(looking[at_end])
                    looking = looking[~at_end]
                place = places[at[looking]]
                taken = looking < self._below[place]
                self._chosen[looking[taken]] = place[taken]
                looking = looking[~taken]
                at[looking] += 1
            active = self._refuse()
        return np.sort(np.concatenate(lost)) if lost else np.empty(0, np.int64)

    def _refuse(self) -> Integers:
        """Take from each node the slots that it has no room for, the highest first; return them."""
        has = np.flatnonzero(self._chosen >= 0)
        full = np.bincount(self._chosen[has], minlength=len(self._room)) > self._room
        slots = has[full[self._chosen[has]]]
        slots = slots[np.argsort(self._chosen[slots], kind="stable")]
        nodes = self._chosen[slots]
        first = np.searchsorted(nodes, nodes)  # where each node's begin
        turn = np.arange(slots.size) - first
        refused = turn >= self._room[nodes]
        last = turn == self._room[nodes] - 1
        self._below[nodes[last]] = slots[last] + 1
        self._chosen[slots[refused]] = -1
        return slots[refused]

    def _crowd_in(self, slots: Integers) -> None:
        """Give slots for which no candidate has room to those with the lowest loads for their weights."""
        loads = self._room.astype(np.float64)
        for slot, places in self._each_complete(slots):
            chosen = places[np.argmin(loads[places] / self._weights[places])]
            loads[chosen] += 1
            self._chosen[slot] = chosen

    def _each_complete(self, slots: Integers) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """Yield each slot with all its candidates."""
        whole = self._lists.horizon is None
        for first in range(0, slots.size, self._slots if whole else _BLOCK):
            some = slots[first:] if whole else slots[first : first + _BLOCK]
            if whole:
                places, starts = self._candidates(some, self._lists, some % self._lists.slots)
            else:
                places, starts = self._complete_candidates(some)
            for number, slot in enumerate(some.tolist()):
                yield slot, places[starts[number] : starts[number + 1]]
