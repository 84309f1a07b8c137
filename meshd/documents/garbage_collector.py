"""Garbage collection of shared documents and of file indexes that nothing uses any more.

`gc_policy` decides what is removed, from what all nodes know; one node records it in the table of
deleted documents, and each node removes its own copies. An unreachable node postpones the decision. An
index is rebuilt on demand, so it goes once no snapshot pins its file and nobody has used it for a while.
A document is kept whenever there is doubt.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

from meshd.core.document_store import INDEX_PREFIXES, RESERVED_BUCKET, SHARED_PREFIXES
from meshd.core.error_mapping import store_errors
from meshd.documents.gc_policy import (
    ATTACHED_PREFIXES,
    DEFAULT_UNUSED_DAYS,
    REFERRING_PREFIXES,
    digest_of,
    hashes_in,
    merge_usage,
    unused_documents,
)
from meshd.documents.inventory import MINUTE_MS
from meshd.store.errors import ConditionFailedError, ConditionMissingError
from meshd.telemetry import metrics
from meshwire.cluster.routes import COMPLETE_STATES
from meshwire.dataset.snapshot import pinned_files
from meshwire.frame.columns import ColumnError
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.deleted_documents import DeletedDocumentTable
    from meshd.core.document_store import DocumentStore
    from meshd.documents.gc_policy import DocumentUsage
    from meshd.documents.inventory import DocumentInventory, MeshInventory, UsageRecorder
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.util.clock import Clock


_log = logging.getLogger("meshd.documents")
SAFE_DAYS: Final = 30
_INDEX_PAGE: Final = 1000
_FIELD_SUFFIX: Final = re.compile(r"-[0-9a-f]{32}$")  # of parts of its records


class IndexCollector:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, uses: UsageRecorder, clock: Clock) -> None:
        self._store, self._uses, self._clock = store, uses, clock

    def __repr__(self) -> str:
        return "<IndexKeeper>"

    async def sweep(self) -> int:
        """Remove what nobody uses; how many went."""
        unused = await asyncio.to_thread(self._unused)
        for start in range(0, len(unused), _INDEX_PAGE):
            some = unused[start : start + _INDEX_PAGE]
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()
            await asyncio.sleep(0)
        if unused:
            _log.info("indexes of files that no dataset uses are gone", extra={"indexes": len(unused)})
        return len(unused)

    def _unused(self) -> list[str]:
        uses, first = self._uses.last_uses(), self._clock.now_ms() // MINUTE_MS - SAFE_DAYS * 24 * 60
        old = {
            key: etag_of(key)
            for prefix in INDEX_PREFIXES
            for key, record in self._documents(prefix)
            if max(record.modified // MINUTE_MS, uses.last_used_minute(key)) < first
        }
        try:
            pinned = self._pinned() if old else set[str]()
        except ColumnError as error:
            _log.warning("a snapshot cannot be read: no index is collected", extra={"why": str(error)})
            return []
        return [key for key, etag in old.items() if etag not in pinned]

    def _pinned(self) -> set[str]:
        """ETags of the files that snapshots were made of by their indexes. Raises ColumnError."""
        found: set[str] = set()
        for key, _ in self._documents("snapshots/"):
            record = self._store.get(RESERVED_BUCKET, key)
            if record is not None:
                found.update(pinned_files(self._store.read_range(record, 0, record.size)))
        return found

    def _documents(self, prefix: str) -> Iterator[tuple[str, Record]]:
        after, more = "", True
        while more:
            page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_INDEX_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated


def etag_of(key: str) -> str:
    """Of the file that an index is of: `lines/ETAG-SIZE`, `tfrecords/ETAG-SIZE-CHOICE`."""
    return _FIELD_SUFFIX.sub("", key.partition("/")[2]).rpartition("-")[0]


_PAGE: Final = 1000
_DAY_MS: Final = 86_400_000
_TOMBSTONE_TTL_MS: Final = 10 * _DAY_MS
_SETTLE_MS: Final = 2000
"""What came later than so lately is left for the next time: the store compares times by the second."""
_PLAN_LOCAL_PREFIXES: Final = ("bad/", "lengths/")
"""Documents of this node alone that are of a plan: who is bad in it, how long its samples are."""


class DocumentCollector:
    """One a node (the steward's). `roots` gives texts of all that names documents; `leads` whether this node
    is the one of the mesh that says what goes; `days` without use after which that is, 0: never."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        census: DocumentInventory,
        removals: DeletedDocumentTable,
        roots: Callable[[], Iterable[str]],
        clock: Clock,
        leads: Callable[[], bool] = lambda: True,
        *,
        days: int = DEFAULT_UNUSED_DAYS,
        memory_ms: int = _TOMBSTONE_TTL_MS,
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
        await self.remove_local_copies()
        await self._remove_plan_leftovers()
        if self._leads():
            await self._removals.prune(self._clock.now_ms() - self._memory_ms)
        await asyncio.to_thread(self.update_gauges)
        return gone

    def update_gauges(self) -> None:
        """Put into the gauges what there is (blocking)."""
        for kind, (count, size) in self._census.local_sizes().items():
            metrics.documents.labels(kind).set(count)
            metrics.document_bytes.labels(kind).set(size)

    # --- what goes ----------------------------------------------------------------------------------------

    def _first(self) -> int:
        """The minute since which a use counts."""
        return (self._clock.now_ms() - self._days * _DAY_MS) // MINUTE_MS

    async def _expire(self) -> int:
        before = await self._census.collect(SHARED_PREFIXES)
        old = await self._unused(before)
        if not old or not self._asked_all(before):
            return 0
        await self._removals.add(old, self._clock.now_ms(), "unused", self._days)
        after, first = await self._census.collect(SHARED_PREFIXES), self._first()
        back = [key for key in old if key in after.held and after.held[key].minute >= first]
        for key in back:  # somebody came back to it just now
            await self._restore(key)
        for key in set(old) - set(back):
            metrics.documents_collected.labels(key.partition("/")[0]).inc()
        _log.info("documents that nobody uses are gone", extra={"documents": len(old) - len(back)})
        return len(old) - len(back)

    def _asked_all(self, seen: MeshInventory) -> bool:
        metrics.documents_waiting.set(bool(seen.silent))
        if seen.silent:
            _log.info("no document is removed while nodes are away", extra={"nodes": ", ".join(seen.silent)})
        return not seen.silent

    async def _unused(self, seen: MeshInventory) -> list[str]:
        """Nothing, where a document that may name others cannot be read."""
        there = {key: each for key, each in seen.held.items() if not self._catalog.is_gone(key)}
        naming = [key for key in there if key.startswith(REFERRING_PREFIXES + ATTACHED_PREFIXES)]
        await self._catalog.ensure_local_copies(naming)
        if any(self._store.get(RESERVED_BUCKET, key) is None for key in naming):
            return []
        return await asyncio.to_thread(self._decide_unused, there)

    def _decide_unused(self, there: Mapping[str, DocumentUsage]) -> list[str]:
        named = {digest for text in self._roots() for digest in hashes_in(text)}
        # This node's own uses once more: read after the documents.
        latest = merge_usage([there, *map(self._census.list_local, SHARED_PREFIXES)])
        return unused_documents({key: latest[key] for key in there}, named, self._names_of, self._first())

    def _names_of(self, key: str) -> set[str]:
        record = self._store.get(RESERVED_BUCKET, key)
        return set() if record is None else hashes_in(self._store.read_range(record, 0, record.size))

    async def _restore(self, key: str) -> None:
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None:
            await self._removals.restore(key)
            return
        await self._catalog.put_shared(
            key, await asyncio.to_thread(self._store.read_range, record, 0, record.size)
        )

    # --- what is taken away here --------------------------------------------------------------------------

    async def remove_local_copies(self) -> int:
        """Take away this node's copies of what was removed anywhere; how many went."""
        names = tuple(self._removals.names())
        if names == self._cleared:
            return 0
        cleared, late = 0, False
        for key in names:
            record = self._store.get(RESERVED_BUCKET, key)
            if record is None:
                continue
            if record.modified > self._clock.now_ms() - _SETTLE_MS:
                late = True
                continue
            cleared += await self._remove_copy(key, record)
        self._cleared = () if late else names
        metrics.documents_cleared.inc(cleared)
        return cleared

    async def _remove_copy(self, key: str, record: Record) -> bool:
        if not self._removals.deletion_notice(key):
            return False
        unchanged = Conditions(if_unmodified_since=record.modified // 1000)  # made again meanwhile: it stays
        try:
            await self._store.delete(RESERVED_BUCKET, key, conditions=unchanged)
        except (ConditionFailedError, ConditionMissingError):
            return False
        return True

    async def _remove_plan_leftovers(self) -> None:
        """What this node alone keeps of plans that are no more."""
        first = (self._clock.now_ms() - (self._days or DEFAULT_UNUSED_DAYS) * _DAY_MS) // MINUTE_MS
        gone = await asyncio.to_thread(self._of_no_plan, first)
        for start in range(0, len(gone), _PAGE):
            some = gone[start : start + _PAGE]
            await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()

    def _of_no_plan(self, first: int) -> list[str]:
        plans = {digest_of(key) for key in self._census.list_local("plans/")}
        return [
            key
            for prefix in _PLAN_LOCAL_PREFIXES
            for key, held in self._census.list_local(prefix).items()
            if held.made < first and key.split("/")[1] not in plans
        ]


def is_collector_leader(mesh: ClusterView) -> bool:
    """Whether this node says what goes: of those that store and have everything, the first."""
    if mesh.single_node:
        return True
    sound = [
        node.node_id for node in mesh.current_map().nodes if node.stores and node.state in COMPLETE_STATES
    ]
    return bool(sound) and min(sound) == mesh.node_id
