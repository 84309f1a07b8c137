"""How near orders are to a full shuffle: 1 for a full shuffle, whatever the data; Blocks in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.read_ahead import cost_estimator
from meshd.batches.read_ahead.cost_estimator import POSITIONS, relative_distance
from meshwire.plan.shuffle import BlocksOrder, GlobalOrder, StoredOrder

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.plan.shuffle import Indices, SampleOrder


def equal_groups(count: int, size: int) -> npt.NDArray[np.int64]:
    """`count` groups of `size` samples, one after the other in stored order."""
    return np.repeat(np.arange(count, dtype=np.int64), size)


def relative_run_length(order: SampleOrder, groups: Indices) -> float:
    """Of samples whose groups are given one by one."""
    return cost_estimator.relative_run_length(order, np.bincount(groups), lambda samples: groups[samples])


@given(st.integers(0, 1 << 60), st.integers(5, 100), st.integers(200, 1000))
def test_a_full_shuffle_is_one_for_any_data(seed: int, count: int, size: int) -> None:
    order = GlobalOrder(count * size, seed, 0)
    assert relative_distance(order) == pytest.approx(1, abs=0.1)
    assert relative_run_length(order, equal_groups(count, size)) == pytest.approx(1, abs=0.15)


@given(st.integers(2, 100), st.integers(2, 100))
def test_stored_order_moves_nothing_and_has_runs_of_whole_groups(count: int, size: int) -> None:
    n = count * size
    order, groups = StoredOrder(n), equal_groups(count, size)
    assert relative_distance(order) == 0
    changes = 1 - (size - 1) / (n - 1)  # of neighbours in a full shuffle
    if n <= 1024:
        assert relative_run_length(order, groups) == pytest.approx(changes * (n - 1) / (count - 1))
    assert relative_run_length(order, groups) > 1


def test_more_shards_in_a_block_are_nearer_to_a_full_shuffle() -> None:
    starts: Indices = np.arange(0, 65 * 512, 512, dtype=np.int64)
    groups = equal_groups(64, 512)
    runs = [relative_run_length(BlocksOrder(starts, shards, 5, 0), groups) for shards in (1, 2, 4, 16, 64)]
    assert runs == sorted(runs, reverse=True)
    assert runs[2] == pytest.approx(1 / (1 - 1 / 4), rel=0.1)  # a neighbour is of the same shard once in four
    assert runs[-1] == pytest.approx(1, rel=0.05)
    # The shards of a block come from anywhere, so samples move as far as in a full shuffle.
    assert relative_distance(BlocksOrder(starts, 4, 5, 0)) == pytest.approx(1, abs=0.2)


def test_a_large_epoch_is_judged_by_few_positions() -> None:
    class Counted(GlobalOrder):
        """Counts the positions it is asked for."""

        asked = 0

        def samples_at(self, positions: Indices) -> Indices:
            self.asked += positions.size
            return super().samples_at(positions)

    order = Counted(3_000_000, 1, 0)
    assert relative_distance(order) == pytest.approx(1, abs=0.02)
    assert order.asked <= POSITIONS
    order.asked = 0
    assert relative_run_length(order, equal_groups(3000, 1000)) == pytest.approx(1, abs=0.02)
    assert order.asked <= POSITIONS


def test_epochs_without_a_choice_are_full_shuffles() -> None:
    for n in (0, 1):
        assert relative_distance(StoredOrder(n)) == 1
        assert relative_run_length(StoredOrder(n), np.zeros(n, np.int64)) == 1
    assert relative_run_length(StoredOrder(50), np.zeros(50, np.int64)) == 1  # a single class
