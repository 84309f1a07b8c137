"""The disk store: one object per process over a data directory that several processes share.

Law: this module is a facade; the reader, the writer, the committer and the index have modules of their
own.
Invariant: a read never waits for a write, and an acknowledged write is durable
(StoreSettings.durability).
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.health_monitor import DiskHealthMonitor
from meshd.store.disks.startup_recovery import open_disks, recover, require_every_disk, sweep_drafts
from meshd.store.engine.compaction import Compactor
from meshd.store.engine.group_commit import Committer
from meshd.store.engine.member_header import is_version_id
from meshd.store.engine.mutations import (
    LinkObject,
    PruneTombstones,
    PutDeleteMarker,
    RemoveVersion,
    UpdateTagsAndAcl,
    check_write_conditions,
)
from meshd.store.engine.reader import ExtentReader
from meshd.store.engine.upload_mutations import AbortUpload, CompleteUpload, CreateUpload
from meshd.store.engine.writer import DiskObjectWriter, WriterResources
from meshd.store.errors import StaleEpochError
from meshd.store.index.index import Index, list_uploads, object_key
from meshd.store.index.tombstones import (
    Tombstones,
    prunable_before,
    tombstones_complete_since,
    tombstones_of_name,
)
from meshd.store.integrity.quarantine import (
    DamageAttributor,
    PruneQuarantine,
    all_quarantined,
    require_not_quarantined,
    stale_entries,
)
from meshd.store.integrity.scrub import Scrub
from meshd.store.integrity.verification import drain_damage_reports
from meshd.store.records import NULL, DiskStats, PartPage, Removed, StoreStats, Upload
from meshd.store.replica.changes import Amended, Applied, Marked
from meshd.store.replica.inventory import DropUnowned, RaiseWriteFence, RecordSyncedStamp, read_inventory
from meshd.store.replica.replica_writer import DiskReplicaWriter, mutation_for
from meshd.store.write_context import INTERNAL_WRITE, WriteContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.config import StoreSettings
    from meshd.store.disks.startup_recovery import MissingDiskPolicy
    from meshd.store.integrity.quarantine import Quarantined
    from meshd.store.records import (
        EntryPage,
        Extent,
        Location,
        Meta,
        Page,
        Record,
        Span,
        UploadedPart,
        UploadPage,
        VersionPage,
    )
    from meshd.store.replica.changes import Change
    from meshd.store.replica.inventory import HeldName, InventoryPage
    from meshd.util.clock import Clock
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_IO_THREADS = 8
_MAX_TOMBSTONES = 10_000  # read for one name
_TOMBSTONES_PAUSE = 0.05


class CacheLookup(Protocol):
    """Looks up objects of buckets that are backed by an origin, in the cache."""

    def get(self, bucket: str, key: str) -> Record | None:
        """Returns the record of a cached object, whose extents are in the cache's files. Raises
        NotCachedError for a bucket with an origin."""
        ...

    def require_listable(self, bucket: str) -> None:
        """Raises NotCachedError for a bucket with an origin, because no store can list it."""
        ...


class Store:
    """Stores objects on disk; see ObjectStore. Open it after forking. Close it before the process ends; a
    crash does no harm."""

    def __init__(
        self, settings: StoreSettings, index: Index, locks: DataDirLock, *, writer: str, clock: Clock
    ) -> None:
        self._settings, self._index, self._locks, self._writer = settings, index, locks, writer
        self._disks = open_disks(index, settings)
        sweep_drafts(self._disks, writer)
        self._pool = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="meshd-store")
        self._committer = Committer(index, self._disks, clock, settings, writer)
        self._writers = WriterResources(settings, self._disks, self._committer, self._pool, clock, writer)
        self._compactor = Compactor(
            index, self._disks, self._committer, clock, self._run, settings.tombstone_seconds
        )
        damage_attributor = DamageAttributor(index, self._disks, self._committer, clock, self._run)
        self._damage_attributor = damage_attributor
        self.scrub = Scrub(index, self._disks, self._committer, damage_attributor, clock, self._run)
        """Used by one process of the node, the coordinator."""
        self.disk_health = DiskHealthMonitor(
            index, self._disks, self._committer, clock, self._run, settings.disks
        )
        self._reader = ExtentReader(self._disks, small=settings.small_object_bytes)
        self._clock = clock
        self._cache_lookup: CacheLookup | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Store {self._settings.data_dir} writer={self._writer} {self._committer!r}>"

    @classmethod
    def open(cls, settings: StoreSettings, *, writer: str, clock: Clock) -> Store:
        """Opens the store as `writer` (unique per running process: w0, w1, s).

        Raises StoreInUseError, FormatError.
        """
        locks = DataDirLock.acquire_shared(settings.data_dir, writer)
        try:
            index = Index.open(settings)
        except BaseException:
            locks.release()
            raise
        try:
            return cls(settings, index, locks, writer=writer, clock=clock)
        except BaseException:
            index.close()
            locks.release()
            raise

    @staticmethod
    def recover(settings: StoreSettings, missing_policy: MissingDiskPolicy = require_every_disk) -> int:
        """Cleans up after a crash, once, before any process opens the store. See
        `disks.startup_recovery.recover`."""
        return recover(settings, missing_policy)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._committer.close()
        self._pool.shutdown()
        self._reader.close()
        self._index.close()
        self._locks.release()

    def attach_cache(self, cache: Store, lookup: CacheLookup) -> None:
        """Looks up objects that are not stored here in `lookup`, whose records refer to the files of `cache`:
        a store of its own data directory, which the caller closes after this one."""
        self._cache_lookup = lookup
        self._disks.add_readable_disks(cache._disks)

    # objects ----------------------------------------------------------------------------------------------

    def get(self, bucket: str, key: str) -> Record | None:
        record = self._index.get(bucket, key)
        return (
            record
            if record is not None or self._cache_lookup is None
            else self._cache_lookup.get(bucket, key)
        )

    def get_stored(self, bucket: str, key: str) -> Record | None:
        """Returns a record like `get`, but only of objects stored here permanently."""
        return self._index.get(bucket, key)

    def list_stored_entries(
        self, bucket: str, prefix: str, after: str, limit: int, slots: bytes | None = None
    ) -> EntryPage:
        """Lists like `list_entries`, but only objects stored here permanently."""
        return self._index.list_entries(bucket, prefix, "", after, limit, slots)

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        with self._index.read_transaction() as txn:
            return self._index.versions.find_version(txn, object_key(bucket, key), version)

    def version_at(self, name: bytes, stamp: int) -> Record | None:
        """Returns the version of a name (bucket, NUL, key) with this stamp."""
        with self._index.read_transaction() as txn:
            return self._index.versions.version_at(txn, name, stamp)

    def newest_version(self, bucket: str, key: str) -> Record | None:
        with self._index.read_transaction() as txn:
            return self._index.versions.newest_version(txn, object_key(bucket, key))

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> Page:
        if self._cache_lookup is not None:
            self._cache_lookup.require_listable(bucket)
        return self._index.list(bucket, prefix, delimiter, after, limit, slots)

    def list_entries(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> EntryPage:
        if self._cache_lookup is not None:
            self._cache_lookup.require_listable(bucket)
        return self._index.list_entries(bucket, prefix, delimiter, after, limit, slots)

    def list_versions(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        version_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> VersionPage:
        return self._index.list_versions(bucket, prefix, delimiter, key_marker, version_marker, limit, slots)

    def is_empty(self, bucket: str) -> bool:
        return self._index.is_empty(bucket)

    def writer(self, bucket: str, key: str, *, size: int | None) -> DiskObjectWriter:
        return DiskObjectWriter(self._writers, bucket, key, size)

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        removed: Removed
        if versioning == "":
            existing = self._index.get(bucket, key)
            if existing is None:
                check_write_conditions(conditions, None)
                return Removed()
            if not existing.version:
                removed = await self._submit(RemoveVersion(bucket, key, NULL, conditions), context)
                return removed
            versioning = "Suspended"  # the setting changed meanwhile; that must not cost a version
        removed = await self._submit(PutDeleteMarker(bucket, key, conditions, versioning), context)
        return removed

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        unique = tuple(dict.fromkeys(keys))
        removed = await asyncio.gather(
            *[self.delete(bucket, key, versioning=versioning, context=context) for key in unique]
        )
        return dict(zip(unique, removed, strict=True))

    async def delete_version(
        self,
        bucket: str,
        key: str,
        version: str,
        *,
        conditions: Conditions | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        if self.get_version(bucket, key, version) is None:
            check_write_conditions(conditions, None)
            return Removed()
        removed: Removed = await self._submit(RemoveVersion(bucket, key, version, conditions), context)
        return removed

    async def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        record: Record = await self._submit(UpdateTagsAndAcl(bucket, key, version, tags, acl), context)
        return record

    async def link(
        self,
        bucket: str,
        key: str,
        source: Record,
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        """Copies an object by sharing its large object files; copies bytes that are in segments (small
        objects)."""
        require_not_quarantined(source)
        copied = await asyncio.get_running_loop().run_in_executor(self._pool, self._bytes_in_segments, source)
        record: Record = await self._submit(
            LinkObject(bucket, key, source, copied, meta, conditions, versioning), context
        )
        return record

    def _bytes_in_segments(self, source: Record) -> dict[Extent, bytes]:
        # Caches nothing: the shared reader belongs to the event loop's thread.
        reader = ExtentReader(self._disks, small=-1)
        with self._index.read_transaction() as txn:
            files = {extent.file: self._index.get_file(txn, extent.file) for extent in source.extents}
        own = {file for file, info in files.items() if info is not None and info.kind == "own"}
        return {extent: reader.read_extent(extent) for extent in source.extents if extent.file not in own}

    def open_spans(self, record: Record, offset: int, length: int) -> AbstractContextManager[Sequence[Span]]:
        return self._reader.open_spans(record, offset, length)

    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> AbstractContextManager[Sequence[Sequence[Span] | None]]:
        return self._reader.open_spans_many(wanted)

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        return self._reader.read_range(record, offset, length)

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        return self._reader.try_read_range(record, offset, length)

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        return self._reader.try_open_span(record, offset, length)

    def locate(self, record: Record) -> Sequence[Location]:
        return self._reader.locate(record)

    # uploads ----------------------------------------------------------------------------------------------

    async def create_upload(
        self,
        bucket: str,
        key: str,
        *,
        headers: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
        checksum_algorithm: str = "",
        checksum_type: str = "",
        owner: str = "",
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        born: int = 0,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Upload:
        upload = Upload(
            "",
            bucket,
            key,
            headers or {},
            metadata or {},
            checksum_algorithm,
            checksum_type,
            owner,
            tags=tags or {},
            acl=acl,
            born=born,
        )
        created: Upload = await self._submit(CreateUpload(upload), context)
        return created

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        with self._index.read_transaction() as txn:
            return self._index.get_upload(txn, bucket, key, upload_id)

    def part_writer(self, upload: Upload, number: int, size: int | None) -> DiskObjectWriter:
        return DiskObjectWriter(self._writers, upload.bucket, upload.key, size, upload, number)

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        parts: list[UploadedPart] = []
        with self._index.read_transaction() as txn:
            for part in self._index.parts_of(txn, upload.upload_id, after):
                if len(parts) == limit:
                    return PartPage(tuple(parts), limit > 0, parts[-1].number if parts else after)
                parts.append(part)
        return PartPage(tuple(parts))

    def list_uploads(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        id_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> UploadPage:
        return list_uploads(self._index, bucket, prefix, delimiter, key_marker, id_marker, limit, slots)

    async def complete_upload(
        self,
        upload: Upload,
        parts: Sequence[int],
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        etags: Sequence[str] = (),
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        record: Record = await self._submit(
            CompleteUpload(upload, parts, etags, meta, conditions, versioning), context
        )
        return record

    async def abort_upload(self, upload: Upload, *, context: WriteContext = INTERNAL_WRITE) -> int:
        stamp: int = await self._submit(AbortUpload(upload), context)
        return stamp

    # as a replica -----------------------------------------------------------------------------------------

    def replica_writer(self, bucket: str, key: str, *, size: int | None) -> DiskReplicaWriter:
        return DiskReplicaWriter(self._writers, self._index, bucket, key, size)

    async def apply_change(self, change: Change, *, context: WriteContext = INTERNAL_WRITE) -> Applied:
        known = self.ack_if_known(change)
        if known is not None:
            return known
        applied: Applied = await self._submit(mutation_for(change), context)
        return applied

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        return

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        check_write_conditions(conditions, self.get(bucket, key))

    def ack_if_known(self, change: Change) -> Applied | None:
        """Returns the result of a change that is already known; None for any other change."""
        if not isinstance(change, Amended | Marked):
            return None
        name, record = object_key(change.bucket, change.key), change.record
        with self._index.read_transaction() as txn:
            existing = self._index.versions.version_at(txn, name, record.stamp)
            newest = self._index.versions.newest_version(txn, name)
            if existing is None or newest is None or existing.version != record.version:
                return None
            return Applied(newest.stamp, False) if existing.amended >= record.amended else None

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        with self._index.read_transaction() as txn:
            return Tombstones(self._index, txn).stamp_of(txn, object_key(bucket, key), what)

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        with self._index.read_transaction() as txn:
            tombstones = islice(
                tombstones_of_name(self._index, txn, object_key(bucket, key)), _MAX_TOMBSTONES
            )
            return [(what, stamp) for what, stamp in tombstones if stamp > after and is_version_id(what)]

    # the store itself -------------------------------------------------------------------------------------

    def revision(self) -> int:
        return int(self._index.get_meta("last_stamp") or 0)

    def stats(self) -> StoreStats:
        with self._index.read_transaction() as txn:
            count = own = live = dead = 0
            for _, info in self._index.all_files(txn):
                count += 1
                own += info.kind == "own"
                live += info.live
                dead += info.dead
            return StoreStats(
                objects=self._index.objects.count(txn),
                uploads=self._index.uploads.count(txn),
                segments=count - own,
                own_files=own,
                live_bytes=live,
                dead_bytes=dead,
                index_bytes=self._index.size(),
                disks=tuple(_disk_stats(str(root)) for root in self._disks.roots.values()),
                versions=self._index.versions.older.count(txn),
                quarantined=self._index.quarantine.count(txn),
            )

    def close_deleted_files(self) -> None:
        """Closes removed files that the read cache holds open. Call it periodically."""
        self._reader.forget_deleted()

    def compaction_candidates(self, dead_share: float = 0.5) -> Sequence[int]:
        """Returns data files worth compacting, of which at least this share is dead, those with the most dead
        bytes first."""
        return self._compactor.candidates(dead_share)

    async def compact(self, file: int) -> bool:
        """Moves the live members out of a data file and retires it; call `purge_retired_files` later. Only
        the coordinator uses it.

        Returns True if the file is retired or already gone. Raises CorruptExtentError, DiskFullError,
        DiskFailedError; the file then stays.
        """
        return await self._compactor.compact(file)

    def inventory(
        self,
        accepts: Callable[[bytes], bool],
        after: bytes = b"",
        *,
        limit: int = 1000,
        max_visited: int = 1000,
    ) -> InventoryPage:
        """Returns the next names (bucket, NUL, key) after `after` that `accepts` admits, with everything held
        of them.

        At most `limit` of them, out of at most `max_visited` visited; takes a few microseconds per name.
        """
        return read_inventory(self._index, accepts, after, limit, max_visited)

    async def drop_unowned(self, names: Sequence[HeldName]) -> int:
        """Drops these versions and uploads locally, because other nodes hold them or no node needs
        them; returns how many were there. See `replica.inventory`."""
        dropped: int = await self._submit(DropUnowned(names))
        return dropped

    def synced_stamp(self) -> int:
        """Returns the stamp up to which this store has received every change that concerns it; 0 if
        unknown."""
        return int(self._index.get_meta("standing") or 0)

    async def record_synced_stamp(self, stamp: int) -> None:
        """Records that this store has received every change up to `stamp`."""
        await self._submit(RecordSyncedStamp(stamp))

    async def raise_fence(self, epoch: int) -> None:
        """Ensures that no process of this node commits a write under a cluster map older than `epoch`. When
        this returns, a write under an older map is either committed or will fail. See
        `write_context`.
        """
        if epoch > int(self._index.get_meta("epoch") or 0):
            # A StaleEpochError means that another process has raised the fence even higher.
            with suppress(StaleEpochError):
                await self._submit(RaiseWriteFence(), WriteContext(epoch=epoch))

    def tombstones_complete_since(self) -> int:
        """Returns the stamp above which every removal is still recorded (see `index.tombstones`); 0 for a new
        store."""
        with self._index.read_transaction() as txn:
            return tombstones_complete_since(self._index, txn)

    async def prune_tombstones(self) -> None:
        """Drops tombstones that every node has had time to receive. Only the coordinator uses it."""
        with self._index.read_transaction() as txn:
            now = self._clock.now_ms() * 1_000_000
            before = prunable_before(self._index, txn, now, self._settings.tombstone_seconds)
        start = await self._submit(PruneTombstones(before, b""))
        while start:
            await asyncio.sleep(_TOMBSTONES_PAUSE)
            start = await self._submit(PruneTombstones(before, start))

    async def process_damage_reports(self) -> int:
        """Checks what readers of this process found damaged and quarantines it; returns how many versions and
        parts were quarantined."""
        noticed = drain_damage_reports(
            lambda extent: extent.disk in self._disks.roots or extent.disk in self._disks.lost
        )
        return await self._damage_attributor.attribute_damage(noticed) if noticed else 0

    def quarantined(
        self, limit: int = 1000, after: tuple[bytes, int] | None = None
    ) -> Sequence[tuple[bytes, int, Quarantined]]:
        """Returns (name, stamp, damage) of quarantined versions after `after`, in order."""
        with self._index.read_transaction() as txn:
            return tuple(islice(all_quarantined(self._index, txn, after), limit))

    def quarantined_count(self) -> int:
        """Returns the number of quarantined versions."""
        with self._index.read_transaction() as txn:
            return self._index.quarantine.count(txn)

    async def prune_quarantine(self) -> int:
        """Drops quarantine entries of versions that were removed or overwritten; returns how many."""
        swept: int = (
            await self._submit(PruneQuarantine()) if await self._run(self._has_stale_quarantine) else 0
        )
        return swept

    def _has_stale_quarantine(self) -> bool:
        with self._index.read_transaction() as txn:
            return any(True for _ in stale_entries(self._index, txn))

    async def quarantined_bytes(self) -> int:
        """Returns the number of damaged bytes in quarantine. Scans all of it, like `prune_quarantine`."""
        size: int = await self._run(self._damaged_bytes)
        return size

    def _damaged_bytes(self) -> int:
        with self._index.read_transaction() as txn:
            found = all_quarantined(self._index, txn)
            return sum(extent.length for *_, about in found for extent in about.extents)

    async def purge_retired_files(self) -> int:
        """Removes files that were retired a grace period ago; returns how many."""
        return await self._compactor.purge()

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _submit(self, mutation: Any, context: WriteContext = INTERNAL_WRITE) -> asyncio.Future[Any]:
        return asyncio.shield(self._committer.submit(mutation, context))


def _disk_stats(path: str) -> DiskStats:
    stats = os.statvfs(path)
    return DiskStats(path, stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)
