"""Repairer: restores quarantined versions from other owners, and counts under-replicated names.

Law: it fetches exactly the quarantined versions, through `anti_entropy`: verified data, applied like any
replica's. What no node can supply stays in quarantine and is requested again later. The count is exact,
not estimated: the primary scans its names when the map shows too few copies, and only then, for at most
a twentieth of the time.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncPeerLostError, SyncStats
from meshd.cluster.rebalance.sync_plan import Item, scope_of
from meshd.cluster.rebalance.sync_source import InventoryRequest
from meshd.cluster.replica_counts import under_replicated_slots
from meshd.telemetry import metrics
from meshwire.cluster import routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.anti_entropy import SyncPeer
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncSource
    from meshd.store.integrity.quarantine import Quarantined
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


_COUNT_INTERVAL: Final = 60.0
_IDLE_FACTOR: Final = 20.0
_PAGE: Final = 1000


class UnderReplication:
    """One a node, in its steward. `copies`: of every bucket there is, as `routes` takes them."""

    def __init__(
        self, mesh: ClusterView, offers: SyncSource, copies: Callable[[], Iterable[int]], clock: Clock
    ) -> None:
        self._mesh, self._offers, self._copies, self._clock = mesh, offers, copies, clock
        self._version, self._again = 0, 0.0
        self.under_replicated = 0
        """Of those that this node decides about."""

    def __repr__(self) -> str:
        return f"<Debts of {self._mesh.node_id}: {self.under_replicated}>"

    async def refresh_count(self) -> int:
        """Look again where that is due; how many there are."""
        cluster, began = self._mesh.current_map(), self._clock.monotonic()
        if self._mesh.single_node or (cluster.version == self._version and began < self._again):
            return self.under_replicated
        scope = self._under_replicated_scope()
        self.under_replicated = await self._count_names(scope) if scope else 0
        now = self._clock.monotonic()
        self._version, self._again = cluster.version, now + max(_COUNT_INTERVAL, _IDLE_FACTOR * (now - began))
        return self.under_replicated

    def _under_replicated_scope(self) -> Scope | None:
        """Slots with too few copies of which this node decides."""
        cluster = self._mesh.current_map()
        masks = {}
        for number in {cluster.copies, *self._copies()}:
            short = under_replicated_slots(cluster, number)
            if short.any():
                short = short & routes(cluster, number).primary_slots(self._mesh.node_id)
            masks[number] = short
        return scope_of(masks, cluster.slots) if any(mask.any() for mask in masks.values()) else None

    async def _count_names(self, scope: Scope) -> int:
        found, after = 0, b""
        while True:
            page = await self._offers.read_inventory(InventoryRequest(scope, after, _PAGE))
            found += sum(any(not each.marker for each in held.versions) for held in page.names)
            after = page.after
            if not after:
                return found


_log = logging.getLogger(__name__)
_BATCH: Final = 1000


class Repairer:
    """One a node, in its steward."""

    def __init__(
        self,
        store: Store,
        mine: SyncSource,
        mesh: ClusterView,
        holder: Callable[[Node], SyncPeer],
        rest: Callable[[int], Awaitable[None]],
    ) -> None:
        self._store, self._mine, self._mesh, self._holder, self._rest = store, mine, mesh, holder, rest

    def __repr__(self) -> str:
        return f"<Mender of {self._mesh.node_id}>"

    async def repair_quarantined(self, count: Callable[[int], None]) -> None:
        """One try for everything that is in quarantine; `count` is called with numbers of versions as they
        are restored. Raises StoreError."""
        if self._mesh.single_node:
            return
        mended, after = 0, None
        while found := self._store.quarantined(_BATCH, after):
            mended += await self._repair_batch(found, count)
            after = found[-1][:2]
        if mended:
            _log.warning("damaged versions were restored from other nodes", extra={"number": mended})

    async def _repair_batch(
        self, found: Sequence[tuple[bytes, int, Quarantined]], count: Callable[[int], None]
    ) -> int:
        mended, tried = 0, set[str]()
        while left := self._wanted(found, tried):
            holder = next(iter(left))
            tried.add(holder)
            restored = await self._fetch_from(holder, left[holder])
            metrics.scrub_mended.inc(restored)
            count(restored)
            mended += restored
        return mended

    def _wanted(
        self, found: Sequence[tuple[bytes, int, Quarantined]], tried: set[str]
    ) -> dict[str, list[Item]]:
        """What may be had, by the id of a node that was not asked yet."""
        items: dict[str, list[Item]] = defaultdict(list)
        for name, stamp, _ in found:
            bucket, _, key = name.decode().partition("\0")
            record = self._store.version_at(name, stamp)
            if record is None or not record.broken:
                continue
            for node in self._mesh.route_for(bucket, key).read_set:
                if node.node_id not in tried and node.node_id != self._mesh.node_id:
                    item = Item(name, "version", record.version, stamp, record.size)
                    items[node.node_id].append(item)
                    break
        return items

    async def _fetch_from(self, holder: str, items: list[Item]) -> int:
        node = self._mesh.current_map().node(holder)
        if node is None:
            return 0
        scope = scope_of({}, self._mesh.current_map().slots)
        pull = AntiEntropySync(
            self._store, self._mine, self._holder(node), scope, rest=self._rest, tally=SyncStats()
        )
        try:
            tally = await pull.fetch_items(items)
        except SyncPeerLostError as error:
            _log.info("damaged versions cannot be had from %s now: %s", holder, error)
            return pull.stats.entered
        return tally.entered
