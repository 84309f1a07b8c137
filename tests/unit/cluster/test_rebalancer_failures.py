"""What a rebalancer logs of failures that go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

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
    "failure", [DiskFullError("the disks are full"), RuntimeError("cannot start a thread")]
)
def test_a_failure_is_logged_once_and_not_twice_a_second(
    failure: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        clock, fake, mesh = ManualClock(), SimpleNamespace(), _Mesh()
        control: Any = MemoryControl(clock)
        deps = RebalancerDeps(lambda node: _unused(), lambda: [2], lambda size: asyncio.sleep(0))
        anything: Any = fake
        view: Any = mesh
        rebalancer = Rebalancer(anything, anything, view, anything, control, deps, clock)
        failures: list[Exception | None] = [failure, None, failure, failure, failure]

        async def fail() -> None:
            failing = failures.pop() if failures else None
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


def _unused() -> Any:
    raise AssertionError
