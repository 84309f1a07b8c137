"""Placement: the owners of every slot, a pure function of the map, by weighted rendezvous hashing.

Law: a key hashes to a slot (`routes.slot_of`), a slot to nodes that cost little for it (`preferences`); a
changed weight moves slots only to or from that node. Copies go to different zones where possible
(`assign_slots`).
Invariant: in each rank no node owns more than 1.1 times its share of slots, if zones and weights allow.

Slots choose as if one after the other, in ascending order, each the cheapest node with room that is in a zone
with as few of its owners as possible; where none has room, the node with the lowest load for its weight. All
slots apply at once instead, nodes keep the lowest that they have room for, and the others apply to their next
node: all nodes prefer slots in the same order, so both give the same result.

Sources: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005); Gale and Shapley, "College
admissions and the stability of marriage" (1962).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from meshwire.cluster.cluster_map import MAX_COPIES
from meshwire.cluster.preferences import preference_lists, updated_lists

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import ClusterMap, Node, Share
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
        without = np.zeros(self._slots, np.bool_)  # `unique` would load numpy's masked arrays, at each start
        without[np.concatenate([left, *lost])] = True
        self._crowd_in(np.flatnonzero(without))
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


LISTS: Final = 1 << 14
"""Slots with preferences of their own. Slot s beyond them has those of s modulo this number, so the parts
into which a slot is split prefer the same nodes, and few of them move."""
_KEPT_LISTS: Final = 2
OwnershipView = Literal["future", "present"]
"""`future`: the owners after all pending joins and drains. `present`: the owners that currently have the
data."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Owners by slot. `table`: int16[slots, copies], indices into `nodes` of each slot's owners in order;
    −1 where there are fewer nodes than copies."""

    nodes: tuple[Node, ...]
    table: npt.NDArray[np.int16]

    def __repr__(self) -> str:
        return (
            f"Placement(nodes={len(self.nodes)}, slots={self.table.shape[0]}, copies={self.table.shape[1]})"
        )

    def place_of(self, node_id: str) -> int:
        """Return the index of a node; −2 if it is not among them."""
        return next((place for place, node in enumerate(self.nodes) if node.node_id == node_id), -2)

    def owners_of_slot(self, slot: int) -> tuple[Node, ...]:
        """Return the owners of a slot, the primary first."""
        return tuple(self.nodes[place] for place in self.table[slot].tolist() if place >= 0)

    def slots_by_owners(self) -> Iterator[tuple[tuple[Node, ...], npt.NDArray[np.intp]]]:
        """Yield each distinct tuple of owners, with its slots in ascending order."""
        for slots in group_equal_rows(self.table):
            yield self.owners_of_slot(int(slots[0])), slots

    def slots_per_node(self) -> dict[str, int]:
        """Number of slots by node id, over all ranks."""
        places, numbers = np.unique(self.table[self.table >= 0], return_counts=True)
        found = {self.nodes[place].node_id: int(n) for place, n in zip(places, numbers, strict=True)}
        return {node.node_id: found.get(node.node_id, 0) for node in self.nodes}


def group_equal_rows(table: npt.NDArray[np.int16]) -> list[npt.NDArray[np.intp]]:
    """Return the indices of equal rows of a table of at least one column, each group in ascending order."""
    whole = np.ascontiguousarray(table).view(f"V{table[0].nbytes}").ravel()
    _, which, sizes = np.unique(whole, return_inverse=True, return_counts=True)
    return np.split(np.argsort(which, kind="stable"), np.cumsum(sizes)[:-1])


@lru_cache(maxsize=16)
def compute_placement(cluster: ClusterMap, copies: int, tense: OwnershipView = "future") -> Placement:
    """Compute the owners of every slot, with `copies` (1…8) each."""
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f"{copies} copies; the number must be 1 to {MAX_COPIES}")
    future = tense == "future"
    shares = cluster.target_shares if future else cluster.current_shares
    members = {node.node_id: node for node in cluster.nodes}
    nodes = tuple(members[share.node_id] for share in shares)
    slots = cluster.slots if future else cluster.current_slots
    table = _table(shares, slots, copies)
    if slots < cluster.slots:  # a split is going on: slot s is a part of s modulo the former number
        table = np.tile(table, (cluster.slots // slots, 1))
        table.flags.writeable = False
    return Placement(nodes, table)


@lru_cache(maxsize=16)
def _table(shares: tuple[Share, ...], slots: int, copies: int) -> npt.NDArray[np.int16]:
    """Depends on the shares only, so a node that goes away and comes back hits the cache."""
    table = np.full((slots, copies), -1, dtype=np.int16)
    if shares:
        assign_slots(shares, _lists(shares, min(slots, LISTS)), table)
    table.flags.writeable = False
    return table


_recent: tuple[PreferenceLists, ...] = ()


def _lists(shares: tuple[Share, ...], count: int) -> PreferenceLists:
    """Return preference lists; of a large mesh, made from those of nodes that are mostly the same."""
    global _recent
    known = [lists for lists in _recent if lists.slots == count]
    found = next((lists for lists in known if lists.nodes == shares), None)
    if found is None:
        updates = (updated_lists(lists, shares) for lists in known)
        found = next((lists for lists in updates if lists is not None), None)
    found = found or preference_lists(shares, count)
    if found.horizon is not None:
        _recent = (found, *[lists for lists in _recent if lists is not found])[:_KEPT_LISTS]
    return found
