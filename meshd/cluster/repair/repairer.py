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

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncStats
from meshd.cluster.rebalance.sync_plan import Item, scope_of
from meshd.cluster.rebalance.sync_source import InventoryRequest, SyncPeerLostError
from meshd.cluster.replica_counts import under_replicated_slots
from meshd.telemetry import metrics
from meshwire.cluster import routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncPeer, SyncSource
    from meshd.store.integrity.quarantine import Quarantined
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


_COUNT_INTERVAL: Final = 60.0
_IDLE_FACTOR: Final = 20.0
_PAGE: Final = 1000


class UnderReplication:
    """Counts under-replicated names. One per node, in its coordinator. `copies`: the replica counts of all
    buckets in the form that `routes` takes."""

    def __init__(
        self, mesh: ClusterView, source: SyncSource, copies: Callable[[], Iterable[int]], clock: Clock
    ) -> None:
        self._mesh, self._source, self._copies, self._clock = mesh, source, copies, clock
        self._version, self._again = 0, 0.0
        self.under_replicated = 0
        """Under-replicated names that this node is primary of."""

    def __repr__(self) -> str:
        return f"<UnderReplication of {self._mesh.node_id}: {self.under_replicated}>"

    async def refresh_count(self) -> int:
        """Counts again if that is due; returns the count."""
        cluster, began = self._mesh.current_map(), self._clock.monotonic()
        if self._mesh.single_node or (cluster.version == self._version and began < self._again):
            return self.under_replicated
        scope = self._under_replicated_scope()
        self.under_replicated = await self._count_names(scope) if scope else 0
        now = self._clock.monotonic()
        self._version, self._again = cluster.version, now + max(_COUNT_INTERVAL, _IDLE_FACTOR * (now - began))
        return self.under_replicated

    def _under_replicated_scope(self) -> Scope | None:
        """Returns the slots with too few copies that this node is primary of."""
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
            page = await self._source.read_inventory(InventoryRequest(scope, after, _PAGE))
            found += sum(any(not each.marker for each in held.versions) for held in page.names)
            after = page.after
            if not after:
                return found


_log = logging.getLogger(__name__)
_BATCH: Final = 1000


class Repairer:
    """Fetches intact copies of quarantined versions. One per node, in its coordinator."""

    def __init__(
        self,
        store: Store,
        source: SyncSource,
        mesh: ClusterView,
        open_peer: Callable[[Node], SyncPeer],
        throttle: Callable[[int], Awaitable[None]],
    ) -> None:
        self._store, self._source, self._mesh = store, source, mesh
        self._open_peer, self._throttle = open_peer, throttle

    def __repr__(self) -> str:
        return f"<Repairer of {self._mesh.node_id}>"

    async def repair_quarantined(self, count: Callable[[int], None]) -> None:
        """Tries once to restore everything in quarantine; calls `count` with the number of versions as they
        are restored. Raises StoreError."""
        if self._mesh.single_node:
            return
        repaired, after = 0, None
        while found := self._store.quarantine.entries(_BATCH, after):
            repaired += await self._repair_batch(found, count)
            after = found[-1][:2]
        if repaired:
            _log.warning("restored damaged versions from other nodes", extra={"number": repaired})

    async def _repair_batch(
        self, found: Sequence[tuple[bytes, int, Quarantined]], count: Callable[[int], None]
    ) -> int:
        repaired, tried = 0, set[str]()
        while left := self._items_by_peer(found, tried):
            peer_id = next(iter(left))
            tried.add(peer_id)
            restored = await self._fetch_from(peer_id, left[peer_id])
            metrics.scrub_repaired.inc(restored)
            count(restored)
            repaired += restored
        return repaired

    def _items_by_peer(
        self, found: Sequence[tuple[bytes, int, Quarantined]], tried: set[str]
    ) -> dict[str, list[Item]]:
        """Returns the items to request, by the id of a node not asked yet."""
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

    async def _fetch_from(self, peer_id: str, items: list[Item]) -> int:
        node = self._mesh.current_map().node(peer_id)
        if node is None:
            return 0
        scope = scope_of({}, self._mesh.current_map().slots)
        sync = AntiEntropySync(
            self._store, self._source, self._open_peer(node), scope, rest=self._throttle, tally=SyncStats()
        )
        try:
            tally = await sync.fetch_items(items)
        except SyncPeerLostError as error:
            _log.info("cannot fetch intact copies from %s now: %s", peer_id, error)
            return sync.stats.entered
        return tally.entered
