"""Replica writer: stores the bytes of a version or part that the primary has committed, at its stamp.

Law: the same as for the object writer and for mutations; `replica_mutations` has the changes without bytes.
Applying a known version or part again changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.engine.member_header import Member, object_member, stamp_text
from meshd.store.engine.mutations import (
    Mutation,
    insert_version,
    newest_stamp_of_name,
    replace_version,
    version_status,
    write_manifest,
)
from meshd.store.engine.writer import DiskObjectWriter
from meshd.store.errors import NoSuchUploadError, SizeMismatchError
from meshd.store.index.index import object_key
from meshd.store.index.tombstones import Tombstones
from meshd.store.integrity.quarantine import release_from_quarantine
from meshd.store.records import INTERNAL_WRITE
from meshd.store.replica.changes import (
    Amended,
    Applied,
    UploadBegun,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.replica.replica_mutations import ApplyTagsAndAcl, ApplyUpload
from meshd.util import failpoints

if TYPE_CHECKING:
    from meshd.store.engine.write_batch import Payload, StagedMember, WriteBatch
    from meshd.store.engine.writer import WriterResources
    from meshd.store.index.index import Index
    from meshd.store.index.versions import VersionStatus
    from meshd.store.records import Record, WriteContext
    from meshd.store.replica.changes import PartOf


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
            known = self._index.uploads.get_upload(txn, self._bucket, self._key, part.upload.upload_id)
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


def repaired_record(existing: Record, received: Record) -> Record:
    """Returns the record that replaces a quarantined version, with the newer tags and ACL. One more move
    makes an index rebuild prefer it to the damaged copy."""
    newer = existing if existing.amended > received.amended else received
    return msgspec.structs.replace(
        received, tags=newer.tags, acl=newer.acl, amended=newer.amended, moves=existing.moves + 1
    )


class ApplyVersion(Mutation):
    """Enters a version with its bytes; returns an Applied and the VersionStatus found. With `repair` it may
    replace the same version in quarantine."""

    needs_free_space = True

    def __init__(
        self, bucket: str, key: str, record: Record, payload: Payload, *, repair: bool = False
    ) -> None:
        self.bucket, self.key, self.record, self.payload = bucket, key, record, payload
        self.data_bytes = 0 if payload.large_file else payload.size
        # An index rebuild would accept an unused manifest, or the unused bytes of a repaired version.
        self.exclusive = bool(record.parts) or repair
        self.staged: StagedMember | None = None
        self.entered: Record | None = None
        self.broken: Record | None = None
        self.wanted, self.repair = True, repair

    def check(self, batch: WriteBatch, txn: Any) -> None:
        name = object_key(self.bucket, self.key)
        self.wanted = version_status(batch, txn, name, self.record) == "new"
        existing = batch.index.versions.version_at(txn, name, self.record.stamp) if self.repair else None
        if existing is not None and existing.broken and existing.version == self.record.version:
            self.broken, self.wanted = existing, True
            self.record = repaired_record(existing, self.record)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        record, payload = self.record, self.payload
        batch.observe_stamp(record.stamp)
        if not self.wanted:
            return
        if record.parts:
            stamp = batch.next_stamp()
            member = Member(stamp_text(stamp), "part", self.bucket, self.key, payload.crc)
            self.staged = payload.stage_member(batch, member, stamp)
            entered = msgspec.structs.replace(record, extents=(self.staged.extent,))
            self.entered = write_manifest(batch, self.bucket, self.key, entered)
        else:
            member = object_member(self.bucket, self.key, record, payload.crc)
            self.staged = payload.stage_member(batch, member, record.stamp)
            self.entered = msgspec.structs.replace(record, extents=(self.staged.extent,))
        failpoints.hit("store.replica.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> tuple[Applied, VersionStatus]:
        name = object_key(self.bucket, self.key)
        if self.broken is not None and self.entered is not None:
            replace_version(batch, txn, name, self.entered, self.broken)
            release_from_quarantine(batch.index, txn, name, self.entered.stamp)
            return Applied(newest_stamp_of_name(batch, txn, name), True), "new"
        found = version_status(batch, txn, name, self.record)
        if found == "new" and self.entered is not None:
            insert_version(batch, txn, name, self.entered)
            return Applied(newest_stamp_of_name(batch, txn, name), True), found
        if self.staged is not None:
            batch.void_member(self.staged)
        return Applied(newest_stamp_of_name(batch, txn, name), False), found


class ApplyPart(Mutation):
    """Enters a part of an upload at its stamp. Raises NoSuchUploadError."""

    needs_free_space = True

    def __init__(self, about: PartOf, payload: Payload) -> None:
        self.upload, self.part, self.payload = about.upload, about.part, payload
        self.data_bytes = 0 if payload.large_file else payload.size
        self.staged: StagedMember | None = None

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        part, upload = self.part, self.upload
        batch.observe_stamp(part.stamp)
        member = Member(
            stamp_text(part.stamp),
            "part",
            upload.bucket,
            upload.key,
            self.payload.crc,
            part.etag,
            part.modified,
            checksums=part.checksums,
            upload=upload.upload_id,
            part=part.number,
        )
        self.staged = self.payload.stage_member(batch, member, part.stamp)

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        staged, upload, part = self.staged, self.upload, self.part
        assert staged is not None
        if batch.index.uploads.get_upload(txn, upload.bucket, upload.key, upload.upload_id) is None:
            batch.discard_member(staged)
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        existing = batch.index.uploads.get_part(txn, upload.upload_id, part.number)
        if existing is not None and existing.stamp >= part.stamp:
            batch.discard_member(staged)
            return Applied(existing.stamp, False)
        if existing is not None:
            batch.release_extents(existing.extents)
        batch.retain_extents((staged.extent,))
        batch.index.uploads.put_part(
            txn, upload.upload_id, msgspec.structs.replace(part, extents=(staged.extent,), moves=0)
        )
        return Applied(part.stamp, True)
