"""LoaderState: small, the same on all ranks, and clear about what differs."""

from __future__ import annotations

from typing import Any

import pytest

from meshwire.plan.loader_state import LoaderState, StateMismatchError
from meshwire.strict_json import PlanError

PLAN, SNAPSHOT, OTHER = "ab" * 32, "cd" * 32, "ef" * 32
STATE = LoaderState(PLAN, SNAPSHOT, seed=7, epoch=3, position=12_288, skips=2)


def test_it_survives_json_and_plain_dicts() -> None:
    assert LoaderState.from_json(STATE.to_json()) == STATE
    assert LoaderState.from_json(STATE.to_dict()) == STATE


def test_it_has_about_200_bytes() -> None:
    huge = LoaderState(PLAN, SNAPSHOT, seed=2**63 - 1, epoch=10**6, position=10**12, skips=10**9)
    assert len(STATE.to_json()) < 230
    assert len(huge.to_json()) < 280


@pytest.mark.parametrize(
    ("change", "field", "advice"),
    [
        ({"snapshot": OTHER}, "state.snapshot", "data changed"),
        ({"plan": OTHER}, "state.plan", "ops"),
        ({"seed": 8}, "state.seed", "seed=7"),
        ({"samples": 100}, "state.position", "beyond"),
    ],
)
def test_check_names_the_field_that_differs(change: dict[str, Any], field: str, advice: str) -> None:
    good: dict[str, Any] = {"plan": PLAN, "snapshot": SNAPSHOT, "seed": 7, "samples": 50_000}
    STATE.check(**good)
    with pytest.raises(StateMismatchError, match=advice) as caught:
        STATE.check(**{**good, **change})
    assert caught.value.path == field


def test_a_changed_snapshot_is_named_before_the_plan_that_contains_it() -> None:
    with pytest.raises(StateMismatchError) as caught:
        STATE.check(plan=OTHER, snapshot=OTHER, seed=7)
    assert caught.value.path == "state.snapshot"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"version": 2}, "state.version"),
        ({"position": -1}, "state.position"),
        ({"epoch": 1.5}, "state.epoch"),
        ({"plan": "short"}, "state.plan"),
        ({"seed": None}, "state.seed"),
        ({"stepp": 1}, "state.stepp"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as caught:
        LoaderState.from_json({**STATE.to_dict(), **change})
    assert caught.value.path == path


def test_a_state_without_its_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="missing"):
        LoaderState.from_json('{"version": 1}')


def test_going_on_with_another_batch_size_starts_at_the_same_position() -> None:
    resumed = LoaderState(PLAN, SNAPSHOT, 7, epoch=1, position=1000)
    for batch in (1, 7, 64, 1000, 4096):
        assert resumed.origin(batch) + resumed.step(batch) * batch == 1000


def test_after_the_last_batch_comes_the_next_epoch() -> None:
    state = LoaderState(PLAN, SNAPSHOT, 7)
    positions = []
    for _ in range(5):
        positions.append((state.epoch, state.position))
        state = state.after_batch(4, 10, "pad")
    assert positions == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4)]
    dropped = LoaderState(PLAN, SNAPSHOT, 7, position=4).after_batch(4, 10, "drop")
    assert (dropped.epoch, dropped.position) == (1, 0)
