"""Counters that the fast path writes in batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists, sampled_from

from meshd.telemetry.exemplars import LATENCY_BOUNDS
from meshd.telemetry.metric_registry import SecondsHistogram


@given(lists(sampled_from([0.0, 0.0005, 0.001, 0.0011, 0.5, 59.0, 1e6]) | floats(0, 100), max_size=30))
def test_many_values_at_once_count_as_one_by_one(values: list[float]) -> None:
    bounds = LATENCY_BOUNDS
    once, each = (SecondsHistogram(name, "", registry=None, buckets=bounds) for name in ("once", "each"))
    once.observe_all(values)
    for value in values:
        each.observe(value)
    (found,), (expected,) = once.collect(), each.collect()
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert (one.name[4:], one.labels) == (other.name[4:], other.labels)
        if not one.name.endswith("_created"):
            assert one.value == pytest.approx(other.value)
