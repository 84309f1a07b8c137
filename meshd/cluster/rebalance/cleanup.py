"""Cleanup: drops data that this node no longer owns.

Law: nothing is dropped that its owners do not hold: each name is compared with what its primary holds,
and anything the primary is missing stays. The caller ensures that no process of this node still serves
requests under a map in which the name belonged to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.rebalance.anti_entropy import LocalInventory
from meshd.cluster.rebalance.sync_plan import missing_items
from meshd.cluster.rebalance.sync_source import InventoryRequest
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncPeer, SyncSource
    from meshd.store.replica.inventory import HeldName
    from meshd.store.store import Store

_PAGE: Final = 500
SKEW: Final = 600 * 10**9
"""Nanoseconds. Data written this shortly before a comparison is not dropped because other nodes do not know
it."""


class Cleanup:
    """Drops data of one store. `throttle` throttles in favor of client requests."""

    def __init__(self, store: Store, source: SyncSource, throttle: Callable[[int], Awaitable[None]]) -> None:
        self._store, self._source, self._throttle = store, source, throttle

    def __repr__(self) -> str:
        return f"<Cleanup of {self._store!r}>"

    async def has_any(self, scope: Scope) -> bool:
        """Returns True if the store holds anything in this scope."""
        return await LocalInventory(self._source, scope).has_any()

    async def drop_held_by_peer(self, peer: SyncPeer, scope: Scope) -> tuple[int, int]:
        """Drops every name in the scope that the peer holds completely; returns how many names stayed and how
        many were dropped. Raises SyncPeerLostError."""
        own, kept, dropped, after = LocalInventory(self._source, scope), 0, 0, b""
        while True:
            page = await peer.read_inventory(InventoryRequest(scope, after, _PAGE))
            theirs = {held.name: held for held in page.names}
            gone = []
            for name, held in (await own.read_up_to(page.after)).items():
                if missing_items(theirs.get(name), held).items:
                    kept += 1
                elif held.versions or held.uploads:
                    gone.append(held)
            await self._drop(gone)
            dropped += len(gone)
            after = page.after
            if not after:
                return kept, dropped

    async def drop_stale(self, scope: Scope, now: int) -> int:
        """Drops everything in the scope except what is recent at `now` (ns), because this store's state may
        be outdated. Returns how many names."""
        own, dropped = LocalInventory(self._source, scope), 0
        while await own.has_any():
            page = [without_recent(held, now - SKEW) for held in own.take_buffered()]
            await self._drop(page)
            dropped += len(page)
        return dropped

    async def _drop(self, gone: list[HeldName]) -> None:
        for start in range(0, len(gone), _PAGE):
            await self._store.inventory.drop_unowned(gone[start : start + _PAGE])
            metrics.rebalance_dropped.inc(len(gone[start : start + _PAGE]))
            await self._throttle(0)


def without_recent(held: HeldName, cut: int) -> HeldName:
    """Returns the name without recent versions and uploads, which may not have reached every node yet."""
    versions = tuple(each for each in held.versions if each.stamp < cut)
    uploads = tuple(each for each in held.uploads if int(each.upload_id[:16], 16) < cut)
    return msgspec.structs.replace(held, versions=versions, uploads=uploads)
