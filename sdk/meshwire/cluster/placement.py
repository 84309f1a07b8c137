"""Placement: the owners of every slot, a pure function of the map, by weighted rendezvous hashing.

Law: a key hashes to a slot, a slot to nodes. The cost of (node, slot) is -log2(h) / weight in
fixed-point integers, so all machines agree to the bit; a changed weight moves slots only to or from that
node. Copies go to different zones where possible.
Invariant: in each rank no node owns more than 1.1 times its share of slots, if zones and weights allow.
Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import numpy as np

from meshwire.cluster.cluster_map import MAX_COPIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from meshwire.cluster.cluster_map import ClusterMap, Node, Share


class Weighted(Protocol):
    """What placement needs of a node."""

    @property
    def node_id(self) -> str: ...

    @property
    def weight(self) -> int: ...


_POINT: Final = 36  # bits behind the binary point of a logarithm
_STEPS: Final = 12  # bits of the mantissa that choose a row of the table
_SCALE: Final = 20  # bits by which costs are raised before they are divided by a weight


@cache
def _log_table() -> npt.NDArray[np.int64]:
    """log2(1 + i / 4096) in fixed point, i = 0…4096."""
    steps = 1 << _STEPS
    exact = np.log2(1.0 + np.arange(steps + 1) / steps)
    table: npt.NDArray[np.int64] = np.rint(exact * (1 << _POINT)).astype(np.int64)
    return table


def fixed_point_logs(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """log2 of numbers from 1 on, in fixed point with 36 bits behind the point. The conversion to a float is
    correctly rounded everywhere (IEEE 754); the rest is integers."""
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
    """A 64-bit hash of each (node, slot): SplitMix64's finalizer over the node's seed and the slot."""
    with np.errstate(over="ignore"):
        x = np.uint64(_seed(node_id)) + (slots + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def slot_costs(nodes: Sequence[Weighted], slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """int64[slots, nodes]: what each slot costs each node; less is better. Weights are above 0."""
    result = np.empty((len(slots), len(nodes)), dtype=np.int64)
    whole = np.int64(64 << _POINT)
    for column, node in enumerate(nodes):
        drawn = np.maximum(slot_hashes(node.node_id, slots), np.uint64(1))
        result[:, column] = np.maximum(whole - fixed_point_logs(drawn), 0) << _SCALE
        result[:, column] //= node.weight
    return result


_SLACK: Final = 0.1
_PREFERRED: Final = (
    32  # best nodes of a slot that are sorted; more are only worked out where zones ask for it
)
_BLOCK: Final = 1024
OwnershipView = Literal["future", "present"]
"""`future`: owners once everybody has joined and left who is about to. `present`: who has had the data until
now."""


def slot_of(bucket: str, key: str, slots: int) -> int:
    """The slot of a name, 0…slots−1."""
    digest = hashlib.blake2b(f"{bucket}\0{key}".encode(), digest_size=8, person=b"mesh-name").digest()
    return int.from_bytes(digest, "big") & (slots - 1)


@dataclass(frozen=True, eq=False)
class Placement:
    """`table`: int16[slots, copies], places in `nodes` of each slot's owners in order; −1 where there are
    fewer nodes than copies."""

    nodes: tuple[Node, ...]
    table: npt.NDArray[np.int16]

    def __repr__(self) -> str:
        return (
            f"Placement(nodes={len(self.nodes)}, slots={self.table.shape[0]}, copies={self.table.shape[1]})"
        )

    def owners_of_slot(self, slot: int) -> tuple[Node, ...]:
        """The owners of a slot, the one that decides first."""
        return tuple(self.nodes[place] for place in self.table[slot].tolist() if place >= 0)

    def owners_of_key(self, bucket: str, key: str) -> tuple[Node, ...]:
        """The owners of a name, the one that decides first."""
        return self.owners_of_slot(slot_of(bucket, key, len(self.table)))

    def slots_per_node(self) -> dict[str, int]:
        """Slots by node id, all ranks together."""
        places, numbers = np.unique(self.table[self.table >= 0], return_counts=True)
        found = {self.nodes[place].node_id: int(n) for place, n in zip(places, numbers, strict=True)}
        return {node.node_id: found.get(node.node_id, 0) for node in self.nodes}


@lru_cache(maxsize=16)
def compute_placement(cluster: ClusterMap, copies: int, tense: OwnershipView = "future") -> Placement:
    """The owners of every slot, `copies` of each (1…8)."""
    if not 1 <= copies <= MAX_COPIES:
        raise ValueError(f"{copies} copies; 1 to {MAX_COPIES} are possible")
    shares = cluster.target_shares if tense == "future" else cluster.current_shares
    members = {node.node_id: node for node in cluster.nodes}
    nodes = tuple(members[share.node_id] for share in shares)
    return Placement(nodes, _table(shares, cluster.slots, copies))


@lru_cache(maxsize=16)
def _table(shares: tuple[Share, ...], slots: int, copies: int) -> npt.NDArray[np.int16]:
    """By shares alone: a node that goes away and comes back costs nothing."""
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
        self._preferred = _preferences(nodes, slots)
        weights = sum(node.weight for node in nodes)
        self._most = [math.ceil((1 + _SLACK) * slots * node.weight / weights) for node in nodes]

    def run(self) -> None:
        copies = min(self._table.shape[1], len(self._nodes))
        owners: list[list[int]] = [[] for _ in range(self._slots)]
        for rank in range(copies):
            loads = [0] * len(self._nodes)
            for slot, own in enumerate(owners):
                chosen = self._choose(slot, own, loads)
                loads[chosen] += 1
                own.append(chosen)
                self._table[slot, rank] = chosen

    def _choose(self, slot: int, own: Sequence[int], loads: Sequence[int]) -> int:
        """The best node with room in a zone that has the fewest of the owners yet."""
        taken = {self._zones[place] for place in own}
        for place in self._preferred[slot]:
            if self._zones[place] not in taken and loads[place] < self._most[place]:
                return place
        return self._second_best(slot, own, loads)

    def _second_best(self, slot: int, own: Sequence[int], loads: Sequence[int]) -> int:
        """Where no zone without an owner has room: a zone that has the fewest, and there the best node with
        room, or the one with the least for its weight."""
        crowd = Counter(self._zones[place] for place in own)
        free = [place for place in self._order(slot) if place not in own]
        least = min(crowd[self._zones[place]] for place in free)
        free = [place for place in free if crowd[self._zones[place]] == least]
        with_room = next((place for place in free if loads[place] < self._most[place]), None)
        if with_room is not None:
            return with_room
        return min(free, key=lambda place: loads[place] / self._nodes[place].weight)

    def _order(self, slot: int) -> Sequence[int]:
        """Every node, the one that wants the slot most first."""
        if len(self._preferred[slot]) == len(self._nodes):
            return self._preferred[slot]
        row = slot_costs(self._nodes, np.array([slot], dtype=np.uint64))[0]
        return [int(place) for place in np.argsort(row, kind="stable")]


def _preferences(nodes: Sequence[Share], slots: int) -> list[list[int]]:
    """For each slot the nodes that want it most, in order."""
    found: list[list[int]] = []
    for start in range(0, slots, _BLOCK):
        block = slot_costs(nodes, np.arange(start, min(start + _BLOCK, slots), dtype=np.uint64))
        if len(nodes) > _PREFERRED:
            best = np.sort(np.argpartition(block, _PREFERRED, axis=1)[:, :_PREFERRED], axis=1)
            within = np.argsort(np.take_along_axis(block, best, axis=1), axis=1, kind="stable")
            found += np.take_along_axis(best, within, axis=1).tolist()
        else:
            found += np.argsort(block, axis=1, kind="stable").tolist()
    return found


class SlotMove(NamedTuple):
    """A slot whose owners change: who gets it, from whom it can be had, who gives it up. Node ids."""

    slot: int
    gains: tuple[str, ...]
    holders: tuple[str, ...]
    losses: tuple[str, ...]


def slot_moves(old: Placement, new: Placement) -> Iterator[SlotMove]:
    """What has to be carried for `old` to become `new`, slot by slot; both of one number of slots."""
    before = np.array([node.node_id for node in old.nodes] + [""])
    after = np.array([node.node_id for node in new.nodes] + [""])
    had, gets = before[old.table], after[new.table]
    for slot in range(len(had)):
        was = [node for node in had[slot].tolist() if node]
        will = [node for node in gets[slot].tolist() if node]
        gains = tuple(node for node in will if node not in was)
        losses = tuple(node for node in was if node not in will)
        if gains or losses:
            yield SlotMove(slot, gains, tuple(was), losses)
