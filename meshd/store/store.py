"""The disk store: one object per process over a data directory that several processes share.

Law: this module is a facade that submits writes; the reading half (`store_reader`), the writer, the committer
and the index have modules of their own. Invariant: a read never waits for a write, and an acknowledged write
is durable (StoreSettings.durability).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from awscrt import checksums

from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.health_monitor import DiskHealthMonitor
from meshd.store.disks.startup_recovery import open_disks, recover, require_every_disk, sweep_drafts
from meshd.store.engine.checkpointer import Checkpointer
from meshd.store.engine.compaction import Compactor
from meshd.store.engine.group_commit import Committer
from meshd.store.engine.key_order_rewrite import KeyOrderRewriter
from meshd.store.engine.mutations import (
    LinkObject,
    PutDeleteMarker,
    PutObject,
    RemoveVersion,
    UpdateTagsAndAcl,
    check_write_conditions,
)
from meshd.store.engine.put_many import PutMany
from meshd.store.engine.reader import read_segment_extents
from meshd.store.engine.upload_mutations import AbortUpload, CompleteUpload, CreateUpload
from meshd.store.engine.write_batch import Payload
from meshd.store.engine.writer import DiskObjectWriter, WriterResources
from meshd.store.errors import StaleEpochError
from meshd.store.index.index import Index
from meshd.store.integrity.quarantine import Quarantine, require_not_quarantined
from meshd.store.integrity.scrub import Scrub
from meshd.store.records import INTERNAL_WRITE, NULL, Removed, WriteContext
from meshd.store.replica.inventory import RaiseWriteFence, ReplicaInventory
from meshd.store.replica.replica_mutations import ack_if_known, mutation_for
from meshd.store.replica.replica_writer import DiskReplicaWriter
from meshd.store.store_reader import DiskStoreReader
from meshd.util.thread_pools import started_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshd.config import StoreSettings
    from meshd.store.disks.startup_recovery import MissingDiskPolicy
    from meshd.store.records import Meta, NewObject, Record, Upload
    from meshd.store.replica.changes import Applied, Change
    from meshd.util.clock import Clock
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_IO_THREADS = 8


class Store(DiskStoreReader):
    """Stores objects on disk; see ObjectStore. Open it after forking. Close it before the process ends; a
    crash does no harm."""

    def __init__(
        self, settings: StoreSettings, index: Index, locks: DataDirLock, *, writer: str, clock: Clock
    ) -> None:
        super().__init__(index, open_disks(index, settings), settings.small_object_bytes)
        self._settings, self._locks, self._writer = settings, locks, writer
        sweep_drafts(self._disks, writer)
        self._pool = started_pool(_IO_THREADS, "meshd-store")
        self._committer = Committer(index, self._disks, clock, settings, writer)
        self._writers = WriterResources(settings, self._disks, self._committer, self._pool, clock, writer)
        self.checkpointer = Checkpointer(index, self._disks, clock, settings)
        self.compactor = Compactor(index, self._disks, self._committer, clock, self._run, settings)
        self.rewriter = KeyOrderRewriter(index, self._disks, self._committer, self._run, self.compactor)
        self.quarantine = Quarantine(index, self._disks, self._committer, clock, self._run)
        self.scrub = Scrub(index, self._disks, self._committer, self.quarantine.attributor, clock, self._run)
        self.inventory = ReplicaInventory(index, self._committer)
        self.disk_health = DiskHealthMonitor(
            index, self._disks, self._committer, clock, self._run, settings.disks
        )
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

    # objects ----------------------------------------------------------------------------------------------

    def writer(self, bucket: str, key: str, *, size: int | None) -> DiskObjectWriter:
        return DiskObjectWriter(self._writers, bucket, key, size)

    @property
    def small_object_bytes(self) -> int:
        """Up to this size, `commit_small` takes an object."""
        return self._settings.small_object_bytes

    def commit_small(
        self,
        bucket: str,
        key: str,
        data: bytes,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> asyncio.Future[Record]:
        """Begins to store a small object of which all bytes are here, without a writer. The future is that of
        `ObjectWriter.commit`; cancelling it does not cancel the write. Raises StoreClosedError."""
        payload = Payload(len(data), checksums.crc32c(data), (data,))
        return self._committer.submit(PutObject(bucket, key, meta, payload, conditions, versioning), context)

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
        stamp: int | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        if self.get_version(bucket, key, version) is None:
            check_write_conditions(conditions, None)
            return Removed()
        removed: Removed = await self._submit(RemoveVersion(bucket, key, version, conditions, stamp), context)
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

    # uploads ----------------------------------------------------------------------------------------------

    async def create_upload(self, draft: Upload, *, context: WriteContext = INTERNAL_WRITE) -> Upload:
        created: Upload = await self._submit(CreateUpload(draft), context)
        return created

    def part_writer(self, upload: Upload, number: int, size: int | None) -> DiskObjectWriter:
        return DiskObjectWriter(self._writers, upload.bucket, upload.key, size, upload, number)

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

    # the store itself -------------------------------------------------------------------------------------

    async def raise_fence(self, epoch: int) -> None:
        if epoch > int(self._index.get_meta("epoch") or 0):
            # A StaleEpochError means that another process has raised the fence even higher.
            with suppress(StaleEpochError):
                await self._submit(RaiseWriteFence(), WriteContext(epoch=epoch))

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _submit(self, mutation: Any, context: WriteContext = INTERNAL_WRITE) -> asyncio.Future[Any]:
        return asyncio.shield(self._committer.submit(mutation, context))
