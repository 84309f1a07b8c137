"""Orders: bijections for every n and key, one = many, and no visible pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.plan.shuffle import BlocksOrder, Feistel, GlobalOrder, ShuffleSpec, StoredOrder, shuffle_order

keys = st.integers(0, 2**64 - 1)
shard_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def test_every_small_n_is_permuted() -> None:
    for n in range(1, 1100):
        values = Feistel(n, key=n).samples_at(np.arange(n))
        assert (np.bincount(values, minlength=n) == 1).all(), n


@given(n=st.integers(1, 2**62), key=keys, data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_and_many_agree_and_stay_inside(n: int, key: int, data: st.DataObject) -> None:
    permutation = Feistel(n, key)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    values = permutation.samples_at(np.array(positions)).tolist()
    assert values == [permutation(position) for position in positions]
    assert all(0 <= value < n for value in values)
    assert len(set(values)) == len(positions)


@pytest.mark.parametrize("n", [2, 300_000, 2**31, 2**32 + 1, 2**40])
def test_rounds_that_are_looked_up_are_those_computed(n: int) -> None:
    """A permutation that has seen many positions makes tables; wider halves than 16 bits have none."""
    permutation, places = Feistel(n, key=5), np.arange(min(n, 500))
    before = permutation.samples_at(places).tolist()
    permutation.samples_at(np.arange(min(n, 200_000)) % n)
    assert bool(permutation._tables) == (n <= 2**32)
    assert permutation.samples_at(places).tolist() == before
    assert [permutation(place) for place in places.tolist()] == before


@pytest.mark.parametrize("n", [2**20, 2**20 + 1, 3_000_017])
def test_large_n_are_permuted(n: int) -> None:
    values = Feistel(n, key=1).samples_at(np.arange(n))
    assert (np.bincount(values, minlength=n) == 1).all()


@given(
    sizes=shard_sizes, window=st.integers(1, 35), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000)
)
@settings(max_examples=30, deadline=None)
def test_blocks_is_a_bijection_that_meets_each_shard_in_one_window(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    starts = starts_of(sizes)
    blocks = BlocksOrder(starts, window, seed, epoch)
    samples = blocks.samples_at(np.arange(blocks.n))
    assert sorted(samples.tolist()) == list(range(blocks.n))
    assert samples.tolist() == [int(blocks.samples_at(np.array([at]))[0]) for at in range(blocks.n)]
    shard = np.searchsorted(starts, samples, side="right") - 1
    spans = {number: np.flatnonzero(shard == number) for number in set(shard.tolist())}
    widest = max((sum(sorted(sizes)[-window:]), 1))
    assert all(places[-1] - places[0] < widest for places in spans.values())


@given(sizes=shard_sizes, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5), data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_subset_of_positions_in_any_order_gives_the_same_samples(
    sizes: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    starts = starts_of(sizes)
    for shuffle in (ShuffleSpec("global"), ShuffleSpec("none"), ShuffleSpec("blocks", 4)):
        whole = shuffle_order(shuffle, starts, seed, epoch)
        everything = whole.samples_at(np.arange(whole.n))
        some = data.draw(st.lists(st.integers(0, max(whole.n - 1, 0)), max_size=30)) if whole.n else []
        assert whole.samples_at(np.array(some, dtype=np.int64)).tolist() == everything[some].tolist()


def test_positions_outside_are_refused() -> None:
    for whole in (GlobalOrder(10, 1, 1), StoredOrder(10), BlocksOrder(starts_of([4, 6]), 1, 1, 1)):
        for position in (-1, 10):
            with pytest.raises(IndexError):
                whole.samples_at(np.array([position]))
            with pytest.raises(IndexError):
                whole.samples_at(np.array([0, position]))
    with pytest.raises(IndexError):
        GlobalOrder(0, 1, 1)(0)
    with pytest.raises(IndexError):
        GlobalOrder(0, 1, 1).samples_at(np.array([0]))


def test_malformed_shards_are_refused() -> None:
    for starts, window in (([0, 5, 3], 1), ([1, 2], 1), ([], 1), ([0, 5], 0)):
        with pytest.raises(ValueError, match="shard_starts"):
            BlocksOrder(np.array(starts, dtype=np.int64), window, 1, 1)


def test_epochs_and_seeds_differ() -> None:
    base = GlobalOrder(1000, 7, 0).samples_at(np.arange(1000))
    for other in (GlobalOrder(1000, 7, 1), GlobalOrder(1000, 8, 0)):
        assert np.count_nonzero(other.samples_at(np.arange(1000)) == base) < 12  # about one is expected


@pytest.mark.parametrize("n", [3, 10, 64, 100])
def test_every_place_is_equally_likely(n: int) -> None:
    draws = 4000
    hits = np.zeros((n, n))
    for key in range(draws):
        hits[np.arange(n), Feistel(n, key).samples_at(np.arange(n))] += 1
    expected = draws / n
    chi_square = ((hits - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_neighbours_are_not_kept_together() -> None:
    n = 100_000
    values = Feistel(n, 5).samples_at(np.arange(n))
    distance = np.abs(np.diff(values)).mean()
    assert abs(distance - n / 3) < n / 100
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.02


def test_memory_is_of_the_order_of_shards_not_samples() -> None:
    million_shards = np.arange(10_001, dtype=np.int64) * 10**9
    blocks = BlocksOrder(million_shards, 64, 1, 0)
    samples = blocks.samples_at(np.array([0, 5 * 10**12, 10**13 - 1]))
    assert ((samples >= 0) & (samples < 10**13)).all()
