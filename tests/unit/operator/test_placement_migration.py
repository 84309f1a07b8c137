"""From homes to planned homes, step by step: what was there stays until the others have it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshoperator.planners.placement_migration import (
    BucketState,
    MigrationStep,
    describe_migration,
    plan_migration,
)

NODES = ("a", "b", "c", "d")


def test_without_a_plan_everything_stays() -> None:
    assert plan_migration(BucketState(("a",), None, {"a": 9, "b": 9})) == MigrationStep(("a",))
    assert plan_migration(BucketState(("a",), (), {"a": 9}, unplaced=True)) == MigrationStep(("a",))


def test_a_first_home_lets_go_what_lies_elsewhere() -> None:
    first = plan_migration(BucketState((), ("a",), {"a": 3, "b": 3, "c": 4}, source=10))
    assert (first.homes, first.load, first.release, first.moving) == (("a",), True, ("b", "c"), False)
    assert (
        plan_migration(BucketState((), ("a",), {"a": 0, "b": 1}, source=10)).load is False
    )  # little was there


def test_a_copy_goes_when_the_other_is_there() -> None:
    begun = plan_migration(BucketState(("a",), ("b",), {"a": 100, "b": 0}, source=100))
    assert (begun.homes, begun.behind, begun.leaving, begun.load) == (("a", "b"), ("b",), ("a",), True)
    assert describe_migration(("a",), begun) == "kept on b; a until the others are complete"
    half = plan_migration(BucketState(begun.homes, ("b",), {"a": 100, "b": 50}, source=100))
    assert (half.homes, half.release) == (("a", "b"), ())
    over = plan_migration(BucketState(begun.homes, ("b",), {"a": 100, "b": 96}, source=100))
    assert (over.homes, over.leaving, over.release) == (("b",), (), ("a",))
    assert describe_migration(begun.homes, over) == "no longer on a"


def test_what_a_cache_does_not_keep_holds_nothing_up() -> None:
    seen = BucketState(("a", "b"), ("b",), {"a": 100, "b": 50}, source=100, was_loaded=True)
    assert (plan_migration(seen).homes, plan_migration(seen).load) == (("b",), False)


def test_one_that_does_not_answer_is_not_waited_for_and_nothing_is_lost_for_it() -> None:
    assert plan_migration(BucketState(("a",), ("b",), {"b": 0}, source=100)).homes == ("b",)
    assert plan_migration(BucketState(("a",), ("a",), {"b": 100})).release == ()  # it is read from b now
    missing = plan_migration(BucketState(("a",), ("b",), {"a": 1, "b": 9}, unplaced=True))
    assert (missing.homes, missing.release) == (("a", "b"), ())


def test_a_pinned_copy_stays_while_its_daemon_is_silent_and_the_other_has_nothing() -> None:
    """As when its Kubernetes node is drained faster than the copy is loaded elsewhere."""
    seen = BucketState(("a",), ("b",), {"b": 0, "c": 0}, source=100, pinned=True)
    now = plan_migration(seen)
    assert (now.homes, now.leaving, now.behind, now.load) == (("a", "b"), ("a",), ("b",), True)
    both = plan_migration(BucketState(now.homes, ("b",), {"b": 60}, source=100, pinned=True))
    assert (both.homes, both.release) == (("a", "b"), ())
    over = plan_migration(BucketState(now.homes, ("b",), {"b": 97}, source=100, pinned=True))
    assert (over.homes, over.leaving) == (("b",), ())
    back = plan_migration(BucketState(over.homes, ("b",), {"a": 100, "b": 97}, source=100, pinned=True))
    assert back.release == ("a",)


def test_a_pinned_copy_is_not_freed_anywhere_before_its_home_has_it() -> None:
    for homes in ((), ("b",)):
        seen = BucketState(homes, ("b",), {"a": 100, "b": 0}, source=100, pinned=True)
        now = plan_migration(seen)
        assert (now.homes, now.load, now.release) == (("b",), True, ())
    silent = plan_migration(BucketState(("b",), ("b",), {"a": 100}, source=100, pinned=True))
    assert silent.release == ()
    two = BucketState(("a",), ("b", "c"), {"a": 100, "b": 100}, source=100, pinned=True)
    assert plan_migration(two).leaving == ("a",)  # c is silent, and may have nothing
    loaded = BucketState(("b",), ("b",), {"a": 100, "b": 50}, source=100, pinned=True, was_loaded=True)
    assert plan_migration(loaded).release == ("a",)  # b cannot have more


held = st.dictionaries(st.sampled_from(NODES), st.integers(0, 100), min_size=1)
some = st.sets(st.sampled_from(NODES), max_size=4).map(lambda found: tuple(sorted(found)))


@given(some, some, held)
def test_it_comes_to_what_is_planned_and_never_has_less(
    homes: tuple[str, ...], planned: tuple[str, ...], there: dict[str, int]
) -> None:
    """Daemons that answer; reading fills homes up to what the best of them had."""
    have = dict.fromkeys(NODES, 0) | there
    most = max((have[name] for name in homes), default=0)
    for _ in range(8):
        now = plan_migration(BucketState(homes, planned or None, have, source=100))
        assert set(now.release).isdisjoint(now.homes)
        assert max((have[name] for name in now.homes), default=0) >= (0.95 * most if homes else 0)
        homes = now.homes
        have |= dict.fromkeys(now.release, 0)
        most = max((have[name] for name in homes), default=most)
        have |= {name: max(have[name], most) for name in homes}
    if planned:
        assert homes == planned
        assert not any(have[name] for name in NODES if name not in planned)
