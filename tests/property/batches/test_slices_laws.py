"""Rank slices: for any world size the same global batches, and as many steps on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.plan.rank_slices import TAILS, batch_rows, rank_slice, step_count
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshwire.plan.rank_slices import Tail

sizes = st.integers(0, 300)
batches = st.integers(1, 80)
worlds = st.integers(1, 20)
tails = st.sampled_from(TAILS)


@given(n=sizes, batch=batches, world=worlds, tail=tails, data=st.data())
def test_the_ranks_together_hold_the_global_batch_in_order(
    n: int, batch: int, world: int, tail: Tail, data: st.DataObject
) -> None:
    origin = data.draw(st.integers(0, min(n, batch)))
    for step in range(step_count(n, batch, origin, tail)):
        whole = rank_slice(n, batch, origin, step, 0, 1, tail)
        parts = [rank_slice(n, batch, origin, step, rank, world, tail) for rank in range(world)]
        assert np.concatenate([part.positions for part in parts]).tolist() == whole.positions.tolist()
        assert np.concatenate([part.pad for part in parts]).tolist() == whole.pad.tolist()
        assert [part.first for part in parts] == np.cumsum([0, *map(len, parts)])[:-1].tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert len(whole) == batch_rows(n, batch, origin, step, tail)


@given(n=sizes, batch=batches, tail=tails, data=st.data())
def test_each_position_is_delivered_once(n: int, batch: int, tail: Tail, data: st.DataObject) -> None:
    origin = data.draw(st.integers(0, min(n, batch)))
    seen: list[int] = []
    pads: list[int] = []
    for step in range(step_count(n, batch, origin, tail)):
        part = rank_slice(n, batch, origin, step, 0, 1, tail)
        seen += part.positions[~part.pad].tolist()
        pads += part.positions[part.pad].tolist()
    left = (n - origin) % batch if tail == "drop" else 0
    assert seen == list(range(origin, n - left))
    assert pads == [row % n for row in range(len(pads))]  # they wrap to the epoch's beginning
    assert not pads or tail == "pad"


@given(n=st.integers(1, 300), first=batches, second=batches, data=st.data())
def test_a_change_of_batch_size_on_resume_loses_and_doubles_nothing(
    n: int, first: int, second: int, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, step_count(n, first, 0, "ragged")))
    position = min(done * first, n)
    origin = position % second
    seen = list(range(position))
    for step in range(position // second, step_count(n, second, origin, "ragged")):
        seen += rank_slice(n, second, origin, step, 0, 1, "ragged").positions.tolist()
    assert seen == list(range(n))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"batch": 0}, "batch"),
        ({"batch": 2**40}, "batch"),
        ({"origin": -1}, "origin"),
        ({"origin": 101}, "origin"),
        ({"step": -1}, "step"),
        ({"step": 11}, "step"),
        ({"rank": 4}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world": 0}, "world"),
        ({"world": 2**21}, "world"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, int], path: str) -> None:
    good: dict[str, Any] = {
        "n": 100,
        "batch": 10,
        "origin": 0,
        "step": 9,
        "rank": 0,
        "world": 4,
        "tail": "pad",
    }
    rank_slice(**good)
    with pytest.raises(PlanError) as caught:
        rank_slice(**{**good, **change})
    assert caught.value.path == path


def test_an_empty_rest_has_no_steps() -> None:
    assert step_count(0, 8, 0, "pad") == 0
    assert step_count(10, 8, 10, "pad") == 0
    assert step_count(7, 8, 0, "drop") == 0
