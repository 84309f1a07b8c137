"""What a rebalancer logs of failures that go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.cluster.rebalance.progress import ProgressReporter
from meshd.cluster.rebalance.rebalancer import Rebalancer, RebalancerDeps
from meshd.store.errors import DiskFullError
from meshwire.cluster import ClusterMap, Node
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl


class _Mesh:
    """A mesh of one map that does not change."""

    node_id = "n1"

    def __init__(self) -> None:
        self.waits = asyncio.Semaphore(0)

    def current_map(self) -> ClusterMap:
        return ClusterMap(3, (Node("n1", "http://n1:1"),))

    async def wait_for_newer_map(self, version: int, max_wait: float) -> bool:
        self.waits.release()
        await asyncio.sleep(0)
        return False


@pytest.mark.parametrize(
    "failures",
    [
        [RuntimeError("cannot start a thread")] * 4,
        [DiskFullError(f"{size} bytes do not fit on a disk") for size in (1, 20, 3, 40)],
    ],
)
def test_a_failure_is_logged_once_and_not_twice_a_second(
    failures: list[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        clock, fake, mesh = ManualClock(), SimpleNamespace(), _Mesh()
        control: Any = MemoryControl(clock)
        deps = RebalancerDeps(lambda node: _unused(), lambda: [2], lambda size: asyncio.sleep(0))
        anything: Any = fake
        view: Any = mesh
        rebalancer = Rebalancer(anything, anything, view, anything, control, deps, clock)
        coming: list[Exception | None] = [failures[0], None, *failures[1:]]

        async def fail() -> None:
            failing = coming.pop() if coming else None
            if failing is not None:
                raise failing

        monkeypatch.setattr(rebalancer, "run_once", fail)
        running = asyncio.ensure_future(rebalancer.run())
        for _ in range(6):
            await asyncio.wait_for(mesh.waits.acquire(), 20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(check())
    assert caplog.text.count("Traceback") == 2, "once more after it had gone"


def test_a_node_that_waits_says_why_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The next attempt begins a comparison again, and may end with another object."""

    async def check() -> None:
        clock = ManualClock()
        reporter = ProgressReporter("n1", MemoryControl(clock), clock)
        for size in range(100, 220):
            await reporter.begin_phase("comparing", 3)
            await reporter.report_blocked(f"{size} bytes do not fit on a disk")
            clock.advance(0.5)
        await reporter.report_blocked("a peer does not answer")

    asyncio.run(check())
    assert [record.__dict__["why"] for record in caplog.records] == [
        "100 bytes do not fit on a disk",
        "a peer does not answer",
    ]


def _unused() -> Any:
    raise AssertionError
