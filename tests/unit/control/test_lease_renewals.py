"""A renewal of a node's lease and the map version that it confirms, over an etcd whose calls are counted."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from meshd.cluster.node_lease import NodeLease
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.etcd.etcd_control import EtcdControl
from meshd.process.local_etcd import EtcdCluster
from meshd.util import shared_counters
from meshd.util.clock import SystemClock
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

require_etcd()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as started:
        yield started


@pytest.mark.parametrize("early", [False, True])
def test_a_renewal_is_a_read_and_a_keepalive_and_confirms_the_newest_map(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Where etcd may answer before it syncs, too, unless the map that it shows may not be on its disk."""

    async def renew() -> None:
        gateway = etcd.gateway()
        called: list[str] = []
        with closing(EtcdControl(gateway)) as control, closing(EtcdControl(etcd.gateway())) as other:
            monkeypatch.setattr(control._leases._barrier, "_needed", early)
            maps, others = ClusterMapStore(control), ClusterMapStore(other)
            await control.put("mesh/id", b"1")
            bare = await maps.update_map(lambda _: turn.bootstrap_map(Node("n1", "http://n1:1")))
            lease = NodeLease(control, maps, "n1", "n1", SystemClock(), 60.0)
            assert await lease.renew()
            assert await lease.renew()
            call = gateway.call

            def counted(path: str, body: Mapping[str, Any], *, repeatable: bool) -> dict[str, Any]:
                called.append(path)
                return call(path, body, repeatable=repeatable)

            monkeypatch.setattr(gateway, "call", counted)
            assert await lease.renew()
            assert called == ["kv/txn", "lease/keepalive"]
            assert shared_counters.get_lease()[0] == 1

            monkeypatch.setattr(control, "_install", lambda copy: None)  # its watch is late
            await others.update_map(
                lambda present: turn.join_node(present or bare, Node("n2", "http://n2:1"))
            )
            monkeypatch.setattr(ClusterMapStore, "current", lambda self: self._map)
            called.clear()
            assert await lease.renew()
            assert called[: 2 + early] == ["kv/txn", *["kv/range"] * early, "lease/keepalive"]
            assert shared_counters.get_lease()[0] == 2, "a renewal confirms no map that it did not look for"

    asyncio.run(renew())


def test_a_lease_that_was_lost_is_not_renewed(etcd: EtcdCluster) -> None:
    async def renew() -> None:
        with closing(EtcdControl(etcd.gateway())) as control:
            maps = ClusterMapStore(control)
            await control.put("mesh/id", b"1")
            await maps.update_map(lambda _: turn.bootstrap_map(Node("n1", "http://n1:1")))
            lease = NodeLease(control, maps, "n1", "n1", SystemClock(), 60.0)
            assert await lease.renew()
            assert await lease.renew()
            shared_counters.set_lease(0.0, 0)
            assert lease._lease is not None
            await control.release_lease(lease._lease)
            assert await control.acquire_lease("node/n1", "another", 60.0) is not None
            assert not await lease.renew()
            assert not lease.held
            assert shared_counters.get_lease()[1] == 0.0

    asyncio.run(renew())
