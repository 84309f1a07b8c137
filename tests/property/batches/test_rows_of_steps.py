"""The rows of consecutive steps, looked up together, are those of each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.assembly.frame_rows import RowLookup, count_rows
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress, consecutive_steps
from meshwire.plan.plan_spec import parse_spec
from meshwire.plan.shuffle import GlobalOrder


class Lookup(RowLookup):
    """Has the order of a plan without a snapshot."""

    def _order(self, plan: Any, within: Any, epoch: int) -> Any:
        return self._orders.setdefault((plan.hash, epoch), GlobalOrder(plan.positions, 5, epoch))


@given(
    st.integers(1, 60_000),
    st.integers(1, 5_000),
    st.integers(0, 40),
    st.integers(1, 16),
    st.integers(0, 700),
    st.integers(1, 3),
    st.sampled_from(["pad", "drop", "ragged"]),
)
def test_rows_of_steps_are_those_of_each(
    samples: int, batch: int, step: int, count: int, origin: int, world: int, tail: str
) -> None:
    spec = parse_spec({"seed": 5, "tail": tail})
    plan: Any = SimpleNamespace(hash="p", positions=samples, spec=spec, pairs=None)
    snapshot: Any = None  # which `Lookup` does not need
    first = FrameAddress("p", 3, step, world - 1, world, batch, min(origin, samples - 1))
    steps = consecutive_steps(first, count)
    alone = Lookup()
    try:
        for each in steps:
            count_rows(each, plan)
        expected = [alone.rows_at(each, plan, snapshot) for each in steps]
    except BatchError:
        return
    found = Lookup().rows_of_steps(steps, plan, snapshot)
    for mine, other in zip(found, expected, strict=True):
        assert mine.positions.tolist() == other.positions.tolist()
        assert mine.samples.tolist() == other.samples.tolist()
        assert mine.status.tolist() == other.status.tolist()
        assert (mine.partners, mine.places) == (None, None)
