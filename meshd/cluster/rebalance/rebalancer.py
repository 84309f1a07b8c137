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

from meshd.cluster.rebalance.anti_entropy import SyncPeerLostError, SyncStats
from meshd.cluster.rebalance.cleanup import Cleanup
from meshd.cluster.rebalance.progress import ProgressReporter
from meshd.cluster.rebalance.sync_plan import full_scope, plan_sync, unowned_scopes
from meshd.cluster.rebalance.sync_source import DocumentsRequest, InventoryRequest
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
    from meshd.cluster.rebalance.anti_entropy import SyncPeer
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncSource
    from meshd.cluster.rebalance.worker import RebalanceWorker, WorkerSocket
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_log = logging.getLogger("meshd.moving")
_STANDING_INTERVAL: Final = 60.0
"""Seconds between two looks at what changes slowly."""
_IDLE_INTERVAL: Final = 5.0
_RETRY_INTERVAL: Final = 0.5
_ROUNDS: Final = 20
_STUBBORN_ROUNDS: Final = 3
"""Rounds after which what a holder no longer has, or has damaged, is not waited for."""
P = ParamSpec("P")
T = TypeVar("T")
_STORE_ERROR: Final = "what this node lacks cannot be stored: "


@dataclass(frozen=True, slots=True)
class RebalancerDeps:
    """What a mover asks: `holder` of a node, `copies` of every bucket there is, `rest` between two pieces,
    `known`: the version of the map that every process of this node has gone by for a while; `documents`: the
    prefixes of names that nodes share, and what has those of some names kept here."""

    holder: Callable[[Node], SyncPeer]
    copies: Callable[[], Iterable[int]]
    rest: Callable[[int], Awaitable[None]]
    known: Callable[[], int] = lambda: 1 << 62
    documents: tuple[Sequence[str], Callable[[Sequence[str]], Awaitable[None]]] | None = None


class Rebalancer:
    """See the module. `repair_every`: seconds between two comparisons that the map does not ask for. `door`:
    of the process that compares and fetches; without one it is done in this process."""

    def __init__(
        self,
        store: Store,
        offers: SyncSource,
        mesh: ClusterView,
        maps: ClusterMapStore,
        control: ControlStore,
        sources: RebalancerDeps,
        clock: Clock,
        *,
        repair_every: float = 6 * 3600.0,
        door: WorkerSocket | None = None,
    ) -> None:
        self._store, self._offers, self._mesh, self._maps = store, offers, mesh, maps
        self._control, self._sources, self._clock = control, sources, clock
        self._cleanup = Cleanup(store, offers, self._rest)
        self._worker: RebalanceWorker = (
            LocalWorker(store, offers, mesh, sources.holder, self._rest, clock)
            if door is None
            else WorkerProcessClient(door, lambda: self.reporter.publish_if_due())
        )
        self._repair_every, self._repaired = repair_every, clock.monotonic()
        self._stood = -_STANDING_INTERVAL
        self._let_go_at, self._kept_until = 0, 0.0
        self._said = 0
        self._soon = False
        self._noted: dict[str, int] = {}
        self.reporter = ProgressReporter(mesh.node_id, control, clock)
        self._waiting_for_round: list[asyncio.Future[None]] = []
        self._planner = ThreadPoolExecutor(1, "planning", lower_thread_priority)

    def __repr__(self) -> str:
        return f"<Mover of {self._mesh.node_id}: {self.reporter.progress.doing}>"

    async def run(self) -> None:
        """For ever."""
        while True:
            version = self._mesh.current_map().version
            try:
                await self.run_once()
            except SyncPeerLostError as error:
                await self.reporter.report_blocked(f"a holder does not answer: {error}")
            except (ControlError, transitions.TransitionError) as error:
                await self.reporter.report_blocked(str(error))
            except StoreError as error:
                _log.exception("what is missing here cannot be stored")
                await self.reporter.report_blocked(_STORE_ERROR + str(error))
            except MeshdError as error:
                await self.reporter.report_blocked(str(error))
            except Exception as error:
                _log.exception("movement failed; it is tried again")
                await self.reporter.report_blocked(f"movement failed: {type(error).__name__}")
            soon = self._soon or self.reporter.progress.doing == "waiting"
            await self._mesh.wait_for_newer_map(version, _RETRY_INTERVAL if soon else _IDLE_INTERVAL)

    async def run_once(self) -> None:
        """One look at the map, and what it asks for. Raises HolderLostError, ControlError, StoreError."""
        self._soon = False
        cluster = self._mesh.current_map()
        if cluster.version < self._said:  # by it this node owes what it said it has
            self._soon = True
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
        late = self._clock.monotonic() >= self._kept_until
        if not cluster.is_rebalancing and self._let_go_at != cluster.version and late:
            await self._drop_unowned(cluster)
        if me.stores:
            await self._sync_with_changed_nodes(cluster)
        if me.stores and (
            self._waiting_for_round or self._clock.monotonic() - self._repaired > self._repair_every
        ):
            asked, self._waiting_for_round = self._waiting_for_round, []
            try:
                await self.run_repair_round()
            finally:
                for waiting in asked:
                    if not waiting.done():
                        waiting.set_result(None)

    async def wait_until_compared(self) -> None:
        """When this node was compared with all other owners once more, in a round that begins after this
        call; at once where there are none."""
        if self._mesh.single_node or self._mesh.own_node is None or not self._mesh.own_node.stores:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for_round.append(waiting)
        await waiting

    # comparing --------------------------------------------------------------------------------------------

    async def _sync_and_settle(self, cluster: ClusterMap, me: Node) -> None:
        """Compare until nothing is lacking, and say so."""
        since = max(cluster.goal, me.turned)
        await self.reporter.begin_phase("comparing", cluster.version, since=since)
        if not await self._complete(cluster, me):
            return
        await self._fetch_documents(cluster)
        await self.reporter.mark_complete()

        def settle(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            return transitions.mark_complete(present, me.node_id, cluster.version)

        self._said = (await self._maps.update_map(settle)).version
        _log.info(
            "has all it should have", extra={"map": cluster.version, "bytes": self.reporter.stats.bytes}
        )
        await self.reporter.end_phase()

    async def _complete(self, cluster: ClusterMap, me: Node) -> bool:
        """Whether nothing is lacking any more; the reporter says why not."""
        tally, distrusted = self.reporter.stats, me.state == "joining"
        for number in range(_ROUNDS):
            task = await self._plan(plan_sync, cluster, me.node_id, self._copies(cluster))
            metrics.moves_blocked.set(task.blocked_slots)
            if task.blocked_slots:
                why = f"of {task.blocked_slots} slots no node that has everything answers"
                await self.reporter.report_blocked(why, task.blocked_slots)
                return False
            slots = sum(scope.slot_count() for scope in task.first_peers.values())
            await self.reporter.begin_phase("comparing", cluster.version, slots, max(cluster.goal, me.turned))
            if distrusted:
                await self._drop_stale_if_forgotten(cluster, task.peers)
                distrusted = False
            failed, lost = tally.failed, tally.lost
            tally.total = tally.bytes
            if number == 0:
                await self._compare_at_once(cluster, task.first_peers)
                if task.first_peers != task.peers:
                    continue
            else:
                for holder, scope in task.peers.items():
                    await self._compare(cluster, holder, scope)
            metrics.moves_rounds.inc()
            if tally.failed == failed and (tally.lost == lost or number >= _STUBBORN_ROUNDS):
                return True
        await self.reporter.report_blocked("something is still lacking after many rounds")
        return False

    async def _fetch_documents(self, cluster: ClusterMap) -> None:
        """Those that all storing nodes keep, from each of them. Named by their content: one is like the
        other."""
        if self._sources.documents is None:
            return
        prefixes, keep = self._sources.documents
        others = [node for node in cluster.nodes if node.stores and node.state in COMPLETE_STATES]
        for node in others:
            holder = self._open_peer(cluster, node.node_id)
            for prefix in prefixes if node.node_id != self._mesh.node_id else ():
                after = ""
                while names := await holder.list_documents(DocumentsRequest(prefix, after)):
                    await keep(names)
                    await self._rest(PIECE_BYTES)
                    after = names[-1]

    async def _compare_at_once(self, cluster: ClusterMap, first: Mapping[str, Scope]) -> None:
        """Every slot with one holder, all holders at the same time: the bulk."""
        try:
            async with asyncio.TaskGroup() as group:
                for holder, scope in first.items():
                    group.create_task(self._compare(cluster, holder, scope))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _compare(
        self, cluster: ClusterMap, holder: str, scope: Scope, tally: SyncStats | None = None
    ) -> None:
        counted = self.reporter.stats if tally is None else tally
        await self._worker.sync_with(cluster, holder, scope, counted)

    async def _drop_stale_if_forgotten(self, cluster: ClusterMap, holders: Mapping[str, Scope]) -> None:
        """A node that was given up for longer than removals are remembered comes back as an empty one: what
        it holds, of whatever slot, may have been removed meanwhile."""
        scope, standing = full_scope(cluster, self._copies(cluster)), self._store.synced_stamp()
        if not await self._cleanup.has_any(scope):
            return
        for holder, asked in holders.items():
            page = await self._open_peer(cluster, holder).read_inventory(InventoryRequest(asked, limit=1))
            if page.since > standing:
                names = await self._cleanup.drop_stale(scope, self._clock.now_ms() * 10**6)
                _log.warning("was away for too long: begins anew", extra={"names": names})
                return

    async def _sync_with_changed_nodes(self, cluster: ClusterMap) -> None:
        """Compare with those of whom the map says something new. One that is back may have begun writes that
        it told nobody of; one that is gone may have told only some."""
        turned = {node.node_id: node.turned for node in cluster.nodes}
        changed = [node for node in cluster.nodes if self._noted.get(node.node_id, 0) < node.turned]
        found = {node.node_id for node in changed if node.state in COMPLETE_STATES and node.since}
        if max(self._copies(cluster)) > 2 and any(node.state in ("away", "down") for node in changed):
            found |= set(turned)
        found.discard(self._mesh.node_id)
        if self._noted and found:
            await self.run_repair_round(found)
        self._noted = turned

    async def run_repair_round(self, only: set[str] | None = None) -> SyncStats:
        """One round with all other owners (or `only` with some), though the map asks for none; what was
        lacking is here after."""
        cluster = self._mesh.current_map()
        task = await self._plan(plan_sync, cluster, self._mesh.node_id, self._copies(cluster))
        slots = sum(scope.slot_count() for scope in task.first_peers.values())
        await self.reporter.begin_phase("repairing", cluster.version, slots)
        tally = SyncStats()
        for holder, scope in task.peers.items():
            if only is None or holder in only:
                await self._compare(cluster, holder, scope, tally)
        if only is None:
            self._repaired = self._clock.monotonic()
            metrics.moves_repaired.inc(tally.entered)
        if tally.entered:
            _log.warning("repaired", extra={"entered": tally.entered, "bytes": tally.bytes})
        await self.reporter.end_phase()
        return tally

    async def _plan(self, how: Callable[P, T], *about: P.args, **more: P.kwargs) -> T:
        """In a thread that gives way: with many slots it takes a while."""
        return await asyncio.get_running_loop().run_in_executor(self._planner, partial(how, *about, **more))

    def _copies(self, cluster: ClusterMap) -> set[int]:
        return {cluster.copies, *(number or cluster.copies for number in self._sources.copies())}

    def _open_peer(self, cluster: ClusterMap, node_id: str) -> SyncPeer:
        node = cluster.node(node_id)
        assert node is not None
        return self._sources.holder(node)

    # letting go -------------------------------------------------------------------------------------------

    async def _drop_unowned(self, cluster: ClusterMap) -> None:
        """Drop what others own, and have. What they lack of it stays. Not while a process of this node may
        still answer by an earlier map."""
        if self._sources.known() < cluster.version:
            self._soon = True
            return
        shares = await self._plan(unowned_scopes, cluster, self._mesh.node_id, self._copies(cluster))
        kept = dropped = 0
        for holder, scope in shares.items():
            if not await self._cleanup.has_any(scope):
                continue
            if self.reporter.progress.doing != "dropping":
                slots = sum(each.slot_count() for each in shares.values())
                await self.reporter.begin_phase("dropping", cluster.version, slots)
            more = await self._cleanup.drop_held_by_peer(self._open_peer(cluster, holder), scope)
            kept, dropped = kept + more[0], dropped + more[1]
            await self.reporter.update_counts(kept=kept, dropped=dropped)
        metrics.moves_kept.set(kept)
        if kept:
            _log.warning("not all that others own is theirs yet", extra={"kept": kept})
            self._kept_until = self._clock.monotonic() + _STANDING_INTERVAL
        else:
            self._let_go_at = cluster.version
            await self.reporter.mark_clear(cluster.version)
        if self.reporter.progress.doing == "dropping":
            await self.reporter.end_phase()

    # standing ---------------------------------------------------------------------------------------------

    async def _record_standing(self, me: Node) -> None:
        """While the map says, without doubt, that this node has everything, remember until when it did."""
        now = self._clock.monotonic()
        if me.state not in ("up", "draining") or now - self._stood < _STANDING_INTERVAL:
            return
        stamp = self._clock.now_ms() * 10**6
        entry = await self._control.get("cluster/map")
        known = None if entry is None else parse_map(entry.value).node(me.node_id)
        if known is not None and (known.state, known.turned) == (me.state, me.turned):
            await self._store.record_synced_stamp(stamp)
            self._stood = now

    async def _rest(self, size: int) -> None:
        await self._sources.rest(size)
        await self.reporter.publish_if_due()
