"""Rebalance worker: runs one sync with a peer, in this process or in the separate rebalance process.

Law: a request names the map it is based on, and the worker reports statistics as they grow. When either
side goes away the sync stops, which is safe at any time. Seam: `RebalanceWorker`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncPeerLostError, SyncStats
from meshd.cluster.rebalance.cleanup import SKEW, without_recent
from meshd.cluster.rebalance.sync_plan import Scope  # noqa: TC001  msgspec reads annotations
from meshd.errors import MeshdError
from meshd.rpc.unix_messages import StreamClosedError, connect
from meshd.store.errors import DiskFailedError, DiskFullError, StoreError
from meshwire.cluster import parse_map

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.anti_entropy import SyncPeer
    from meshd.cluster.rebalance.sync_source import SyncSource
    from meshd.rpc.unix_messages import MessageStream
    from meshd.store.replica.inventory import HeldName
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshd.moving")
_REPORT_INTERVAL: Final = 0.1  # seconds between two words about the tally
_MAP_TIMEOUT: Final = 10.0  # seconds for the asker's map to arrive here too
SyncOutcome = Literal["", "done", "holder", "full", "disk", "store", "other"]


class RebalanceWorkerError(MeshdError):
    """The process that fetches went away, or failed: to be tried again."""


class RebalanceWorker(Protocol):
    """What compares: in this process (`Carrier`), or in another (`FarCarrier`)."""

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

    def __repr__(self) -> str:
        return f"<Carrier of {self._mesh.node_id}>"

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        cut = self._clock.now_ms() * 10**6 - SKEW

        async def drop(names: list[HeldName]) -> None:
            if self._mesh.current_map().counts != cluster.counts:
                return  # the sides may not mean the same names
            await self._store.drop_unowned([without_recent(held, cut) for held in names])

        node = cluster.node(holder)
        assert node is not None
        pull = AntiEntropySync(
            self._store,
            self._offers,
            self._holder(node),
            scope,
            rest=self._rest,
            tally=tally,
            standing=self._store.synced_stamp(),
            drop=drop,
        )
        await pull.run_sync()

    async def serve_request(self, wanted: SyncRequest, stream: MessageStream) -> None:
        """Carry out what came on `stream`, and say there how far it is, until the asker goes away."""
        tally = SyncStats()
        work = asyncio.ensure_future(self._run_request(wanted, tally))
        gone = asyncio.ensure_future(stream.receive())
        try:
            while not work.done():
                await asyncio.wait(
                    (work, gone), timeout=_REPORT_INTERVAL, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                if not work.done():
                    await stream.send(SyncProgress(tally))
            await stream.send(SyncProgress(tally, *work.result()))
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run_request(self, wanted: SyncRequest, tally: SyncStats) -> tuple[SyncOutcome, str]:
        cluster = parse_map(wanted.cluster)
        try:
            if self._mesh.current_map().version < cluster.version:
                await self._mesh.wait_for_newer_map(cluster.version - 1, _MAP_TIMEOUT)
            await self.sync_with(cluster, wanted.holder, wanted.scope, tally)
        except SyncPeerLostError as error:
            return "holder", str(error)
        except DiskFullError as error:
            return "full", str(error)
        except DiskFailedError as error:
            return "disk", str(error)
        except StoreError as error:
            return "store", str(error)
        except MeshdError as error:
            return "other", str(error)
        except Exception as error:
            _log.exception("movement failed; it is tried again")
            return "other", f"movement failed: {type(error).__name__}"
        return "done", ""


class SyncRequest(msgspec.Struct, frozen=True, tag="carry"):
    """Compare with this holder, under this map (as its JSON)."""

    cluster: str
    holder: str
    scope: Scope


class SyncProgress(msgspec.Struct, frozen=True):
    """All that was done so far; `outcome` "" while it goes on."""

    tally: SyncStats
    outcome: SyncOutcome = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSocket:
    """The way to the process that carries, which is started when somebody comes."""

    path: Path

    async def connect(self) -> MessageStream:
        """A connection; it is served once that process runs. Raises OSError."""
        return await connect(self.path)


class WorkerProcessClient:
    """Compares in the process behind `door`. `told` is awaited when it says how far it is."""

    def __init__(self, door: WorkerSocket, told: Callable[[], Awaitable[None]]) -> None:
        self._door, self._told = door, told

    def __repr__(self) -> str:
        return f"<FarCarrier {self._door.path}>"

    async def sync_with(self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats) -> None:
        known = SyncStats()
        try:
            stream = await self._door.connect()
        except OSError as error:
            raise RebalanceWorkerError(f"the process that fetches cannot be reached: {error}") from error
        try:
            await stream.send(SyncRequest(cluster.to_json().decode(), holder, scope))
            told = SyncProgress(known)
            while not told.outcome:
                body, _ = await stream.receive()
                told = msgspec.convert(body, SyncProgress)
                _add_difference(tally, known, told.tally)
                known = told.tally
                await self._told()
        except StreamClosedError as error:
            raise RebalanceWorkerError("the process that fetches ended; it is started again") from error
        finally:
            stream.close()
        if told.outcome != "done":
            raise _ERRORS[told.outcome](told.why)


_ERRORS: Final[dict[SyncOutcome, type[Exception]]] = {
    "holder": SyncPeerLostError,
    "full": DiskFullError,
    "disk": DiskFailedError,
    "store": StoreError,
    "other": RebalanceWorkerError,
}


def _add_difference(tally: SyncStats, before: SyncStats, now: SyncStats) -> None:
    """What was done between two looks."""
    for field in fields(SyncStats):
        more = getattr(now, field.name) - getattr(before, field.name)
        setattr(tally, field.name, getattr(tally, field.name) + more)
