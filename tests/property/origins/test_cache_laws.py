"""Laws of the cache's policy: capacity and quotas, what must stay, determinism, what a store does with it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.origins.eviction.policy_api import EvictionSettings
from meshd.origins.eviction.segment_policy import SegmentPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.origins.eviction.policy_api import Decision, Eviction, Item

ITEMS = st.tuples(st.sampled_from("ab"), st.sampled_from([f"{p}{n}" for p in "pqr" for n in range(6)]))
SIZES = st.integers(1, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), ITEMS, SIZES),
        st.tuples(st.just("read"), ITEMS, st.just(10)),
        st.tuples(st.just("write"), ITEMS, SIZES),
        st.tuples(st.sampled_from(["clean", "remove", "pin", "unpin", "declare", "withdraw"]), ITEMS),
        st.tuples(st.just("plan"), st.lists(ITEMS, max_size=20)),
        st.tuples(st.just("advance"), st.integers(0, 20)),
        st.tuples(st.just("sweep")),
    ),
    max_size=120,
)
QUOTA = 70


class Store:
    """Does what it is told, with files that hold items, and never looks into the policy."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self.policy = policy
        self.files: dict[int, dict[Item, int]] = {}
        self.dirty: set[Item] = set()
        self.pins: set[Item] = set()
        self.declared: set[Item] = set()
        self.log: list[object] = []

    def holds(self) -> dict[Item, int]:
        return {item: size for file in self.files.values() for item, size in file.items()}

    def must_stay(self, item: Item) -> bool:
        guards = self.pins | self.declared
        return item in self.dirty or any(item[0] == b and item[1].startswith(p) for b, p in guards)

    def evict(self, evictions: Iterable[Eviction]) -> None:
        for eviction in evictions:
            file = self.files.pop(eviction.segment)
            for item in eviction.drop:
                assert not self.must_stay(item), f"{item} had to stay"
                del file[item]
            for item, number in eviction.move:
                self.files.setdefault(number, {})[item] = file.pop(item)
            assert not file, f"nothing was said of {file}"
            assert eviction.freed > 0
            self.log.append(eviction)

    def read(self, item: Item, size: int) -> None:
        held = self.holds().get(item)
        decision = self.policy.decide(item, size)
        assert decision.hit == (held == size or (held is not None and item in self.dirty))
        if not decision.hit:
            self._lose(item)
        self._obey(decision, item, size)

    def write(self, item: Item, size: int) -> None:
        decision = self.policy.write(item, size)
        self._obey(decision, item, size)
        if decision.segment is not None:
            self.dirty.add(item)

    def remove(self, item: Item) -> None:
        self.dirty.discard(item)
        self._lose(item)
        self.evict(self.policy.remove(item))

    def _obey(self, decision: Decision, item: Item, size: int) -> None:
        self.log.append(decision)
        self.evict(decision.evictions)
        if decision.segment is not None:
            self._lose(item)
            self.files.setdefault(decision.segment, {})[item] = size

    def _lose(self, item: Item) -> None:
        for file in self.files.values():
            file.pop(item, None)

    def step(self, what: str, *with_: Any) -> None:
        item: Any = with_[0] if with_ else None
        match what:
            case "read" | "write" | "remove":
                getattr(self, what)(*with_)
            case "clean":
                self.policy.clean(item)
                self.dirty.discard(item)
            case "pin" | "unpin":
                guard = (item[0], item[1][:1])
                getattr(self.policy, what)(*guard)
                (self.pins.add if what == "pin" else self.pins.discard)(guard)
            case "declare":
                self.policy.declare("run", (item[0], item[1][:1]))
                self.declared = {(item[0], item[1][:1])}
            case "withdraw":
                self.policy.withdraw("run")
                self.declared = set()
            case "plan" | "advance":
                getattr(self.policy, what)("run", item)
            case "sweep":
                self.evict(self.policy.sweep())


def policy(segment: int) -> SegmentPolicy:
    return SegmentPolicy(
        EvictionSettings(150, segment=segment, high=0.95, low=0.8, quotas={"b": QUOTA}, memory=3)
    )


@settings(max_examples=75, deadline=None)
@given(STEPS, st.sampled_from([1, 10, 30, 1000]))
def test_a_store_that_obeys_stays_within_and_loses_nothing_that_must_stay(
    steps: list[tuple[Any, ...]], segment: int
) -> None:
    store = Store(policy(segment))
    for step in steps:
        before = {item for item in store.holds() if store.must_stay(item)}
        store.step(*step)
        held = store.holds()
        assert all(store.policy.size_of(item) == size for item, size in held.items())
        assert sum(held.values()) <= store.policy.used <= 0.95 * 150
        assert store.policy.used_by("b") <= QUOTA
        if step[0] not in ("remove", "read"):  # a read may find another size at the origin
            assert {item for item in before if store.must_stay(item)} <= set(held)
        assert store.dirty <= set(held)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_the_same_history_gives_the_same_decisions(steps: list[tuple[Any, ...]]) -> None:
    first, second = Store(policy(30)), Store(policy(30))
    for step in steps:
        first.step(*step)
        second.step(*step)
    assert first.log == second.log


def test_decisions_do_not_depend_on_how_a_process_hashes_texts() -> None:
    """Python draws the hashes of texts anew in every process; sets of items must not decide anything."""
    code = (
        "from meshd.origins.eviction.policy_api import EvictionSettings as S\n"
        "from meshtools.cache_simulator.simulator import *\n"
        "from meshd.origins.eviction.segment_policy import SegmentPolicy\n"
        "p = SegmentPolicy(S(30_000, segment=1000)); p.pin('data', 'sample-0000000')\n"
        "t = mix_traces([epoch_trace(4, 60, 700), zipf_trace(1.0, 400, 80, 300)])\n"
        "p.plan('x', [r.item for r in t[:200]])\n"
        "print([p.decide(r.item, r.size) for r in t])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1
    assert "Eviction" in said.pop()


def test_a_restart_finds_what_was_there() -> None:
    store = SegmentPolicy(EvictionSettings(100, segment=40))
    store.restore(7, ("a", "x"), 30)
    store.restore(7, ("a", "y"), 10)
    store.restore(3, ("a", "z"), 60, dirty=True)
    done = store.sweep()
    assert [eviction.segment for eviction in done] == [7]
    assert store.size_of(("a", "z")) == 60
    assert store.write(("a", "n"), 20).segment not in (None, 7, 3)


def test_hints_off_hears_no_plan_and_no_working_set_but_pins() -> None:
    cache = SegmentPolicy(EvictionSettings(100, segment=10, hints=False))
    cache.declare("run", ("a", ""))
    cache.plan("run", [("a", "x")])
    cache.restore(1, ("a", "x"), 99)
    assert cache.sweep()
    cache.pin("a")
    cache.restore(1, ("a", "x"), 99)
    assert not cache.sweep()
