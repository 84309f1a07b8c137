"""A node stays a member whatever prevents a renewal of its lease for a moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.membership import Membership
from meshd.config.settings import ClusterSettings
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import ControlError
from meshwire.cluster import Node, transitions
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from meshd.control.control_api import Lease


class FailingRenewals(MemoryControl):
    """Renewals fail with `error`, if there is one."""

    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.renewals = asyncio.Semaphore(0)

    async def renew_lease(self, lease: Lease) -> Lease:
        self.renewals.release()
        if self.error is not None:
            raise self.error
        return await super().renew_lease(lease)


@pytest.mark.parametrize("error", [ControlError("no answer"), RuntimeError("can't start new thread")])
def test_the_lease_is_renewed_when_it_can_be_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its lease, the node would be away until it is started again."""

    async def check() -> None:
        control = FailingRenewals()
        await control.put("mesh/id", b"1")
        maps = ClusterMapStore(control)
        settings = ClusterSettings(lease=0.1)
        me = Node("n1", "http://n1:1")
        membership = Membership(control, maps, me, "n1/d", ManualClock(), settings)
        await membership.join()
        running = asyncio.ensure_future(membership.run())
        control.error = error
        await _until_renewed(control, 3)
        assert not running.done()
        control.error = None
        await _until_renewed(control, 2)
        assert membership._lease.held
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await control.lease_holders("node/") == {}

    asyncio.run(check())
    assert caplog.text.count("cannot renew the lease") == 1


@pytest.mark.parametrize("copies", [1, 2])
def test_a_node_whose_disk_hangs_is_away_while_others_have_its_data(copies: int) -> None:
    async def check() -> None:
        control = FailingRenewals()
        await control.put("mesh/id", b"1")
        await control.put("buckets/b", b"{}")
        maps = ClusterMapStore(control)
        settings, hanging = ClusterSettings(lease=0.1), list[bool]()
        first = Membership(control, maps, Node("n1", "http://n1:1"), "n1/d", ManualClock(), settings)
        await first.join()
        second = Membership(
            control,
            maps,
            Node("n2", "http://n2:1"),
            "n2/d",
            ManualClock(),
            settings,
            hanging=lambda: bool(hanging),
            fewest_copies=lambda: copies,
        )
        await second.join()
        cluster = maps.current()
        assert cluster is not None
        await maps.update_map(lambda _: transitions.mark_all_complete(cluster, {"n1": 99, "n2": 99}))
        running = asyncio.ensure_future(second.run())
        hanging.append(True)
        await _until_renewed(control, 6)
        assert _state_of(maps, "n2") == ("away" if copies == 2 else "up")
        hanging.clear()
        await _until_renewed(control, 6)
        assert _state_of(maps, "n2") == ("returning" if copies == 2 else "up")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(check())


def _state_of(maps: ClusterMapStore, node_id: str) -> str:
    cluster = maps.current()
    assert cluster is not None
    node = cluster.node(node_id)
    assert node is not None
    return node.state


async def _until_renewed(control: FailingRenewals, times: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(times):
            await control.renewals.acquire()
