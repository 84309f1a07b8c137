"""The disk store: one object per process over a data directory that several processes share.

Law: this module is a facade; the reader, the writer, the committer and the index have modules of their
own. Invariant: a read never waits for a write, and an acknowledged write is durable
(StoreSettings.durability).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.health_monitor import DiskHealthMonitor
from meshd.store.disks.startup_recovery import open_disks, recover, require_every_disk, sweep_drafts
from meshd.store.engine.checkpointer import Checkpointer
from meshd.store.engine.compaction import Compactor
from meshd.store.engine.group_commit import Committer
from meshd.store.engine.mutations import (
    LinkObject,
    PutDeleteMarker,
    RemoveVersion,
    UpdateTagsAndAcl,
    check_write_conditions,
)
from meshd.store.engine.put_many import PutMany
from meshd.store.engine.reader import ExtentReader, read_segment_extents
from meshd.store.engine.relocation import Relocator
from meshd.store.engine.upload_mutations import AbortUpload, CompleteUpload, CreateUpload
from meshd.store.engine.writer import DiskObjectWriter, WriterResources
from meshd.store.errors import StaleEpochError
from meshd.store.index.index import Index, object_key
from meshd.store.index.tombstones import Tombstones, ended_uploads, removals_since
from meshd.store.integrity.quarantine import Quarantine, require_not_quarantined
from meshd.store.integrity.scrub import Scrub
from meshd.store.records import INTERNAL_WRITE, NULL, Removed, Upload, WriteContext
from meshd.store.replica.inventory import RaiseWriteFence, ReplicaInventory
from meshd.store.replica.replica_mutations import ack_if_known, mutation_for
from meshd.store.replica.replica_writer import DiskReplicaWriter
from meshd.util.thread_pools import started_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.config import StoreSettings
    from meshd.store.api import CacheLookup
    from meshd.store.disks.startup_recovery import MissingDiskPolicy
    from meshd.store.records import (
        EntryPage,
        Location,
        Meta,
        NewObject,
        Page,
        PartPage,
        Record,
        Span,
        StoreChanges,
        StoreStats,
        UploadPage,
        VersionPage,
    )
    from meshd.store.replica.changes import Applied, Change
    from meshd.util.clock import Clock
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_IO_THREADS = 8


class Store:
    """Stores objects on disk; see ObjectStore. Open it after forking. Close it before the process ends; a
    crash does no harm."""

    def __init__(
        self, settings: StoreSettings, index: Index, locks: DataDirLock, *, writer: str, clock: Clock
    ) -> None:
        self._settings, self._index, self._locks, self._writer = settings, index, locks, writer
        self._disks = open_disks(index, settings)
        sweep_drafts(self._disks, writer)
        self._pool = started_pool(_IO_THREADS, "meshd-store")
        self._committer = Committer(index, self._disks, clock, settings, writer)
        self._writers = WriterResources(settings, self._disks, self._committer, self._pool, clock, writer)
        self.checkpointer = Checkpointer(index, self._disks, clock, settings)
        self.compactor = Compactor(index, self._disks, self._committer, clock, self._run, settings)
        self.relocator = Relocator(index, self._disks, self._committer, self._run, self.compactor)
        self.quarantine = Quarantine(index, self._disks, self._committer, clock, self._run)
        self.scrub = Scrub(index, self._disks, self._committer, self.quarantine.attributor, clock, self._run)
        self.inventory = ReplicaInventory(index, self._committer)
        self.disk_health = DiskHealthMonitor(
            index, self._disks, self._committer, clock, self._run, settings.disks
        )
        self._reader = ExtentReader(self._disks, small=settings.small_object_bytes)
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
        self.checkpointer.close()
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
        if record is None and self._cache_lookup is not None:
            return self._cache_lookup.get(bucket, key)
        return record

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

    async def put_many(
        self,
        bucket: str,
        objects: Sequence[NewObject],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Sequence[Record]:
        records: Sequence[Record] = await self._submit(PutMany(bucket, objects, versioning), context)
        return records

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
        copied = await self._run(lambda: read_segment_extents(self._disks, self._index, source))
        record: Record = await self._submit(
            LinkObject(bucket, key, source, copied, meta, conditions, versioning), context
        )
        return record

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
            return self._index.uploads.get_upload(txn, bucket, key, upload_id)

    def part_writer(self, upload: Upload, number: int, size: int | None) -> DiskObjectWriter:
        return DiskObjectWriter(self._writers, upload.bucket, upload.key, size, upload, number)

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        with self._index.read_transaction() as txn:
            return self._index.uploads.list_parts(txn, upload.upload_id, after, limit)

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
        page = bucket, prefix, delimiter, key_marker, id_marker, limit, slots
        with self._index.read_transaction() as txn:
            return self._index.uploads.list_uploads(txn, *page)

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
        known = ack_if_known(self._index, change)
        if known is not None:
            return known
        applied: Applied = await self._submit(mutation_for(change), context)
        return applied

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        return

    async def wait_upload_end_replicated(self, bucket: str, key: str, upload_id: str) -> None:
        return

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        check_write_conditions(conditions, self.get(bucket, key))

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        with self._index.read_transaction() as txn:
            return Tombstones(self._index, txn).stamp_of(txn, object_key(bucket, key), what)

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        with self._index.read_transaction() as txn:
            return removals_since(self._index, txn, object_key(bucket, key), after)

    def ended_uploads(self, bucket: str, key: str) -> Sequence[tuple[str, int]]:
        with self._index.read_transaction() as txn:
            return ended_uploads(self._index, txn, object_key(bucket, key))

    # the store itself -------------------------------------------------------------------------------------

    def revision(self) -> int:
        return self._index.revision()

    def changes_since(self, revision: int, bucket: str) -> StoreChanges | None:
        return self._index.changes_since(revision, bucket)

    def stats(self) -> StoreStats:
        return self._index.stats(self._disks.usage())

    def close_deleted_files(self) -> None:
        """Closes removed files that the read cache holds open. Call it periodically."""
        self._reader.forget_deleted()

    async def raise_fence(self, epoch: int) -> None:
        if epoch > int(self._index.get_meta("epoch") or 0):
            # A StaleEpochError means that another process has raised the fence even higher.
            with suppress(StaleEpochError):
                await self._submit(RaiseWriteFence(), WriteContext(epoch=epoch))

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _submit(self, mutation: Any, context: WriteContext = INTERNAL_WRITE) -> asyncio.Future[Any]:
        return asyncio.shield(self._committer.submit(mutation, context))
