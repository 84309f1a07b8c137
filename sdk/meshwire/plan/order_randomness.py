"""How near an order of samples is to a full shuffle, as figures relative to it: 1 is a full shuffle.

Law: pure, and bounded: a large epoch is judged by a sample of its positions, the same for every order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.plan.shuffle import Indices, SampleOrder

POSITIONS: Final = 1 << 16
"""Positions of an epoch that are looked at."""
_STRETCH: Final = 1 << 10  # consecutive positions within which runs are counted


def relative_distance(order: SampleOrder) -> float:
    """Return how far samples are from their places in stored order: the mean, divided by that of a full
    shuffle, a third of the epoch. 0 in stored order."""
    if order.n < 2:
        return 1.0
    positions = np.unique(np.linspace(0, order.n - 1, min(order.n, POSITIONS)).astype(np.int64))
    moved = np.abs(order.samples_at(positions) - positions)
    return float(moved.mean()) * 3 / order.n


def relative_run_length(order: SampleOrder, sizes: Indices, group_of: Callable[[Indices], Indices]) -> float:
    """Return how long runs of samples of the same group are: the mean, divided by that of a full shuffle.

    `sizes`: int64[groups], the number of samples of each group; `group_of`: from samples int64[k] to their
    groups, such as shards or classes. Runs that are longer than the positions looked at count as so long.
    """
    counts = sizes.astype(np.float64)
    total = float(counts.sum())
    if total < 2:
        return 1.0
    expected = 1.0 - float((counts * (counts - 1)).sum()) / (total * (total - 1))
    if counts.max() == total:  # a single group
        return 1.0
    changes = pairs = 0
    for first in _stretches(order.n):
        stretch = np.arange(first, min(first + _STRETCH, order.n), dtype=np.int64)
        found = group_of(order.samples_at(stretch))
        changes += int(np.count_nonzero(found[1:] != found[:-1]))
        pairs += found.size - 1
    return expected * pairs / max(changes, 1)


def _stretches(n: int) -> Indices:
    """Return where the stretches begin that are looked at: all of them, or some at even distances."""
    firsts = np.arange(0, n, _STRETCH, dtype=np.int64)
    return firsts[:: max(1, -(-firsts.size * _STRETCH // POSITIONS))]
