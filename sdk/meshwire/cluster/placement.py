"""Placement: the owners of every slot, a pure function of the map, by weighted rendezvous hashing.

Law: a key hashes to a slot (`routes.slot_of`), a slot to nodes. The cost of (node, slot) is
-log2(h) / weight in fixed-point integers, so all machines agree to the bit; a changed weight moves slots only
to or from that node. Copies go to different zones where possible.
Invariant: in each rank no node owns more than 1.1 times its share of slots, if zones and weights allow.
Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from meshwire.cluster.cluster_map import MAX_COPIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import ClusterMap, Node, Share


class Weighted(Protocol):
    """The part of a node that slot costs depend on."""

    @property
    def node_id(self) -> str: ...

    @property
    def weight(self) -> int: ...


_POINT: Final = 36  # fractional bits of a logarithm
_STEPS: Final = 12  # mantissa bits that select a row of the table
_SCALE: Final = 20  # bits by which costs are shifted left before the division by a weight


@cache
def _log_table() -> npt.NDArray[np.int64]:
    """log2(1 + i / 4096) in fixed point, i = 0…4096."""
    steps = 1 << _STEPS
    exact = np.log2(1.0 + np.arange(steps + 1) / steps)
    table: npt.NDArray[np.int64] = np.rint(exact * (1 << _POINT)).astype(np.int64)
    return table


def fixed_point_logs(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return log2 of integers from 1 up, in fixed point with 36 fractional bits. The conversion to float is
    correctly rounded everywhere (IEEE 754); the rest is integer arithmetic."""
    bits = values.astype(np.float64).view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = bits & ((1 << 52) - 1)
    row = mantissa >> (52 - _STEPS)
    rest = (mantissa >> (52 - _STEPS - 16)) & 0xFFFF
    table = _log_table()
    low = table[row]
    result: npt.NDArray[np.int64] = (exponent << _POINT) + low + (((table[row + 1] - low) * rest) >> 16)
    return result


@lru_cache(maxsize=8192)
def _seed(node_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(node_id.encode(), digest_size=8, person=b"mesh-node").digest(), "big"
    )


def slot_hashes(node_id: str, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each (node, slot): SplitMix64's finalizer over the node's seed and the slot."""
    with np.errstate(over="ignore"):
        x = np.uint64(_seed(node_id)) + (slots + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def slot_costs(nodes: Sequence[Weighted], slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """int64[slots, nodes]: the cost of each slot on each node; lower is better. Weights are above 0."""
    result = np.empty((len(slots), len(nodes)), dtype=np.int64)
    whole = np.int64(64 << _POINT)
    for column, node in enumerate(nodes):
        drawn = np.maximum(slot_hashes(node.node_id, slots), np.uint64(1))
        result[:, column] = np.maximum(whole - fixed_point_logs(drawn), 0) << _SCALE
        result[:, column] //= node.weight
    return result


_SLACK: Final = 0.1
_PREFERRED: Final = 32  # best nodes of a slot to sort; the rest are computed only if zones require it
_BLOCK: Final = 1024
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
    shares = cluster.target_shares if tense == "future" else cluster.current_shares
    members = {node.node_id: node for node in cluster.nodes}
    nodes = tuple(members[share.node_id] for share in shares)
    return Placement(nodes, _table(shares, cluster.slots, copies))


@lru_cache(maxsize=16)
def _table(shares: tuple[Share, ...], slots: int, copies: int) -> npt.NDArray[np.int16]:
    """Depends on the shares only, so a node that goes away and comes back hits the cache."""
    table = np.full((slots, copies), -1, dtype=np.int16)
    if shares:
        _Assigning(shares, slots, table).run()
    table.flags.writeable = False
    return table


class _Assigning:
    """Fills a table, rank by rank."""

    def __init__(self, nodes: tuple[Share, ...], slots: int, table: npt.NDArray[np.int16]) -> None:
        self._nodes, self._slots, self._table = nodes, slots, table
        self._zones = [node.zone or f"\0{node.node_id}" for node in nodes]
        self._preferences = _preferences(nodes, slots)
        self._preferred: list[list[int]] = []
        weights = sum(node.weight for node in nodes)
        self._most = [math.ceil((1 + _SLACK) * slots * node.weight / weights) for node in nodes]

    def run(self) -> None:
        for rank in range(min(self._table.shape[1], len(self._nodes))):
            chosen = self._first_choices(rank)
            self._table[:, rank] = self._choose_in_turn(rank) if chosen is None else chosen

    def _first_choices(self, rank: int) -> npt.NDArray[np.intp] | None:
        """Return for every slot the best node in a zone that has none of its owners yet; None if there is
        none for some slot, or a node would get more than it may."""
        numbers = {zone: number for number, zone in enumerate(dict.fromkeys(self._zones))}
        zones = np.array([numbers[zone] for zone in self._zones])
        free = np.ones(self._preferences.shape, dtype=np.bool_)
        for column in self._table[:, :rank].T:
            free &= zones[self._preferences] != zones[column][:, None]
        if not free.any(axis=1).all():
            return None
        chosen = self._preferences[np.arange(self._slots), free.argmax(axis=1)]
        loads = np.bincount(chosen, minlength=len(self._nodes))
        return None if (loads > self._most).any() else chosen

    def _choose_in_turn(self, rank: int) -> list[int]:
        """Return the node of each slot, where those that come first take the room."""
        if not self._preferred:
            self._preferred = self._preferences.tolist()
        loads, found = [0] * len(self._nodes), list[int]()
        for slot, own in enumerate(self._table[:, :rank].tolist()):
            chosen = self._choose(slot, own, loads)
            loads[chosen] += 1
            found.append(chosen)
        return found

    def _choose(self, slot: int, own: Sequence[int], loads: Sequence[int]) -> int:
        """Return the best node with room in a zone that has none of the owners yet."""
        taken = {self._zones[place] for place in own}
        for place in self._preferred[slot]:
            if self._zones[place] not in taken and loads[place] < self._most[place]:
                return place
        return self._second_best(slot, own, loads)

    def _second_best(self, slot: int, own: Sequence[int], loads: Sequence[int]) -> int:
        """Choose when every zone with room already has an owner: take a zone with the fewest owners, and in
        it the best node with room, else the node with the lowest load for its weight."""
        crowd = Counter(self._zones[place] for place in own)
        free = [place for place in self._order(slot) if place not in own]
        least = min(crowd[self._zones[place]] for place in free)
        free = [place for place in free if crowd[self._zones[place]] == least]
        with_room = next((place for place in free if loads[place] < self._most[place]), None)
        if with_room is not None:
            return with_room
        return min(free, key=lambda place: loads[place] / self._nodes[place].weight)

    def _order(self, slot: int) -> Sequence[int]:
        """Return all nodes in order of cost for the slot, the cheapest first."""
        if len(self._preferred[slot]) == len(self._nodes):
            return self._preferred[slot]
        row = slot_costs(self._nodes, np.array([slot], dtype=np.uint64))[0]
        return [int(place) for place in np.argsort(row, kind="stable")]


def _preferences(nodes: Sequence[Share], slots: int) -> npt.NDArray[np.intp]:
    """Return intp[slots, nodes]: for each slot the cheapest nodes in order, `_PREFERRED` at most."""
    found: list[npt.NDArray[np.intp]] = []
    for start in range(0, slots, _BLOCK):
        block = slot_costs(nodes, np.arange(start, min(start + _BLOCK, slots), dtype=np.uint64))
        if len(nodes) > _PREFERRED:
            best = np.sort(np.argpartition(block, _PREFERRED, axis=1)[:, :_PREFERRED], axis=1)
            within = np.argsort(np.take_along_axis(block, best, axis=1), axis=1, kind="stable")
            found.append(np.take_along_axis(best, within, axis=1))
        else:
            found.append(np.argsort(block, axis=1, kind="stable"))
    return np.concatenate(found)
