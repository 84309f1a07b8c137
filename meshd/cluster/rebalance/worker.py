"""Rebalance worker: runs one sync with a peer, in this process or in the separate rebalance process.

Law: a request names the map it is based on, and the worker reports statistics as they grow. When either
side goes away the sync stops, which is safe at any time. Seam: `RebalanceWorker`.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncStats
from meshd.cluster.rebalance.cleanup import SKEW, without_recent
from meshd.cluster.rebalance.sync_plan import Scope  # noqa: TC001  msgspec reads annotations
from meshd.cluster.rebalance.sync_source import SyncPeerLostError
from meshd.errors import MeshdError
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import ErrorTypes, StreamMethod
from meshd.store.errors import DiskFailedError, DiskFullError, StoreError
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.sync_source import SyncPeer, SyncSource
    from meshd.rpc.process_server import ServerCall
    from meshd.store.replica.inventory import HeldName
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_REPORT_INTERVAL: Final = 0.1  # seconds between two updates of the statistics
_WINDOW_ITEMS: Final = 64 << 10  # of all syncs at a time: three windows of it take about 60 MB
_LEAST_WINDOW: Final = 256
_MAP_TIMEOUT: Final = 10.0  # seconds for the client's map to arrive here too


class RebalanceWorkerError(MeshdError):
    """The rebalance process ended, or failed: to be tried again."""


class RebalanceWorker(Protocol):
    """Syncs with a peer: in this process (`LocalWorker`), or in another (`WorkerProcessClient`)."""

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        """Under this map, with this node; what was done is counted in `tally`. Raises HolderLostError,
        StoreError, MeshdError."""


class LocalWorker:
    """Compares in this process. `holder` of a node; `rest` is awaited after each piece of work."""

    def __init__(
        self,
        store: Store,
        offers: SyncSource,
        mesh: ClusterView,
        holder: Callable[[Node], SyncPeer],
        rest: Callable[[int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._store, self._offers, self._mesh = store, offers, mesh
        self._holder, self._rest, self._clock = holder, rest, clock
        self._active = 0

    def __repr__(self) -> str:
        return f"<LocalWorker of {self._mesh.node_id}>"

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        cut = self._clock.now_ms() * 10**6 - SKEW

        async def drop(names: list[HeldName]) -> None:
            if self._mesh.current_map().counts != cluster.counts:
                return  # the sides may not mean the same names
            await self._store.inventory.drop_unowned([without_recent(held, cut) for held in names])

        node = cluster.node(holder)
        assert node is not None
        pull = AntiEntropySync(
            self._store,
            self._offers,
            self._holder(node),
            scope,
            rest=self._rest,
            tally=tally,
            standing=self._store.inventory.synced_stamp(),
            drop=drop,
            window=lambda: max(_LEAST_WINDOW, _WINDOW_ITEMS // self._active),
        )
        self._active += 1
        try:
            await pull.run_sync()
        finally:
            self._active -= 1

    async def serve_sync(self, request: SyncRequest, call: ServerCall) -> SyncStats:
        """Run the sync that a client requests, and report its statistics as they grow. It ends when the
        client goes away. Raises what `sync_with` raises."""
        tally = SyncStats()
        work = asyncio.ensure_future(self._run_request(request, tally))
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=_REPORT_INTERVAL)
                await call.update(tally)
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return tally

    async def _run_request(self, request: SyncRequest, tally: SyncStats) -> None:
        cluster = parse_map(request.cluster)
        # The peers fence off writes under maps before the one that this process has: with an older one,
        # writes that leave this node out might follow what it has read.
        if not await self._mesh.wait_for_newer_map(cluster.version - 1, _MAP_TIMEOUT):
            raise RebalanceWorkerError(f"the rebalance process does not get map {cluster.version} yet")
        await self.sync_with(cluster, request.holder, request.scope, tally)


class SyncRequest(msgspec.Struct, frozen=True):
    """Sync with this holder, under this map (as its JSON)."""

    cluster: str
    holder: str
    scope: Scope


SYNC: StreamMethod[SyncRequest, SyncStats, SyncStats] = StreamMethod(
    "sync", SyncRequest, SyncStats, SyncStats
)
"""Its updates and its reply are the statistics so far."""
ERRORS: Final = ErrorTypes(
    [SyncPeerLostError, DiskFullError, DiskFailedError, StoreError, MeshdError],
    unexpected=lambda: RebalanceWorkerError("the sync failed and is tried again; the log says why"),
    lost=lambda why: RebalanceWorkerError(f"the rebalance process is not available: {why}"),
)


class WorkerSocket(msgspec.Struct, frozen=True):
    """The socket of the rebalance process, which is started when a client connects."""

    path: Path

    def client(self) -> ProcessClient:
        """A client with a connection of its own, which is served once that process runs. Close it when the
        work is done: the process ends when it is idle."""
        return ProcessClient(self.path, ERRORS)


class WorkerProcessClient:
    """Syncs in the process behind `worker_socket`. `told` is awaited when it has reported its statistics."""

    def __init__(self, worker_socket: WorkerSocket, told: Callable[[], Awaitable[None]]) -> None:
        self._worker_socket, self._told = worker_socket, told

    def __repr__(self) -> str:
        return f"<WorkerProcessClient {self._worker_socket.path}>"

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        known, news = SyncStats(), asyncio.Event()

        def on_update(now: SyncStats, fds: list[int]) -> None:
            nonlocal known
            _add_difference(tally, known, now)
            known = now
            news.set()

        client = self._worker_socket.client()
        reporting = asyncio.ensure_future(self._report(news))
        try:
            request = SyncRequest(cluster.to_json(short=True).decode(), holder, scope)
            on_update((await client.stream(SYNC, request, on_update)).message, [])
        finally:
            reporting.cancel()
            await client.aclose()
            await asyncio.gather(reporting, return_exceptions=True)
        await self._told()

    async def _report(self, news: asyncio.Event) -> None:
        while True:
            await news.wait()
            news.clear()
            await self._told()


def _add_difference(tally: SyncStats, before: SyncStats, now: SyncStats) -> None:
    """Count in `tally` what was done between two reports."""
    for field in fields(SyncStats):
        more = getattr(now, field.name) - getattr(before, field.name)
        setattr(tally, field.name, getattr(tally, field.name) + more)
