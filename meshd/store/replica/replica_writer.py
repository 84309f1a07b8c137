"""Replica writer: stores the bytes of a version or part that the primary has committed, at its stamp.

Law: the same as for the object writer. Applying a known version or part again changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.engine.writer import DiskObjectWriter
from meshd.store.errors import SizeMismatchError
from meshd.store.index.index import object_key
from meshd.store.index.tombstones import Tombstones
from meshd.store.replica.changes import (
    Amended,
    Applied,
    Marked,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.replica.replica_mutations import (
    ApplyAbort,
    ApplyCompletion,
    ApplyDeleteMarker,
    ApplyPart,
    ApplyRemoval,
    ApplyTagsAndAcl,
    ApplyUpload,
    ApplyVersion,
)
from meshd.store.write_context import INTERNAL_WRITE

if TYPE_CHECKING:
    from meshd.store.engine.mutations import Mutation
    from meshd.store.engine.write_batch import Payload
    from meshd.store.engine.writer import WriterResources
    from meshd.store.index.index import Index
    from meshd.store.index.versions import VersionStatus
    from meshd.store.records import Record
    from meshd.store.replica.changes import Change, PartOf
    from meshd.store.write_context import WriteContext


class DiskReplicaWriter(DiskObjectWriter):
    """Writes a version or part at its given stamp. See ReplicaWriter."""

    def __init__(
        self, resources: WriterResources, index: Index, bucket: str, key: str, size: int | None
    ) -> None:
        super().__init__(resources, bucket, key, size)
        self._index = index

    async def make_durable(self) -> None:
        self._require_open()
        await self._get_payload()

    async def _get_payload(self) -> Payload:
        try:
            return await super()._get_payload()
        except BaseException:
            await self.abort()
            raise

    async def commit_at_stamp(
        self, record: Record, part: PartOf | None = None, *, context: WriteContext = INTERNAL_WRITE
    ) -> Applied:
        self._require_open()
        if self._total != record.size or (part is not None and self._total != part.part.size):
            raise SizeMismatchError(f"{self._total} bytes of {record.size} were written")
        if part is not None:
            return await self._commit_part(part, context)
        record = without_local_fields(record)
        found, tombstone, newest, repair = self._local_state(record)
        if found not in ("new", "stale") and not repair:
            await self.abort()
            return Applied(max(newest, tombstone), False)
        if found == "new" or repair:
            applied: Applied
            applied, found = await self._submit(
                ApplyVersion(self._bucket, self._key, record, await self._get_payload(), repair=repair),
                context,
            )
            if found != "stale":
                return applied
        else:
            await self.abort()
        change = Amended(self._bucket, self._key, record)
        amended: Applied = await asyncio.shield(
            self._resources.committer.submit(ApplyTagsAndAcl(change), context)
        )
        return amended

    async def _commit_part(self, part: PartOf, context: WriteContext) -> Applied:
        begun = UploadBegun(upload_without_local_fields(part.upload))
        with self._index.read_transaction() as txn:
            known = self._index.get_upload(txn, self._bucket, self._key, part.upload.upload_id)
        if known is None:
            await asyncio.shield(self._resources.committer.submit(ApplyUpload(begun), context))
        applied: Applied = await self._submit(ApplyPart(part, await self._get_payload()), context)
        return applied

    async def _submit(self, mutation: Mutation, context: WriteContext) -> Any:
        """Submits a mutation like `DiskObjectWriter.commit`; removes a file that it did not use."""
        try:
            future = self._resources.committer.submit(mutation, context)
        except BaseException:
            await self.abort()
            raise
        self._finish("committing")
        future.add_done_callback(self._on_submitted)
        return await asyncio.shield(future)

    def _on_submitted(self, future: asyncio.Future[Any]) -> None:
        self._on_committed(future)
        if self._large_file is not None:
            self._large_file.discard_draft()

    def _local_state(self, record: Record) -> tuple[VersionStatus, int, int, bool]:
        """Returns the version's status, the stamp of the null version's tombstone, the newest stamp, and
        whether the version is in quarantine here."""
        name = object_key(self._bucket, self._key)
        with self._index.read_transaction() as txn:
            tombstones = Tombstones(self._index, txn)
            tombstone = tombstones.stamp_of(txn, name, record.version)
            newest = self._index.versions.newest_version(txn, name)
            null_tombstone = tombstones.stamp_of(txn, name) if record.version else tombstone
            return (
                self._index.versions.status_of(txn, name, record, tombstone),
                null_tombstone,
                newest.stamp if newest is not None else 0,
                self._is_quarantined(txn, name, record),
            )

    def _is_quarantined(self, txn: Any, name: bytes, record: Record) -> bool:
        existing = self._index.versions.version_at(txn, name, record.stamp)
        return existing is not None and existing.broken and existing.version == record.version


def mutation_for(change: Change) -> Mutation:
    """Returns the mutation that applies a change."""
    if isinstance(change, Marked):
        return ApplyDeleteMarker(msgspec.structs.replace(change, record=without_local_fields(change.record)))
    if isinstance(change, Amended):
        return ApplyTagsAndAcl(change)
    if isinstance(change, VersionGone):
        return ApplyRemoval(change)
    if isinstance(change, UploadBegun):
        return ApplyUpload(UploadBegun(upload_without_local_fields(change.upload)))
    if isinstance(change, UploadEnded):
        return ApplyAbort(change)
    assert isinstance(change, UploadCompleted)
    return ApplyCompletion(msgspec.structs.replace(change, record=without_local_fields(change.record)))


def ack_if_known(index: Index, change: Change) -> Applied | None:
    """Returns the result of a change that is already known; None for any other change."""
    if not isinstance(change, Amended | Marked):
        return None
    name, record = object_key(change.bucket, change.key), change.record
    with index.read_transaction() as txn:
        existing = index.versions.version_at(txn, name, record.stamp)
        newest = index.versions.newest_version(txn, name)
        if existing is None or newest is None or existing.version != record.version:
            return None
        return Applied(newest.stamp, False) if existing.amended >= record.amended else None
