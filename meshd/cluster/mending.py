"""What is in quarantine here, fetched again from other nodes that have it.

Law: exactly those versions, by the way that movement takes (`pulling`): facts and checked bytes, entered as a
replica enters them. What nobody can give now is asked for again later, and stays in quarantine meanwhile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from meshd.cluster.comparing import Item, scope_of
from meshd.cluster.pulling import HolderLostError, Pull, Tally
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.cluster.mesh import Mesh
    from meshd.cluster.offers import Offers
    from meshd.cluster.pulling import Holder
    from meshd.store.quarantine import Quarantined
    from meshd.store.store import Store
    from meshwire.cluster import Node

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 1000


class Mender:
    """One a node, in its steward."""

    def __init__(
        self,
        store: Store,
        mine: Offers,
        mesh: Mesh,
        holder: Callable[[Node], Holder],
        rest: Callable[[int], Awaitable[None]],
    ) -> None:
        self._store, self._mine, self._mesh, self._holder, self._rest = store, mine, mesh, holder, rest

    def __repr__(self) -> str:
        return f"<Mender of {self._mesh.node_id}>"

    async def mend(self, count: Callable[[int], None]) -> None:
        """One try for everything that is in quarantine; `count` is called with numbers of versions as they
        are restored. Raises StoreError."""
        if self._mesh.alone:
            return
        mended, after = 0, None
        while found := self._store.quarantined(_AT_ONCE, after):
            mended += await self._some(found, count)
            after = found[-1][:2]
        if mended:
            _log.warning("damaged versions were restored from other nodes", extra={"number": mended})

    async def _some(
        self, found: Sequence[tuple[bytes, int, Quarantined]], count: Callable[[int], None]
    ) -> int:
        mended, tried = 0, set[str]()
        while left := self._wanted(found, tried):
            holder = next(iter(left))
            tried.add(holder)
            restored = await self._from(holder, left[holder])
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
            record = self._store.at(name, stamp)
            if record is None or not record.broken:
                continue
            for node in self._mesh.route(bucket, key).readers:
                if node.node_id not in tried and node.node_id != self._mesh.node_id:
                    item = Item(name, "version", record.version, stamp, record.size)
                    items[node.node_id].append(item)
                    break
        return items

    async def _from(self, holder: str, items: list[Item]) -> int:
        node = self._mesh.map().node(holder)
        if node is None:
            return 0
        scope = scope_of({}, self._mesh.map().slots)
        pull = Pull(self._store, self._mine, self._holder(node), scope, rest=self._rest, tally=Tally())
        try:
            tally = await pull.fetch(items)
        except HolderLostError as error:
            _log.info("damaged versions cannot be had from %s now: %s", holder, error)
            return pull.tally.entered
        return tally.entered
