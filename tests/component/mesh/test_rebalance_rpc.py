"""Syncs in the rebalance process, over its socket: statistics, errors, and a process that ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.cluster.rebalance.anti_entropy import SyncStats
from meshd.cluster.rebalance.sync_plan import full_scope
from meshd.cluster.rebalance.sync_source import DigestsRequest, RemoteSyncPeer, SyncPeerLostError
from meshd.cluster.rebalance.worker import (
    ERRORS,
    SYNC,
    LocalWorker,
    RebalanceWorkerError,
    WorkerProcessClient,
    WorkerSocket,
)
from meshd.control.cluster_secret import ClusterSecret
from meshd.rpc.peer_client import PeerClient
from meshd.rpc.process_server import ProcessServer
from meshd.rpc.unix_messages import listen
from meshd.store.errors import DiskFullError, ExtentGoneError, StaleEpochError, StoreError
from meshd.store.records import WriteContext
from meshwire.cluster import ClusterMap, Node
from meshwire.cluster.transitions import set_node_weight
from tests.support.mesh_nodes import among, change_map, decider_of
from tests.support.store_calls import error_of, put_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from meshd.cluster.rebalance.sync_plan import Scope
    from tests.support.mesh_nodes import Running

MAP = ClusterMap(7, (Node("n1", "http://127.0.0.1:1"), Node("n2", "http://127.0.0.1:2")), slots=64)
SCOPE = full_scope(MAP, (2,))


class Worker(LocalWorker):
    """Counts 30 names in three steps; then fails as the holder's name says."""

    def __init__(self, version: int = MAP.version) -> None:
        """`version`: of the map that its process has."""

        async def wait_for_newer_map(before: int, max_wait: float) -> bool:
            return version > before

        self._mesh = cast("Any", SimpleNamespace(wait_for_newer_map=wait_for_newer_map))
        self.begun, self.waiting, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        assert (cluster, scope) == (MAP, SCOPE)
        self.begun.set()
        for _ in range(3):
            tally.names += 10
            await asyncio.sleep(0.15)
        if holder == "slow":
            try:
                self.waiting.set()
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        error = {
            "lost": SyncPeerLostError("gone"),
            "full": DiskFullError("full"),
            "store": ExtentGoneError("moved"),
            "odd": ZeroDivisionError("secret"),
        }.get(holder)
        if error is not None:
            raise error


@asynccontextmanager
async def served(path: Path, version: int = MAP.version) -> AsyncIterator[Worker]:
    worker, server = Worker(version), ProcessServer(ERRORS)
    server.register(SYNC, worker.serve_sync)
    with listen(path) as listener:
        serving = asyncio.create_task(server.serve_forever(listener))
        try:
            yield worker
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def test_statistics_grow_while_it_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        seen: list[int] = []
        tally = SyncStats(names=5)

        async def told() -> None:
            seen.append(tally.names)

        async with served(tmp_path / "s.sock"):
            client = WorkerProcessClient(WorkerSocket(tmp_path / "s.sock"), told)
            await client.sync_with(MAP, "n2", SCOPE, tally)
        assert tally.names == 35
        assert seen[-1] == 35
        assert len(seen) > 2
        assert seen == sorted(seen)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("holder", "kind", "text"),
    [
        ("lost", SyncPeerLostError, "gone"),
        ("full", DiskFullError, "full"),
        ("store", StoreError, "moved"),
        ("odd", RebalanceWorkerError, "log says why"),
    ],
)
def test_errors_come_through_and_what_was_done_counts(
    tmp_path: Path, holder: str, kind: type[Exception], text: str
) -> None:
    async def run() -> None:
        tally = SyncStats()
        async with served(tmp_path / "s.sock"):
            client = WorkerProcessClient(WorkerSocket(tmp_path / "s.sock"), nothing)
            with pytest.raises(kind, match=text) as caught:
                await client.sync_with(MAP, holder, SCOPE, tally)
        assert type(caught.value) is kind
        assert tally.names == 30

    asyncio.run(run())


async def nothing() -> None:
    pass


def test_a_process_that_does_not_get_the_map_compares_nothing(tmp_path: Path) -> None:
    """Its peers would fence off writes under older maps than the client's only."""

    async def run() -> None:
        async with served(tmp_path / "s.sock", MAP.version - 1) as worker:
            client = WorkerProcessClient(WorkerSocket(tmp_path / "s.sock"), nothing)
            with pytest.raises(RebalanceWorkerError, match="does not get map 7"):
                await client.sync_with(MAP, "n2", SCOPE, SyncStats())
            assert not worker.begun.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("behind", [0, 1])
def test_what_a_comparison_under_an_older_map_would_miss(behind: int) -> None:
    """A write that was decided by the map before, which leaves the returning node out: refused once that node
    compares by the map with it, but not when it compares by the map before."""

    async def test(nodes: list[Running]) -> None:
        holder = decider_of(nodes, "b", "k")
        asking = next(one.node for one in nodes if one is not holder)
        before = asking.mesh.current_map().version
        now = await change_map(nodes, lambda cluster: set_node_weight(cluster, "n1", weight=2))
        secret = ClusterSecret(asking.control)
        peers = PeerClient(asking.settings.node_id, secret.derive_key, asking.clock, lambda: now - behind)
        async with aclosing(peers):
            scope = full_scope(asking.mesh.current_map(), (2,))
            await RemoteSyncPeer(peers, holder.member).read_digests(DigestsRequest(scope, 0))
        writing = put_object(holder.node.store, "k", b"x", context=WriteContext(epoch=before))
        if behind:
            await writing
        else:
            await error_of(StaleEpochError, writing)

    among(2, test)


def test_a_process_that_ends_or_is_not_there(tmp_path: Path) -> None:
    async def run() -> None:
        client = WorkerProcessClient(WorkerSocket(tmp_path / "s.sock"), nothing)
        with pytest.raises(RebalanceWorkerError, match="not available"):
            await client.sync_with(MAP, "n2", SCOPE, SyncStats())
        async with served(tmp_path / "s.sock") as worker:
            syncing = asyncio.create_task(client.sync_with(MAP, "slow", SCOPE, SyncStats()))
            await worker.begun.wait()
        with pytest.raises(RebalanceWorkerError, match="not available"):
            await syncing

    asyncio.run(run())


def test_a_sync_that_is_cancelled_stops_in_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path / "s.sock") as worker:
            client = WorkerProcessClient(WorkerSocket(tmp_path / "s.sock"), nothing)
            syncing = asyncio.create_task(client.sync_with(MAP, "slow", SCOPE, SyncStats()))
            async with asyncio.timeout(60):
                await worker.waiting.wait()
                syncing.cancel()
                await worker.cancelled.wait()

    asyncio.run(run())
