"""How many nodes look for the failure detector's lease at a time, and how often its holder renews it."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import ControlError
from meshd.control.embedded import EmbeddedControl
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.control.control_api import Lease

_TTL = 5.0


@pytest.mark.parametrize(("nodes", "least", "most"), [(32, 32, 32), (1000, 10, 60)])
def test_a_few_dozen_nodes_look_each_time_and_others_the_next(
    tmp_path: Path, nodes: int, least: int, most: int
) -> None:
    clock = SystemClock()
    cluster = ClusterMap(3, tuple(Node(f"n{number:04}", f"http://n{number}:1") for number in range(nodes)))
    with closing(EmbeddedControl(tmp_path, clock)) as control:
        writer = NodeStateWriter(control, ClusterMapStore(control))
        detectors = [
            FailureDetector(
                ClusterView(node.node_id, control, lambda _: 2, standalone_map=cluster),
                control,
                writer,
                lambda: 2,
                clock,
                ttl=5.0,
                down_after=900.0,
            )
            for node in cluster.nodes
        ]
    rounds = [{n for n, each in enumerate(detectors) if each._is_turn()} for _ in range(50)]
    assert all(least <= len(turn) <= most for turn in rounds)
    assert len(set().union(*rounds)) > 0.7 * nodes


class CountedControl(MemoryControl):
    """Counts renewals; those in `failing`, by number, fail."""

    renewals = 0
    failing: frozenset[int] = frozenset()

    async def renew_lease(self, lease: Lease) -> Lease:
        self.renewals += 1
        if self.renewals in self.failing:
            raise ControlError("no answer")
        return await super().renew_lease(lease)


def detector_of(control: MemoryControl, clock: ManualClock) -> FailureDetector:
    """That of n1, in a mesh of its own."""
    alone = ClusterMap(3, (Node("n1", "http://n1:1"),))
    mesh = ClusterView("n1", control, lambda _: 2, standalone_map=alone)
    writer = NodeStateWriter(control, ClusterMapStore(control))
    return FailureDetector(mesh, control, writer, lambda: 2, clock, ttl=_TTL, down_after=900.0)


@pytest.mark.parametrize(
    ("failing", "renewed_in"), [(frozenset[int](), [2, 4, 6, 8]), (frozenset({1}), [2, 3, 5, 7])]
)
def test_the_holder_renews_in_every_second_round_and_at_once_after_a_failure(
    failing: frozenset[int], renewed_in: list[int]
) -> None:
    async def check() -> None:
        clock = ManualClock()
        control = CountedControl(clock)
        control.failing = failing
        detector = detector_of(control, clock)
        assert await detector._hold_lease()
        found = []
        for number in range(1, 9):
            before = control.renewals
            clock.advance(_TTL / 5)
            with suppress(ControlError):
                assert await detector._hold_lease()
            assert list(await control.lease_holders("guardian")) == ["guardian"]
            found += [number] * (control.renewals - before)
        assert found == renewed_in

    asyncio.run(check())


def test_it_goes_on_when_no_thread_can_be_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        clock = ManualClock()
        control, rounds = CountedControl(clock), asyncio.Semaphore(0)
        detector = detector_of(control, clock)
        detector._ttl = 0.05

        async def fail(_: str) -> dict[str, str]:
            rounds.release()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(control, "lease_holders", fail)
        running = asyncio.ensure_future(detector.run())
        for _ in range(3):
            await asyncio.wait_for(rounds.acquire(), 30)
        running.cancel()

    asyncio.run(check())
    assert caplog.text.count("Traceback") == 1


def test_a_holder_that_stood_still_renews_before_it_acts() -> None:
    async def check() -> None:
        clock = ManualClock()
        control = CountedControl(clock)
        detector = detector_of(control, clock)
        assert await detector._hold_lease()
        clock.advance(3 * _TTL)
        assert await control.acquire_lease("guardian", "n2", _TTL)
        assert not await detector._hold_lease()

    asyncio.run(check())
