"""Garbage collection of shared documents and of file indexes that nothing uses any more.

`gc_policy` decides what is removed, from what all nodes know; one node records it in the table of
deleted documents, and each node removes its own copies. An unreachable node postpones the decision. An
index is rebuilt on demand, so it is removed once no snapshot pins its file and it has been unused for a
while. A document is kept whenever there is doubt.

A damaged document of `REBUILT_PREFIXES` is removed as soon as it is in quarantine; it is not requested from
other nodes, and the process that needs it rebuilds it. Other documents stay there until another node supplies
them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import store_errors
from meshd.core.document_store import INDEX_PREFIXES, REBUILT_PREFIXES, RESERVED_BUCKET, SHARED_PREFIXES
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
from meshd.util.clock_jumps import ClockJumps
from meshwire.cluster.routes import COMPLETE_STATES
from meshwire.dataset.snapshot import pinned_files
from meshwire.frame.columns import ColumnError
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.deleted_documents import DeletedDocumentTable
    from meshd.core.document_store import DocumentStore
    from meshd.documents.gc_policy import DocumentUsage
    from meshd.documents.inventory import DocumentInventory, MeshInventory, UsageFile
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshd.util.clock_jumps import ClockWatch

_log = logging.getLogger("meshd.documents")
SAFE_DAYS: Final = 30
_INDEX_PAGE: Final = 1000
_FIELD_SUFFIX: Final = re.compile(r"-[0-9a-f]{32}$")  # of an index of some fields only


class IndexCollector:
    """Removes unused file indexes. One per node, in its coordinator."""

    def __init__(self, store: ObjectStore, uses: UsageFile, clock: Clock) -> None:
        self._store, self._uses, self._clock = store, uses, clock

    async def sweep(self) -> int:
        """Removes unused indexes; returns how many."""
        unused = await asyncio.to_thread(self._unused_indexes)
        for start in range(0, len(unused), _INDEX_PAGE):
            some = unused[start : start + _INDEX_PAGE]
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()
            await asyncio.sleep(0)
        if unused:
            _log.info("removed indexes of files that no dataset uses", extra={"indexes": len(unused)})
        return len(unused)

    def _unused_indexes(self) -> list[str]:
        uses, first = self._uses.last_uses(), self._clock.now_ms() // MINUTE_MS - SAFE_DAYS * 24 * 60
        old = {
            key: etag_of(key)
            for prefix in INDEX_PREFIXES
            for key, record in self._documents(prefix)
            if max(record.modified // MINUTE_MS, uses.last_used_minute(key)) < first
        }
        try:
            pinned = self._pinned_etags() if old else set[str]()
        except ColumnError as error:
            _log.warning("cannot read a snapshot: removing no indexes", extra={"why": str(error)})
            return []
        return [key for key, etag in old.items() if etag not in pinned]

    def _pinned_etags(self) -> set[str]:
        """Returns the ETags of the files whose indexes snapshots were made from. Raises ColumnError."""
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
    """Returns the ETag of the file that an index describes: `lines/ETAG-SIZE`,
    `tfrecords/ETAG-SIZE-CHOICE`."""
    return _FIELD_SUFFIX.sub("", key.partition("/")[2]).rpartition("-")[0]


_PAGE: Final = 1000
_DAY_MS: Final = 86_400_000
_TOMBSTONE_TTL_MS: Final = 10 * _DAY_MS
_SETTLE_MS: Final = 2000
"""Milliseconds. A copy that arrived later than this is left for the next time, because the store compares
times by the second."""
_PLAN_LOCAL_PREFIXES: Final = ("bad/", "lengths/")
"""Prefixes of this node's own documents about a plan: its bad samples and its sample lengths."""


async def _nobody_else() -> None:
    return


class DocumentCollector:
    """Removes unused shared documents. One per node, in its coordinator. `roots` returns the texts of
    everything that names documents; `is_leader`: whether this node decides for the cluster; `days` without
    use after which a document is removed, 0: never; `announce` returns when the other nodes know what was
    deleted; `settle_seconds`, `watch`: see `ClockJumps`."""

    def __init__(
        self,
        store: ObjectStore,
        documents: DocumentStore,
        inventory: DocumentInventory,
        deleted: DeletedDocumentTable,
        roots: Callable[[], Iterable[str]],
        clock: Clock,
        is_leader: Callable[[], bool] = lambda: True,
        *,
        announce: Callable[[], Awaitable[None]] = _nobody_else,
        days: int = DEFAULT_UNUSED_DAYS,
        tombstone_ttl_ms: int = _TOMBSTONE_TTL_MS,
        settle_seconds: float = 0.0,
        watch: ClockWatch | None = None,
    ) -> None:
        self._jumps = ClockJumps(clock, settle_seconds, watch)
        self._store, self._documents, self._inventory, self._deleted = store, documents, inventory, deleted
        self._roots, self._clock, self._is_leader, self._days = roots, clock, is_leader, days
        self._tombstone_ttl_ms, self._announce = tombstone_ttl_ms, announce
        self._cleared: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<DocumentCollector, {self._days} days>"

    async def sweep(self) -> int:
        """Removes unused documents; returns how many by this node's decision."""
        latest = await asyncio.to_thread(self._latest_use)
        now = self._clock.now_ms()  # of the whole sweep: the clock may jump while other nodes are asked
        trusted = self._jumps.trusts_clock(now, latest)
        if self._jumps.days_ahead:
            _log.warning(
                "the clock is days later than documents were last used: none is removed, in case it is wrong",
                extra={"days": self._jumps.days_ahead},
            )
        gone = await self._expire(self._cutoff_minute(now)) if trusted and self._expires else 0
        self._cleared = ()
        await self.remove_local_copies()
        if trusted:
            await self._remove_plan_leftovers(self._cutoff_minute(now))
        if trusted and self._is_leader():
            await self._deleted.prune(now - self._tombstone_ttl_ms)
        await asyncio.to_thread(self.update_gauges)
        return gone

    def _latest_use(self) -> int:
        """Returns when a shared document was last made or used here, in ms since 1970; 0 without any
        (blocking)."""
        held = (each for prefix in SHARED_PREFIXES for each in self._inventory.list_local(prefix).values())
        return max((each.minute for each in held), default=0) * MINUTE_MS

    def update_gauges(self) -> None:
        """Updates the gauges of documents (blocking)."""
        for kind, (count, size) in self._inventory.local_sizes().items():
            metrics.documents.labels(kind).set(count)
            metrics.document_bytes.labels(kind).set(size)

    # --- deciding what to remove --------------------------------------------------------------------------

    @property
    def _expires(self) -> bool:
        """Whether this node decides what has not been used for too long."""
        return bool(self._days) and self._is_leader()

    def _cutoff_minute(self, now: int) -> int:
        """Returns the minute from which on a use counts."""
        return (now - (self._days or DEFAULT_UNUSED_DAYS) * _DAY_MS) // MINUTE_MS

    async def _expire(self, first: int) -> int:
        """Removes the documents that were not used in the minute `first` or later; returns how many."""
        before = await self._inventory.collect(SHARED_PREFIXES)
        old = await self._unused_documents(before, first)
        if not old or not self._all_nodes_answered(before):
            return 0
        await self._deleted.add(old, self._clock.now_ms(), "unused", self._days)
        await self._announce()  # a node that has not heard of it takes them for present, and uses them
        after = await self._inventory.collect(SHARED_PREFIXES)
        used_again = [key for key in old if key in after.held and after.held[key].minute >= first]
        for key in used_again:  # used again since the decision
            await self._restore(key)
        for key in set(old) - set(used_again):
            metrics.documents_collected.labels(key.partition("/")[0]).inc()
        _log.info("removed unused documents", extra={"documents": len(old) - len(used_again)})
        return len(old) - len(used_again)

    def _all_nodes_answered(self, seen: MeshInventory) -> bool:
        metrics.documents_waiting.set(bool(seen.silent))
        if seen.silent:
            _log.info(
                "removing no documents while nodes are unreachable", extra={"nodes": ", ".join(seen.silent)}
            )
        return not seen.silent

    async def _unused_documents(self, seen: MeshInventory, first: int) -> list[str]:
        """Returns the unused documents; none if a document that may name others cannot be read."""
        present = {key: each for key, each in seen.held.items() if not self._documents.is_gone(key)}
        naming = [key for key in present if key.startswith(REFERRING_PREFIXES + ATTACHED_PREFIXES)]
        await self._documents.ensure_local_copies(naming)
        if any(self._store.get(RESERVED_BUCKET, key) is None for key in naming):
            return []
        return await asyncio.to_thread(self._decide_unused, present, first)

    def _decide_unused(self, present: Mapping[str, DocumentUsage], first: int) -> list[str]:
        named = {digest for text in self._roots() for digest in hashes_in(text)}
        # This node's uses are read again, after the documents, to see the latest ones.
        latest = merge_usage([present, *map(self._inventory.list_local, SHARED_PREFIXES)])
        return unused_documents({key: latest[key] for key in present}, named, self._names_of, first)

    def _names_of(self, key: str) -> set[str]:
        record = self._store.get(RESERVED_BUCKET, key)
        return set() if record is None else hashes_in(self._store.read_range(record, 0, record.size))

    async def _restore(self, key: str) -> None:
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None:
            await self._deleted.restore(key)
            return
        await self._documents.put_shared(
            key, await asyncio.to_thread(self._store.read_range, record, 0, record.size)
        )

    # --- removing local copies ----------------------------------------------------------------------------

    async def remove_local_copies(self) -> int:
        """Removes this node's copies of documents deleted anywhere; returns how many."""
        names = tuple(self._deleted.names())
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
        if not self._deleted.deletion_notice(key):
            return False
        unchanged = Conditions(if_unmodified_since=record.modified // 1000)  # a document created again stays
        try:
            await self._store.delete(RESERVED_BUCKET, key, conditions=unchanged)
        except (ConditionFailedError, ConditionMissingError):
            return False
        return True

    async def _remove_plan_leftovers(self, first: int) -> None:
        """Removes this node's own documents about plans that no longer exist, made before the minute
        `first`."""
        gone = await asyncio.to_thread(self._plan_leftovers, first)
        for start in range(0, len(gone), _PAGE):
            some = gone[start : start + _PAGE]
            await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()

    def _plan_leftovers(self, first: int) -> list[str]:
        plans = {digest_of(key) for key in self._inventory.list_local("plans/")}
        return [
            key
            for prefix in _PLAN_LOCAL_PREFIXES
            for key, held in self._inventory.list_local(prefix).items()
            if held.made < first and key.split("/")[1] not in plans
        ]


def is_collector_leader(mesh: ClusterView) -> bool:
    """Returns True if this node decides what to remove: the first of those that store and are complete."""
    if mesh.single_node:
        return True
    complete = [
        node.node_id for node in mesh.current_map().nodes if node.stores and node.state in COMPLETE_STATES
    ]
    return bool(complete) and min(complete) == mesh.node_id


_RESERVED: Final = f"{RESERVED_BUCKET}\0".encode()


class DamagedDocuments:
    """Removes damaged documents of one node. In its coordinator."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<DamagedDocuments of {self._store!r}>"

    async def remove(self) -> int:
        """Removes the documents in quarantine that can be made again; returns how many."""
        quarantine = self._store.quarantine
        damaged = list(self._damaged_documents()) if quarantine.count() else []
        for start in range(0, len(damaged), _PAGE):
            await self._store.delete_many(RESERVED_BUCKET, damaged[start : start + _PAGE])
        if damaged:
            _log.warning("removed damaged documents; they are rebuilt", extra={"number": len(damaged)})
            metrics.documents_damaged.inc(len(damaged))
            await quarantine.prune()
        return len(damaged)

    def _damaged_documents(self) -> Iterator[str]:
        after = (_RESERVED.rstrip(b"\0"), 0)
        while found := self._store.quarantine.entries(_PAGE, after):
            for name, stamp, _ in found:
                if not name.startswith(_RESERVED):
                    return
                key = name.removeprefix(_RESERVED).decode()
                record = self._store.version_at(name, stamp)
                if key.startswith(REBUILT_PREFIXES) and record is not None and record.broken:
                    yield key
            after = found[-1][:2]
