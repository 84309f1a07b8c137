"""How much a node wants a slot: weighted rendezvous hashing in whole numbers.

Law: the cost of (node, slot) is −log2(h) / weight with h a hash in (0, 1], in fixed point: integers and
table look-ups alone, so that every machine agrees to the bit. The node of the least cost wins; the chance of
it is the node's share of the weights, and a change of one node's weight moves slots to or from that node
only.

Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005), for the logarithmic method.
"""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class Weighed(Protocol):
    """What placement needs of a node."""

    @property
    def node_id(self) -> str: ...

    @property
    def weight(self) -> int: ...


_POINT: Final = 36  # bits behind the binary point of a logarithm
_STEPS: Final = 12  # bits of the mantissa that choose a row of the table
_SCALE: Final = 20  # bits by which costs are raised before they are divided by a weight


@cache
def _table() -> npt.NDArray[np.int64]:
    """log2(1 + i / 4096) in fixed point, i = 0…4096."""
    steps = 1 << _STEPS
    exact = np.log2(1.0 + np.arange(steps + 1) / steps)
    table: npt.NDArray[np.int64] = np.rint(exact * (1 << _POINT)).astype(np.int64)
    return table


def logarithms(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """log2 of numbers from 1 on, in fixed point with 36 bits behind the point. The conversion to a float is
    correctly rounded everywhere (IEEE 754); the rest is integers."""
    bits = values.astype(np.float64).view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = bits & ((1 << 52) - 1)
    row = mantissa >> (52 - _STEPS)
    rest = (mantissa >> (52 - _STEPS - 16)) & 0xFFFF
    table = _table()
    low = table[row]
    result: npt.NDArray[np.int64] = (exponent << _POINT) + low + (((table[row + 1] - low) * rest) >> 16)
    return result


@lru_cache(maxsize=8192)
def _seed(node_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(node_id.encode(), digest_size=8, person=b"mesh-node").digest(), "big"
    )


def hashes(node_id: str, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each (node, slot): SplitMix64's finalizer over the node's seed and the slot."""
    with np.errstate(over="ignore"):
        x = np.uint64(_seed(node_id)) + (slots + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def costs(nodes: Sequence[Weighed], slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """int64[slots, nodes]: what each slot costs each node; less is better. Weights are above 0."""
    result = np.empty((len(slots), len(nodes)), dtype=np.int64)
    whole = np.int64(64 << _POINT)
    for column, node in enumerate(nodes):
        drawn = np.maximum(hashes(node.node_id, slots), np.uint64(1))
        result[:, column] = np.maximum(whole - logarithms(drawn), 0) << _SCALE
        result[:, column] //= node.weight
    return result
