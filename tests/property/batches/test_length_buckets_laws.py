"""Length buckets: the same samples in each pool, runs of like lengths, any position directly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.plan.plan_spec import canonical_spec, parse_spec
from meshwire.plan.shuffle import BucketOrder, BucketSpec, GlobalOrder, buckets_document, parse_buckets
from meshwire.strict_json import PlanError


@given(
    n=st.integers(1, 300),
    rows=st.integers(1, 20),
    window=st.integers(2, 9),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_pools_keep_their_samples_and_runs_are_of_like_lengths(
    n: int, rows: int, window: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)), np.int64)
    inner, buckets = GlobalOrder(n, seed, epoch), BucketSpec("text", rows, window)
    order = BucketOrder(inner, lengths, buckets, seed, epoch)
    samples = order.samples_at(np.arange(n))
    for first in range(0, n, buckets.pool):
        pool = samples[first : first + buckets.pool]
        assert sorted(pool.tolist()) == sorted(inner.samples_at(np.arange(first, first + pool.size)).tolist())
        runs = [lengths[pool[at : at + rows]] for at in range(0, pool.size, rows)]
        spans = sorted((int(run.min()), int(run.max())) for run in runs)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
        assert len(runs[-1]) == rows or int(runs[-1].min()) == spans[-1][0]
    few = data.draw(st.lists(st.integers(0, n - 1), max_size=10))
    again = BucketOrder(inner, lengths, buckets, seed, epoch)
    assert again.samples_at(np.array(few, np.int64)).tolist() == samples[few].tolist()
    assert [int(again.samples_at(np.array([at]))[0]) for at in few] == samples[few].tolist()


def test_runs_and_rows_stand_in_random_order() -> None:
    lengths = np.arange(1000)
    order = BucketOrder(GlobalOrder(1000, 1, 0), lengths, BucketSpec("text", 10, 100), 1, 0)
    found = order.samples_at(np.arange(1000)).reshape(100, 10)
    assert abs(np.corrcoef(found.min(1), np.arange(100))[0, 1]) < 0.3
    assert abs((np.argsort(found, 1) - np.arange(10)).mean(0)).max() < 6
    assert (np.ptp(found, axis=1) == 9).all()


def test_runs_stand_in_another_order_in_each_epoch_and_with_each_seed() -> None:
    inner, buckets = GlobalOrder(1000, 1, 0), BucketSpec("text", 10, 100)
    places = ((1, 0), (1, 1), (2, 0))
    orders = [
        BucketOrder(inner, np.arange(1000), buckets, *place).samples_at(np.arange(1000)) for place in places
    ]
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one[::10] // 10, other[::10] // 10)[0, 1]) < 0.3
        assert sorted(one.tolist()) == sorted(other.tolist())


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"rows": 0}, "buckets.rows"),
        ({"window": 1}, "buckets.window"),
        ({"rows": 1 << 17, "window": 3}, "buckets.window"),
        ({"length": 3}, "buckets.length"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], path: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_spec({"buckets": {"field": "text", "rows": 8, "window": 4, **change}})
    assert caught.value.path == path


def test_the_document_gives_the_buckets_back() -> None:
    spec = parse_spec({"buckets": {"field": "text", "rows": 8, "window": 4}})
    assert spec.buckets is not None
    assert parse_buckets(buckets_document(spec.buckets)) == spec.buckets
    assert parse_spec(canonical_spec(spec)) == spec
