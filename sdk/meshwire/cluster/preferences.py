"""Preferences: the nodes of every slot in order of their cost, as far as placement asks for them.

Law: the cost of (node, slot) is -log2(h) / weight in fixed-point integers, so all machines agree to the bit.
A list has every node that costs less than the horizon. So a node that joins, leaves or changes its weight
changes its own entries and no others, and the lists that follow need the hashes of that node alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]


class Weighted(Protocol):
    """The part of a node that slot costs depend on."""

    @property
    def node_id(self) -> str: ...

    @property
    def weight(self) -> int: ...


_POINT: Final = 36  # fractional bits of a logarithm
_STEPS: Final = 12  # mantissa bits that select a row of the table
_SCALE: Final = 20  # bits by which costs are shifted left before the division by a weight
_WHOLE: Final = 64 << _POINT
_EXPECTED: Final = 28  # entries of a list, on average
_FEW: Final = 64  # nodes up to which lists are complete
_NODE_BLOCK: Final = 16
_SLOT_BLOCK: Final = 4096
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


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


@lru_cache(maxsize=16384)
def _seed(node_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(node_id.encode(), digest_size=8, person=b"mesh-node").digest(), "big"
    )


def slot_hashes(node_id: str, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each (node, slot): SplitMix64's finalizer over the node's seed and the slot."""
    with np.errstate(over="ignore"):
        x = np.uint64(_seed(node_id)) + (slots + np.uint64(1)) * _STEP
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
    return np.asarray(x ^ (x >> np.uint64(31)))


def slot_costs(nodes: Sequence[Weighted], slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """int64[slots, nodes]: the cost of each slot on each node; lower is better. Weights are above 0."""
    result = np.empty((len(slots), len(nodes)), dtype=np.int64)
    for column, node in enumerate(nodes):
        result[:, column] = _costs(slot_hashes(node.node_id, slots), node.weight)
    return result


def _costs(hashes: npt.NDArray[np.uint64], weights: int | Integers) -> Integers:
    drawn = np.maximum(hashes, np.uint64(1))
    result: Integers = np.maximum(np.int64(_WHOLE) - fixed_point_logs(drawn), 0) << _SCALE
    result //= weights
    return result


@dataclass(frozen=True, eq=False)
class PreferenceLists:
    """The lists of all slots, one after the other. `places`: indices into `nodes`; `costs`: theirs;
    `starts`: int64[slots + 1], where each list begins. A list has every node whose cost is below `horizon`;
    None: every node."""

    nodes: tuple[Weighted, ...]
    slots: int
    horizon: int | None
    places: npt.NDArray[np.int32]
    costs: Integers
    starts: Integers

    def __repr__(self) -> str:
        return f"<PreferenceLists of {self.slots} slots: {len(self.places)} of {len(self.nodes)} nodes>"

    def complete(self, slots: Integers) -> PreferenceLists:
        """Return complete lists of some of the slots, numbered from 0."""
        rows = slot_costs(self.nodes, slots.astype(np.uint64))
        return _complete(self.nodes, rows)


def preference_lists(nodes: tuple[Weighted, ...], slots: int) -> PreferenceLists:
    """Compute the lists of all slots."""
    if len(nodes) <= _FEW:
        return _complete(nodes, slot_costs(nodes, np.arange(slots, dtype=np.uint64)))
    horizon = _horizon(np.array([node.weight for node in nodes], np.float64))
    places, found, costs = _entries_below(nodes, slots, horizon)
    return _sort_preferences(nodes, slots, horizon, places, found, costs)


def updated_lists(lists: PreferenceLists, nodes: tuple[Weighted, ...]) -> PreferenceLists | None:
    """Return the lists of other nodes, made from these; None if it is better to compute them all: because
    many differ, or the horizon no longer fits."""
    if lists.horizon is None or len(nodes) <= _FEW:
        return None
    before = {(node.node_id, node.weight): place for place, node in enumerate(lists.nodes)}
    kept = np.full(len(lists.nodes), -1, np.int32)
    new: list[int] = []
    for place, node in enumerate(nodes):
        known = before.get((node.node_id, node.weight))
        if known is None:
            new.append(place)
        else:
            kept[known] = place
    weights = np.array([node.weight for node in nodes], np.float64)
    if (
        4 * len(new) > len(nodes)
        or not _EXPECTED / 2 <= _expected_nodes(weights, lists.horizon) <= 2 * _EXPECTED
    ):
        return None
    numbers = np.repeat(np.arange(lists.slots, dtype=np.int32), np.diff(lists.starts))
    places = kept[lists.places]
    stays = places >= 0
    places, numbers, costs = places[stays], numbers[stays], lists.costs[stays]
    if new:
        added = tuple(nodes[place] for place in new)
        theirs, slots, more = _entries_below(added, lists.slots, lists.horizon)
        places = np.concatenate([places, np.array(new, np.int32)[theirs]])
        numbers, costs = np.concatenate([numbers, slots]), np.concatenate([costs, more])
    return _sort_preferences(nodes, lists.slots, lists.horizon, places, numbers, costs)


def _sort_preferences(
    nodes: tuple[Weighted, ...],
    slots: int,
    horizon: int,
    places: npt.NDArray[np.int32],
    numbers: npt.NDArray[np.int32],
    costs: Integers,
) -> PreferenceLists:
    order = np.lexsort((places, costs, numbers))
    starts = np.zeros(slots + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=slots), out=starts[1:])
    return PreferenceLists(nodes, slots, horizon, places[order], costs[order], starts)


def _complete(nodes: tuple[Weighted, ...], costs: Integers) -> PreferenceLists:
    order = np.argsort(costs, axis=1, kind="stable")
    starts = np.arange(len(costs) + 1, dtype=np.int64) * len(nodes)
    ordered = np.take_along_axis(costs, order, axis=1).ravel()
    return PreferenceLists(nodes, len(costs), None, order.astype(np.int32).ravel(), ordered, starts)


def _expected_nodes(weights: npt.NDArray[np.float64], horizon: float) -> float:
    """Return how many nodes cost less than the horizon on average: h above 2^(64 − cost · weight)."""
    return float((1 - np.exp2(-horizon / (1 << (_POINT + _SCALE)) * weights)).sum())


def _horizon(weights: npt.NDArray[np.float64]) -> int:
    low, high = 0.0, 64.0 * (1 << (_POINT + _SCALE)) / float(weights.min())
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected_nodes(weights, middle) < _EXPECTED else (low, middle)
    return int(high)


def _entries_below(
    nodes: Sequence[Weighted], slots: int, horizon: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Integers]:
    """Return (places, slots, costs) of all nodes that cost less than the horizon. Of a hash, the last step of
    the finalizer leaves the upper 31 bits as they are, and most entries are too far off to need it."""
    seeds = np.array([_seed(node.node_id) for node in nodes], np.uint64)
    weights = np.array([node.weight for node in nodes], np.int64)
    exponents = 64 - (horizon / (1 << (_POINT + _SCALE))) * weights * (1 + 1e-9) - 1e-6
    least = np.exp2(np.clip(exponents, 0, 63.999)).astype(np.uint64) & ~np.uint64((1 << 33) - 1)
    steps = np.arange(1, slots + 1, dtype=np.uint64) * _STEP
    whole = np.empty((2, _NODE_BLOCK, _SLOT_BLOCK), np.uint64)
    found: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.uint64]]] = []
    for first in range(0, len(nodes), _NODE_BLOCK):
        own = seeds[first : first + _NODE_BLOCK, None]
        for start in range(0, slots, _SLOT_BLOCK):
            block = steps[None, start : start + _SLOT_BLOCK]
            x, y = whole[:, : own.shape[0], : block.shape[1]]
            np.add(own, block, out=x)
            for shift, factor in ((np.uint64(30), _FIRST), (np.uint64(27), _SECOND)):
                np.right_shift(x, shift, out=y)
                np.bitwise_xor(x, y, out=x)
                np.multiply(x, factor, out=x)
            node, slot = np.nonzero(x >= least[first : first + _NODE_BLOCK, None])
            found.append((node + first, slot + start, x[node, slot]))
    places, numbers = (np.concatenate([each[k] for each in found]).astype(np.int32) for k in (0, 1))
    drawn = np.concatenate([each[2] for each in found])
    costs = _costs(drawn ^ (drawn >> np.uint64(31)), weights[places])
    near = costs < horizon
    return places[near], numbers[near], costs[near]
