"""Mixes: exact quotas in every block and epoch, each sample its share, any position directly."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.plan.epoch_order import MixOrder, mix_bounds
from meshwire.plan.mix import (
    BLOCK,
    Mix,
    Stage,
    draw_counts,
    draw_counts_before,
    mix_document,
    parse_mix,
    segments,
    shares,
)
from meshwire.plan.plan_spec import canonical_spec, parse_spec
from meshwire.plan.shuffle import ShuffleSpec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshwire.plan.shuffle import Shuffle

weights = st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any)
SHUFFLES = [ShuffleSpec("global"), ShuffleSpec("blocks", 2), ShuffleSpec("none")]


def starts_of(parts: tuple[int, ...], shard: int) -> np.ndarray:
    """Shards of so many samples, the last of a part smaller."""
    bounds = mix_bounds(Mix(parts, ()))
    cuts = [np.arange(begin, end, shard) for begin, end in itertools.pairwise(bounds)]
    return np.append(np.concatenate(cuts), bounds[-1]).astype(np.int64)


def a_mix(data: st.DataObject) -> Mix:
    parts = tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)))
    one = st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)).filter(any)
    places = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=4, unique=True))
    stages = [Stage(tuple(data.draw(one)), *place) for place in sorted({(0, 0), *places})]
    positions, block = data.draw(st.integers(1, 200)), data.draw(st.integers(2, 40))
    return Mix(parts, tuple(stages), positions, block)


@given(weights=weights, count=st.integers(0, 10_000))
@settings(deadline=None)
def test_shares_add_up_never_fall_and_stay_near_the_ratio(weights: list[int], count: int) -> None:
    found = shares(weights, count)
    more = shares(weights, count + 1)
    assert sum(found) == count
    assert all(later >= earlier for earlier, later in zip(found, more, strict=True))
    for share, weight in zip(found, weights, strict=True):
        exact = count * weight / sum(weights)
        assert abs(share - exact) <= (len(weights) - 1).bit_length() / 2 + 1e-9
        assert weight or not share
    whole = count * sum(weights)
    assert shares(weights, whole) == tuple(weight * count for weight in weights)


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=lambda shuffle: shuffle.kind)
@given(data=st.data(), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5), shard=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_each_part_has_its_quota_and_each_sample_its_share(
    shuffle: ShuffleSpec, data: st.DataObject, seed: int, epoch: int, shard: int
) -> None:
    mix = a_mix(data)
    bounds, starts = mix_bounds(mix), starts_of(mix.parts, shard)
    order = MixOrder(mix, bounds, starts, shuffle, seed, epoch)
    samples = order.samples_at(np.arange(order.n))
    parts = np.searchsorted(bounds, samples, side="right") - 1
    for part in segments(mix, order.n, epoch):
        for first in range(part.start, part.end, mix.block):
            end = min(first + mix.block, part.end)
            quotas = np.subtract(
                shares(part.weights, end - part.start), shares(part.weights, first - part.start)
            )
            assert np.bincount(parts[first:end], minlength=len(mix.parts)).tolist() == quotas.tolist()
    for number, (n, count) in enumerate(zip(mix.parts, draw_counts(mix, order.n, epoch), strict=True)):
        times = np.bincount(samples[parts == number] - bounds[number], minlength=n)
        assert times.sum() == count
        assert times.min() >= count // n
        assert times.max() <= -(-count // n)
    few = data.draw(st.lists(st.integers(0, order.n - 1), max_size=20))
    again = MixOrder(mix, bounds, starts, shuffle, seed, epoch)
    assert again.samples_at(np.array(few, np.int64)).tolist() == samples[few].tolist()
    assert [int(again.samples_at(np.array([at]))[0]) for at in few[:3]] == samples[few[:3]].tolist()


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=lambda shuffle: shuffle.kind)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_epochs_go_on_where_the_one_before_ended(shuffle: ShuffleSpec, data: st.DataObject) -> None:
    mix = a_mix(data)
    bounds, starts = mix_bounds(mix), starts_of(mix.parts, 7)
    times = np.zeros(sum(mix.parts), np.int64)
    for epoch in range(5):
        assert draw_counts_before(mix, mix.positions, epoch) == tuple(
            np.add.reduceat(times, bounds[:-1]).tolist()
        )
        order = MixOrder(mix, bounds, starts, shuffle, 3, epoch)
        times += np.bincount(order.samples_at(np.arange(order.n)), minlength=times.size)
        for begin, end in itertools.pairwise(bounds.tolist()):
            assert np.ptp(times[begin:end]) <= 1


@pytest.mark.parametrize("kind", ["global", "blocks", "none"])
def test_by_size_a_mix_gives_every_sample_once(kind: Shuffle) -> None:
    mix = Mix((50_000, 80_001, 1, 9_999), (Stage((50_000, 80_001, 1, 9_999)),))
    shuffle = ShuffleSpec(kind, 4 if kind == "blocks" else 0)
    order = MixOrder(mix, mix_bounds(mix), starts_of(mix.parts, 1000), shuffle, 1, 2)
    assert order.n == sum(mix.parts) > 2 * BLOCK
    assert (np.bincount(order.samples_at(np.arange(order.n))) == 1).all()


@pytest.mark.parametrize("place", [1, 7, 8, 18, 19])
def test_weights_change_at_the_very_position_that_a_stage_names(place: int) -> None:
    mix = Mix((6, 14), (Stage((1, 0)), Stage((0, 1), 1, place)), 20, 8)
    for epoch, first in ((0, 20), (1, place), (2, 0)):
        order = MixOrder(mix, mix_bounds(mix), starts_of(mix.parts, 3), SHUFFLES[0], 1, epoch)
        assert (order.samples_at(np.arange(20)) < 6).tolist() == [position < first for position in range(20)]


def test_a_small_part_drawn_often_costs_no_more_than_its_draws() -> None:
    mix = Mix((10, 1_000_000), (Stage((1, 1)),))
    starts = starts_of(mix.parts, 5)
    order = MixOrder(mix, mix_bounds(mix), starts, ShuffleSpec("blocks", 8), 1, 50)
    samples = order.samples_at(np.arange(4 * BLOCK, 6 * BLOCK))
    assert np.bincount(samples[samples < 10]).sum() == BLOCK


def test_many_small_parts_take_memory_as_a_few_do() -> None:
    mix = Mix((1,) * 256, (Stage((1,) * 256),), positions=1 << 30)
    starts = starts_of(mix.parts, 1)
    tracemalloc.start()
    try:
        order = MixOrder(mix, mix_bounds(mix), starts, ShuffleSpec("blocks", 512), 1, 50)
        for first in range(0, 20 * BLOCK, 7 * BLOCK):
            assert order.samples_at(np.arange(first, first + 2048)).max() < 256
        assert tracemalloc.get_traced_memory()[0] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"parts": []}, "mix.parts"),
        ({"parts": [0, 4]}, "mix.parts[0]"),
        ({"stages": []}, "mix.stages"),
        ({"stages": [{"weights": [1]}]}, "mix.stages[0].weights"),
        ({"stages": [{"weights": [0, 0]}]}, "mix.stages[0].weights"),
        ({"stages": [{"weights": [1, 0.5]}]}, "mix.stages[0].weights[1]"),
        ({"stages": [{"weights": [1, 1], "epoch": 1}]}, "mix.stages[0]"),
        ({"stages": [{"weights": [1, 1]}, {"weights": [1, 2]}]}, "mix.stages[1]"),
        ({"block": 1}, "mix.block"),
        ({"parts": [1] * 200, "stages": [{"weights": [1] * 200}] * 100}, "mix.stages"),
        ({"steps": 1}, "mix.steps"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], path: str) -> None:
    good = {"parts": [3, 4], "stages": [{"weights": [1, 2]}]}
    with pytest.raises(PlanError) as caught:
        parse_spec({"mix": {**good, **change}})
    assert caught.value.path == path


def test_the_document_gives_the_mix_back() -> None:
    stages = [{"weights": [1, 2]}, {"weights": [1, 0], "epoch": 2}]
    spec = parse_spec({"mix": {"parts": [3, 4], "stages": stages}})
    assert spec.mix is not None
    assert parse_mix(mix_document(spec.mix)) == spec.mix
    assert parse_spec(canonical_spec(spec)) == spec
    assert b"mix" not in canonical_spec(parse_spec({}))
