"""Letting go of what a node need not hold any more.

Law: nothing goes that its owners do not hold: each name is compared with what the one that decides about it
holds, and what that one lacks stays. Nobody of this node may still answer by a map in which the name was its
own; the caller sees to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.comparing import lacking
from meshd.cluster.offers import InventoryWanted
from meshd.cluster.pulling import Own
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.cluster.comparing import Scope
    from meshd.cluster.offers import Offers
    from meshd.cluster.pulling import Holder
    from meshd.store.inventory import Held
    from meshd.store.store import Store

_PAGE: Final = 500
SKEW: Final = 600 * 10**9
"""Ns. What was written this shortly before a comparison, nobody drops for being unknown to others."""


class Releasing:
    """Of one store. `rest` gives way to clients."""

    def __init__(self, store: Store, offers: Offers, rest: Callable[[int], Awaitable[None]]) -> None:
        self._store, self._offers, self._rest = store, offers, rest

    def __repr__(self) -> str:
        return f"<Releasing of {self._store!r}>"

    async def anything(self, scope: Scope) -> bool:
        """Whether something of it is here."""
        return await Own(self._offers, scope).any()

    async def to(self, holder: Holder, scope: Scope) -> tuple[int, int]:
        """How many names stay, and how many went. Raises HolderLostError."""
        own, kept, dropped, after = Own(self._offers, scope), 0, 0, b""
        while True:
            page = await holder.inventory(InventoryWanted(scope, after, _PAGE))
            theirs = {held.name: held for held in page.names}
            gone = []
            for name, held in (await own.up_to(page.after)).items():
                if lacking(theirs.get(name), held).items:
                    kept += 1
                elif held.versions or held.uploads:
                    gone.append(held)
            await self._drop(gone)
            dropped += len(gone)
            after = page.after
            if not after:
                return kept, dropped

    async def forget(self, scope: Scope, now: int) -> int:
        """Drops all of it but what is new at `now` (ns): what this store says may long be untrue. How many
        names."""
        own, dropped = Own(self._offers, scope), 0
        while await own.any():
            page = [older(held, now - SKEW) for held in own.ahead()]
            await self._drop(page)
            dropped += len(page)
        return dropped

    async def _drop(self, gone: list[Held]) -> None:
        for start in range(0, len(gone), _PAGE):
            await self._store.drop(gone[start : start + _PAGE])
            metrics.moves_dropped.inc(len(gone[start : start + _PAGE]))
            await self._rest(0)


def older(held: Held, cut: int) -> Held:
    """Without what is new: it may not have come to everybody yet."""
    versions = tuple(each for each in held.versions if each.stamp < cut)
    uploads = tuple(each for each in held.uploads if int(each.upload_id[:16], 16) < cut)
    return msgspec.structs.replace(held, versions=versions, uploads=uploads)
