"""A node's lease that is released while a renewal is under way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.node_lease import NodeLease
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import ControlError
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from meshd.control.control_api import Lease


class LateAnswers(MemoryControl):
    """Renews at once and answers when told to, with the renewal or an error."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.renewed, self.answer, self.fails, self.late = asyncio.Event(), asyncio.Event(), False, False

    async def renew_lease(self, lease: Lease) -> Lease:
        found = await super().renew_lease(lease)
        if self.late:
            self.renewed.set()
            await self.answer.wait()
        if self.fails:
            raise ControlError("no answer")
        return found


async def held(control: MemoryControl) -> NodeLease:
    """A node's lease, renewed once."""
    maps = ClusterMapStore(control)
    await control.put("mesh/id", b"1")
    await maps.update_map(lambda _: turn.bootstrap_map(Node("n1", "http://n1:1")))
    lease = NodeLease(control, maps, "n1", "n1", ManualClock(), 60.0)
    assert await lease.renew()
    assert await lease.renew()
    assert list(await control.lease_holders("node/")) == ["node/n1"]
    return lease


def test_a_renewal_that_is_cancelled_does_not_keep_the_lease() -> None:
    """SIGTERM cancels it when the engine has carried it out already: the version that is known would release
    nothing, and writes would wait until the lease expires."""

    async def check() -> None:
        control = LateAnswers()
        lease = await held(control)
        control.late = True
        renewing = asyncio.create_task(lease.renew())
        await control.renewed.wait()
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        control.answer.set()
        await releasing
        assert await control.lease_holders("node/") == {}
        assert not lease.held

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.parametrize("late", [False, True])
def test_a_renewal_that_failed_does_not_prevent_the_release(late: bool) -> None:
    """Nor does one that is never answered, for longer than a moment."""

    async def check() -> None:
        control = LateAnswers()
        lease = await held(control)
        control.fails, control.late = not late, late
        renewing = asyncio.create_task(lease.renew())
        if late:
            await control.renewed.wait()
            renewing.cancel()
        with suppress(asyncio.CancelledError, ControlError):
            await renewing
        await lease.release()
        assert not lease.held

    asyncio.run(asyncio.wait_for(check(), 30))
