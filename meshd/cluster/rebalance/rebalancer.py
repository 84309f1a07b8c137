"""Rebalancer: compares what this node has with what the map assigns to it, and fetches the difference.

Joining, returning, taking over a share and repair are one operation (`anti_entropy`). It ends when a
full round with every peer finds nothing missing; the node then records the map version under which that
round began, because later writes reach it directly. Afterwards it drops what other nodes own and hold.

Law: one per node, in its coordinator; the rebalance process does the work (`worker`). Restartable at any
time.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from meshd.cluster.batched_map_changes import settle_node
from meshd.cluster.data_dir_identity import latest_starts
from meshd.cluster.rebalance.anti_entropy import SyncStats
from meshd.cluster.rebalance.cleanup import SKEW, Cleanup
from meshd.cluster.rebalance.progress import ProgressReporter, without_numbers
from meshd.cluster.rebalance.sync_plan import full_scope, plan_sync, unowned_scopes
from meshd.cluster.rebalance.sync_source import DocumentsRequest, InventoryRequest, SyncPeerLostError
from meshd.cluster.rebalance.worker import LocalWorker, WorkerProcessClient
from meshd.control.control_api import ControlError
from meshd.errors import MeshdError
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.shared_counters import PIECE_BYTES, lower_thread_priority
from meshwire.cluster import parse_map, transitions
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncPeer, SyncSource
    from meshd.cluster.rebalance.worker import RebalanceWorker, WorkerSocket
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshd.moving")
_STANDING_INTERVAL: Final = 60.0
"""Seconds between two checks of what changes slowly."""
_IDLE_INTERVAL: Final = 5.0
_RETRY_INTERVAL: Final = 0.5
_ROUNDS: Final = 20
_STUBBORN_ROUNDS: Final = 3
"""Rounds after which items that a peer no longer has, or has damaged, are no longer waited for."""
P = ParamSpec("P")
T = TypeVar("T")
_STORE_ERROR: Final = "cannot store missing data: "


@dataclass(frozen=True, slots=True)
class RebalancerDeps:
    """What a rebalancer needs. `open_peer` opens a peer; `copies`: the replica counts of all buckets;
    `throttle` throttles between pieces of work; `adopted_version`: the map version that every process of this
    node has used for a while; `shared_documents`: the name prefixes of shared documents, and a function that
    keeps documents of given names here."""

    open_peer: Callable[[Node], SyncPeer]
    copies: Callable[[], Iterable[int]]
    throttle: Callable[[int], Awaitable[None]]
    adopted_version: Callable[[], int] = lambda: 1 << 62
    shared_documents: tuple[Sequence[str], Callable[[Sequence[str]], Awaitable[None]]] | None = None


class Rebalancer:
    """Compares and fetches; see the module. `repair_every`: seconds between comparisons that the map does not
    ask for. `worker_socket`: the socket of the rebalance process; without it the work runs in this process.
    """

    def __init__(
        self,
        store: Store,
        source: SyncSource,
        mesh: ClusterView,
        maps: ClusterMapStore,
        control: ControlStore,
        deps: RebalancerDeps,
        clock: Clock,
        *,
        repair_every: float = 6 * 3600.0,
        worker_socket: WorkerSocket | None = None,
    ) -> None:
        self._store, self._source, self._mesh, self._maps = store, source, mesh, maps
        self._control, self._deps, self._clock = control, deps, clock
        self._cleanup = Cleanup(store, source, self._throttle)
        self._worker: RebalanceWorker = (
            LocalWorker(store, source, mesh, deps.open_peer, self._throttle, clock)
            if worker_socket is None
            else WorkerProcessClient(worker_socket, lambda: self.reporter.publish_if_due())
        )
        self._repair_every, self._repaired = repair_every, clock.monotonic()
        self._standing_recorded_at = -_STANDING_INTERVAL
        self._clear_version, self._retry_cleanup_at = 0, 0.0
        self._complete_version = 0
        self._retry_soon, self._failure = False, ""
        self._seen_states: dict[str, int] = {}
        self._compared_starts: dict[str, int] = {}  # by node: its start since which this node has compared
        self.reporter = ProgressReporter(mesh.node_id, control, clock)
        self._repair_waiters: list[asyncio.Future[None]] = []
        self._planner = ThreadPoolExecutor(1, "planning", lower_thread_priority)

    def __repr__(self) -> str:
        return f"<Rebalancer of {self._mesh.node_id}: {self.reporter.progress.doing}>"

    async def run(self) -> None:
        """Runs forever."""
        metrics.rebalance_uncompared.set(len(self._starts_of_peers(self._mesh.current_map())))
        while True:
            version = self._mesh.current_map().version
            try:
                await self.run_once()
                self._failure = ""
            except SyncPeerLostError as error:
                await self.reporter.report_blocked(f"a peer does not answer: {error}")
            except (ControlError, transitions.TransitionError) as error:
                await self.reporter.report_blocked(str(error))
            except StoreError as error:
                self._log_failure("cannot store missing data", error)
                await self.reporter.report_unstorable(_STORE_ERROR + str(error))
            except MeshdError as error:
                await self.reporter.report_blocked(str(error))
            except Exception as error:
                self._log_failure("rebalancing failed and will be retried", error)
                await self.reporter.report_blocked(f"rebalancing failed: {type(error).__name__}")
            soon = self._retry_soon or self.reporter.progress.doing == "waiting"
            await self._mesh.wait_for_newer_map(version, _RETRY_INTERVAL if soon else _IDLE_INTERVAL)

    def _log_failure(self, message: str, error: Exception) -> None:
        """Logs a failure once, not with each of the attempts that it ends."""
        before, self._failure = self._failure, without_numbers(repr(error))
        if self._failure != before:
            _log.error(message, exc_info=error)

    async def run_once(self) -> None:
        """Checks the map once and does what it asks for. Raises SyncPeerLostError, ControlError,
        StoreError."""
        self._retry_soon = False
        cluster = self._mesh.current_map()
        self.reporter.adapt_to(len(cluster.nodes))
        if (
            cluster.version < self._complete_version
        ):  # not the map yet in which this node declared itself complete
            self._retry_soon = True
            return
        me = cluster.node(self._mesh.node_id)
        if self._mesh.single_node or me is None or me.state in ("away", "down"):
            return
        if cluster.must_sync(me.node_id):
            await self._sync_and_settle(cluster, me)
            return
        if self.reporter.progress.doing == "waiting":
            await self.reporter.end_phase()
        await self._record_standing(me)
        late = self._clock.monotonic() >= self._retry_cleanup_at
        if not cluster.is_rebalancing and self._clear_version != cluster.version and late:
            await self._drop_unowned(cluster)
        if me.stores:
            await self._sync_with_changed_nodes(cluster)
        if me.stores and (
            self._repair_waiters or self._clock.monotonic() - self._repaired > self._repair_every
        ):
            asked = tuple(self._repair_waiters)
            await (
                self.run_repair_round()
            )  # an owner that does not answer is asked again: they wait until then
            del self._repair_waiters[: len(asked)]
            for waiting in asked:
                if not waiting.done():
                    waiting.set_result(None)
            _log.info("compared with the other owners")

    async def wait_until_compared(self) -> None:
        """Returns when this node was compared with all other owners in a round that began after this call; at
        once if there are none."""
        if self._mesh.single_node or self._mesh.own_node is None or not self._mesh.own_node.stores:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._repair_waiters.append(waiting)
        await waiting

    # comparing --------------------------------------------------------------------------------------------

    async def _sync_and_settle(self, cluster: ClusterMap, me: Node) -> None:
        """Compares until nothing is missing, then declares the node complete in the map."""
        since, starts = max(cluster.goal, me.turned), self._starts_of_peers(cluster)
        await self.reporter.begin_phase("comparing", cluster.version, since=since)
        if not await self._sync_until_complete(cluster, me):
            return
        await self._fetch_documents(cluster)
        if (
            self._store.checkpointer.needed
        ):  # the map is durable at once, and others drop what it says is here
            await asyncio.to_thread(self._store.checkpointer.take)
        await self.reporter.mark_complete(cluster.version)
        settled = await settle_node(self._control, self._maps, me.node_id, cluster.version)
        self._complete_version = settled.version
        self._compared_starts |= starts
        _log.info(
            "holds all data that it should have",
            extra={"map": cluster.version, "bytes": self.reporter.stats.bytes},
        )
        await self.reporter.end_phase()

    async def _sync_until_complete(self, cluster: ClusterMap, me: Node) -> bool:
        """Returns True when nothing is missing any more; otherwise the reporter says why."""
        stats, distrusted = self.reporter.stats, me.state == "joining"
        for number in range(_ROUNDS):
            plan = await self._plan(plan_sync, cluster, me.node_id, self._replica_counts(cluster))
            metrics.rebalance_blocked.set(plan.blocked_slots)
            if plan.blocked_slots:
                why = f"no complete node answers for {plan.blocked_slots} slots"
                await self.reporter.report_blocked(why, plan.blocked_slots)
                return False
            slots = sum(scope.slot_count() for scope in plan.first_peers.values())
            await self.reporter.begin_phase("comparing", cluster.version, slots, max(cluster.goal, me.turned))
            if distrusted:
                await self._drop_stale_if_forgotten(cluster, plan.peers)
                distrusted = False
            failed, lost = stats.failed, stats.lost
            stats.total = stats.bytes
            if number == 0:
                await self._compare_at_once(cluster, plan.first_peers)
                if plan.first_peers != plan.peers:
                    continue
            else:
                for peer_id, scope in plan.peers.items():
                    await self._compare(cluster, peer_id, scope)
            metrics.rebalance_rounds.inc()
            if stats.failed == failed and (stats.lost == lost or number >= _STUBBORN_ROUNDS):
                return True
        await self.reporter.report_blocked(f"data is still missing after {_ROUNDS} rounds")
        return False

    async def _fetch_documents(self, cluster: ClusterMap) -> None:
        """Fetches the documents that all storing nodes keep, from each of them. Their names are content
        hashes, so equal names mean equal contents."""
        if self._deps.shared_documents is None:
            return
        prefixes, keep = self._deps.shared_documents
        others = [node for node in cluster.nodes if node.stores and node.state in COMPLETE_STATES]
        for node in others:
            peer_id = self._open_peer(cluster, node.node_id)
            for prefix in prefixes if node.node_id != self._mesh.node_id else ():
                after = ""
                while names := await peer_id.list_documents(DocumentsRequest(prefix, after)):
                    await keep(names)
                    await self._throttle(PIECE_BYTES)
                    after = names[-1]

    async def _compare_at_once(self, cluster: ClusterMap, first: Mapping[str, Scope]) -> None:
        """Compares every slot with one peer, all peers in parallel; this moves most of the data."""
        try:
            async with asyncio.TaskGroup() as group:
                for peer_id, scope in first.items():
                    group.create_task(self._compare(cluster, peer_id, scope))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _compare(
        self, cluster: ClusterMap, peer_id: str, scope: Scope, stats: SyncStats | None = None
    ) -> None:
        counted = self.reporter.stats if stats is None else stats
        await self._worker.sync_with(cluster, peer_id, scope, counted)

    async def _drop_stale_if_forgotten(self, cluster: ClusterMap, peers: Mapping[str, Scope]) -> None:
        """Treats this node as empty if it was away for longer than its peers keep tombstones: anything it
        holds, in any slot, may have been removed meanwhile. What an empty node fetches from now on is trusted
        when it goes on after an interruption, unless peers forget further removals meanwhile."""
        scope = full_scope(cluster, self._replica_counts(cluster))
        now, standing = self._clock.now_ms() * 10**6, self._store.inventory.synced_stamp()
        forgotten = 0
        for peer_id, asked in peers.items():
            page = await self._open_peer(cluster, peer_id).read_inventory(InventoryRequest(asked, limit=1))
            forgotten = max(forgotten, page.since)
        if await self._cleanup.has_any(scope):
            if forgotten <= standing:
                return
            names = await self._cleanup.drop_stale(scope, now)
            _log.warning(
                "was away longer than tombstones are kept: dropped stale data", extra={"names": names}
            )
        await self._store.inventory.record_synced_stamp(max(standing, forgotten, now - SKEW))

    async def _sync_with_changed_nodes(self, cluster: ClusterMap) -> None:
        """Compares with nodes whose state in the map is new, and with those that have started since this node
        last did. A node that returned or started may have begun writes that it did not replicate; one that is
        gone may have replicated them to some nodes only."""
        starts = self._starts_of_peers(cluster)
        turned = {node.node_id: node.turned for node in cluster.nodes}
        changed = [node for node in cluster.nodes if self._seen_states.get(node.node_id, 0) < node.turned]
        found = {node.node_id for node in changed if node.state in COMPLETE_STATES and node.since}
        if max(self._replica_counts(cluster)) > 2 and any(node.state in ("away", "down") for node in changed):
            found |= set(turned)
        if not self._seen_states:
            found.clear()
        started = {name for name, start in starts.items() if self._compared_starts.get(name) != start}
        metrics.rebalance_uncompared.set(len(started))
        found |= started
        found.discard(self._mesh.node_id)
        if found:
            await self.run_repair_round(found)
        self._seen_states = turned
        self._compared_starts |= starts
        metrics.rebalance_uncompared.set(0)

    def _starts_of_peers(self, cluster: ClusterMap) -> dict[str, int]:
        """Returns the latest start of each other node that has all data of its share."""
        starts = latest_starts(self._control)
        return {
            node.node_id: starts.get(node.node_id, 0)
            for node in cluster.nodes
            if node.stores and node.state in COMPLETE_STATES and node.node_id != self._mesh.node_id
        }

    async def run_repair_round(self, only: set[str] | None = None) -> SyncStats:
        """Compares once with all other owners (`only`: with some), although the map does not ask for it, and
        fetches what is missing."""
        cluster = self._mesh.current_map()
        plan = await self._plan(plan_sync, cluster, self._mesh.node_id, self._replica_counts(cluster))
        slots = sum(scope.slot_count() for scope in plan.first_peers.values())
        await self.reporter.begin_phase("repairing", cluster.version, slots)
        stats = SyncStats()
        for peer_id, scope in plan.peers.items():
            if only is None or peer_id in only:
                await self._compare(cluster, peer_id, scope, stats)
        if only is None:
            self._repaired = self._clock.monotonic()
            metrics.rebalance_repaired.inc(stats.entered)
        if stats.entered:
            _log.warning("repaired", extra={"entered": stats.entered, "bytes": stats.bytes})
        await self.reporter.end_phase()
        return stats

    async def _plan(self, how: Callable[P, T], *about: P.args, **more: P.kwargs) -> T:
        """Plans in a low-priority thread, because many slots take a while."""
        return await asyncio.get_running_loop().run_in_executor(self._planner, partial(how, *about, **more))

    def _replica_counts(self, cluster: ClusterMap) -> set[int]:
        return {cluster.copies, *(number or cluster.copies for number in self._deps.copies())}

    def _open_peer(self, cluster: ClusterMap, node_id: str) -> SyncPeer:
        node = cluster.node(node_id)
        assert node is not None
        return self._deps.open_peer(node)

    # cleanup ----------------------------------------------------------------------------------------------

    async def _drop_unowned(self, cluster: ClusterMap) -> None:
        """Drops what other nodes own and have; what they are missing stays. Waits while a process of this
        node may still serve requests under an earlier map."""
        if self._deps.adopted_version() < cluster.version:
            self._retry_soon = True
            return
        shares = await self._plan(unowned_scopes, cluster, self._mesh.node_id, self._replica_counts(cluster))
        kept = dropped = 0
        for peer_id, scope in shares.items():
            if not await self._cleanup.has_any(scope):
                continue
            if self.reporter.progress.doing != "dropping":
                slots = sum(each.slot_count() for each in shares.values())
                await self.reporter.begin_phase("dropping", cluster.version, slots)
            more = await self._cleanup.drop_held_by_peer(self._open_peer(cluster, peer_id), scope)
            kept, dropped = kept + more[0], dropped + more[1]
            await self.reporter.update_counts(kept=kept, dropped=dropped)
        metrics.rebalance_retained.set(kept)
        if kept:
            _log.warning("kept data that its owners do not have yet", extra={"kept": kept})
            self._retry_cleanup_at = self._clock.monotonic() + _STANDING_INTERVAL
        else:
            self._clear_version = cluster.version
            await self.reporter.mark_clear(cluster.version)
        if self.reporter.progress.doing == "dropping":
            await self.reporter.end_phase()

    # standing ---------------------------------------------------------------------------------------------

    async def _record_standing(self, me: Node) -> None:
        """Records the time up to which this node has everything, while the newest map confirms that."""
        now = self._clock.monotonic()
        if me.state not in ("up", "draining") or now - self._standing_recorded_at < _STANDING_INTERVAL:
            return
        stamp = self._clock.now_ms() * 10**6
        entry = await self._control.get("cluster/map")
        known = None if entry is None else parse_map(entry.value).node(me.node_id)
        if known is not None and (known.state, known.turned) == (me.state, me.turned):
            await self._store.inventory.record_synced_stamp(stamp)
            self._standing_recorded_at = now

    async def _throttle(self, size: int) -> None:
        await self._deps.throttle(size)
        await self.reporter.publish_if_due()
