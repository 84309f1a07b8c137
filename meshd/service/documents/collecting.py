"""Plans, snapshots and assets that nobody uses any more: collected, after a time in which anybody could.

Law: what goes is `retention`'s to say, of what all nodes of the mesh know; one of them says it, in the table
of removals, and each takes its own copies away by that. A node that cannot be asked puts it off. Invariant: a
doubt keeps a document.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from meshd.assembly.catalog import RESERVED_BUCKET, SHARED
from meshd.service.documents.retention import BESIDE, DAYS, NAMING, digest_of, merged, named_in, unused
from meshd.service.documents.uses import MINUTE_MS
from meshd.store.errors import ConditionFailedError, ConditionMissingError
from meshd.telemetry import metrics
from meshwire.cluster.routes import SOUND
from meshwire.conditions import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshd.assembly.catalog import Catalog
    from meshd.cluster.mesh import Mesh
    from meshd.control.removals import RemovalTable
    from meshd.kit.clock import Clock
    from meshd.service.documents.census import Census, Everywhere
    from meshd.service.documents.retention import Held
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

_log = logging.getLogger("meshd.documents")
_PAGE: Final = 1000
_DAY_MS: Final = 86_400_000
_MEMORY_MS: Final = 10 * _DAY_MS
_REST_MS: Final = 2000
"""What came later than so lately is left for the next time: the store compares times by the second."""
_OF_PLANS: Final = ("bad/", "lengths/")
"""Documents of this node alone that are of a plan: who is bad in it, how long its samples are."""


class DocumentKeeper:
    """One a node (the steward's). `roots` gives texts of all that names documents; `leads` whether this node
    is the one of the mesh that says what goes; `days` without use after which that is, 0: never."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        census: Census,
        removals: RemovalTable,
        roots: Callable[[], Iterable[str]],
        clock: Clock,
        leads: Callable[[], bool] = lambda: True,
        *,
        days: int = DAYS,
        memory_ms: int = _MEMORY_MS,
    ) -> None:
        self._store, self._catalog, self._census, self._removals = store, catalog, census, removals
        self._roots, self._clock, self._leads, self._days = roots, clock, leads, days
        self._memory_ms = memory_ms
        self._cleared: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<DocumentKeeper, {self._days} days>"

    async def sweep(self) -> int:
        """Remove what nobody uses; how many went by this node's word."""
        gone = await self._expire() if self._days and self._leads() else 0
        self._cleared = ()
        await self.clear()
        await self._clear_of_plans()
        if self._leads():
            await self._removals.forget(self._clock.now_ms() - self._memory_ms)
        await asyncio.to_thread(self.measure)
        return gone

    def measure(self) -> None:
        """Put into the gauges what there is (blocking)."""
        for kind, (count, size) in self._census.sizes().items():
            metrics.documents.labels(kind).set(count)
            metrics.document_bytes.labels(kind).set(size)

    # --- what goes ----------------------------------------------------------------------------------------

    def _first(self) -> int:
        """The minute since which a use counts."""
        return (self._clock.now_ms() - self._days * _DAY_MS) // MINUTE_MS

    async def _expire(self) -> int:
        before = await self._census.everywhere(SHARED)
        old = await self._unused(before)
        if not old or not self._asked_all(before):
            return 0
        await self._removals.add(old, self._clock.now_ms(), "unused", self._days)
        after, first = await self._census.everywhere(SHARED), self._first()
        back = [key for key in old if key in after.held and after.held[key].minute >= first]
        for key in back:  # somebody came back to it just now
            await self._put_back(key)
        for key in set(old) - set(back):
            metrics.documents_collected.labels(key.partition("/")[0]).inc()
        _log.info("documents that nobody uses are gone", extra={"documents": len(old) - len(back)})
        return len(old) - len(back)

    def _asked_all(self, seen: Everywhere) -> bool:
        metrics.documents_waiting.set(bool(seen.silent))
        if seen.silent:
            _log.info("no document is removed while nodes are away", extra={"nodes": ", ".join(seen.silent)})
        return not seen.silent

    async def _unused(self, seen: Everywhere) -> list[str]:
        """Nothing, where a document that may name others cannot be read."""
        there = {key: each for key, each in seen.held.items() if not self._catalog.is_gone(key)}
        naming = [key for key in there if key.startswith(NAMING + BESIDE)]
        await self._catalog.ensure(naming)
        if any(self._store.get(RESERVED_BUCKET, key) is None for key in naming):
            return []
        return await asyncio.to_thread(self._judge, there)

    def _judge(self, there: Mapping[str, Held]) -> list[str]:
        named = {digest for text in self._roots() for digest in named_in(text)}
        # This node's own uses once more: read after the documents.
        latest = merged([there, *map(self._census.here, SHARED)])
        return unused({key: latest[key] for key in there}, named, self._names_of, self._first())

    def _names_of(self, key: str) -> set[str]:
        record = self._store.get(RESERVED_BUCKET, key)
        return set() if record is None else named_in(self._store.read(record, 0, record.size))

    async def _put_back(self, key: str) -> None:
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None:
            await self._removals.restore(key)
            return
        await self._catalog.share(key, await asyncio.to_thread(self._store.read, record, 0, record.size))

    # --- what is taken away here --------------------------------------------------------------------------

    async def clear(self) -> int:
        """Take away this node's copies of what was removed anywhere; how many went."""
        names = tuple(self._removals.names())
        if names == self._cleared:
            return 0
        cleared, late = 0, False
        for key in names:
            record = self._store.get(RESERVED_BUCKET, key)
            if record is None:
                continue
            if record.modified > self._clock.now_ms() - _REST_MS:
                late = True
                continue
            cleared += await self._take_away(key, record)
        self._cleared = () if late else names
        metrics.documents_cleared.inc(cleared)
        return cleared

    async def _take_away(self, key: str, record: Record) -> bool:
        if not self._removals.gone(key):
            return False
        unchanged = Conditions(if_unmodified_since=record.modified // 1000)  # made again meanwhile: it stays
        try:
            await self._store.delete(RESERVED_BUCKET, key, conditions=unchanged)
        except (ConditionFailedError, ConditionMissingError):
            return False
        return True

    async def _clear_of_plans(self) -> None:
        """What this node alone keeps of plans that are no more."""
        first = (self._clock.now_ms() - (self._days or DAYS) * _DAY_MS) // MINUTE_MS
        gone = await asyncio.to_thread(self._of_no_plan, first)
        for start in range(0, len(gone), _PAGE):
            some = gone[start : start + _PAGE]
            await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()

    def _of_no_plan(self, first: int) -> list[str]:
        plans = {digest_of(key) for key in self._census.here("plans/")}
        return [
            key
            for prefix in _OF_PLANS
            for key, held in self._census.here(prefix).items()
            if held.made < first and key.split("/")[1] not in plans
        ]


def leads(mesh: Mesh) -> bool:
    """Whether this node says what goes: of those that store and have everything, the first."""
    if mesh.alone:
        return True
    sound = [node.node_id for node in mesh.map().nodes if node.stores and node.state in SOUND]
    return bool(sound) and min(sound) == mesh.node_id
