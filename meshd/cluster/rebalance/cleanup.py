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

    from meshd.cluster.rebalance.anti_entropy import SyncPeer
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.cluster.rebalance.sync_source import SyncSource
    from meshd.store.replica.inventory import HeldName
    from meshd.store.store import Store

_PAGE: Final = 500
SKEW: Final = 600 * 10**9
"""Ns. What was written this shortly before a comparison, nobody drops for being unknown to others."""


class Cleanup:
    """Of one store. `rest` gives way to clients."""

    def __init__(self, store: Store, offers: SyncSource, rest: Callable[[int], Awaitable[None]]) -> None:
        self._store, self._offers, self._rest = store, offers, rest

    def __repr__(self) -> str:
        return f"<Releasing of {self._store!r}>"

    async def has_any(self, scope: Scope) -> bool:
        """Whether something of it is here."""
        return await LocalInventory(self._offers, scope).has_any()

    async def drop_held_by_peer(self, holder: SyncPeer, scope: Scope) -> tuple[int, int]:
        """How many names stay, and how many went. Raises HolderLostError."""
        own, kept, dropped, after = LocalInventory(self._offers, scope), 0, 0, b""
        while True:
            page = await holder.read_inventory(InventoryRequest(scope, after, _PAGE))
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
        """Drops all of it but what is new at `now` (ns): what this store says may long be untrue. How many
        names."""
        own, dropped = LocalInventory(self._offers, scope), 0
        while await own.has_any():
            page = [without_recent(held, now - SKEW) for held in own.take_buffered()]
            await self._drop(page)
            dropped += len(page)
        return dropped

    async def _drop(self, gone: list[HeldName]) -> None:
        for start in range(0, len(gone), _PAGE):
            await self._store.drop_unowned(gone[start : start + _PAGE])
            metrics.moves_dropped.inc(len(gone[start : start + _PAGE]))
            await self._rest(0)


def without_recent(held: HeldName, cut: int) -> HeldName:
    """Without what is new: it may not have come to everybody yet."""
    versions = tuple(each for each in held.versions if each.stamp < cut)
    uploads = tuple(each for each in held.uploads if int(each.upload_id[:16], 16) < cut)
    return msgspec.structs.replace(held, versions=versions, uploads=uploads)
