"""Changes on a replica: what the primary has committed without bytes, entered at exactly its stamp.

Law: the same as in `engine.mutations`, but stamps are the only condition: a null version holds until a
higher stamp, a version with an id and an upload until their tombstone. Invariant: every order and every
repetition ends in the same state, in the index as well as in one rebuilt from the data files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.store.engine.member_header import Member, stamp_text
from meshd.store.engine.mutations import (
    Mutation,
    insert_version,
    newest_stamp_of_name,
    replace_version,
    version_status,
    write_manifest,
)
from meshd.store.engine.upload_mutations import end_upload
from meshd.store.errors import ReplicaLacksError
from meshd.store.index.index import object_key
from meshd.store.records import NULL
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

if TYPE_CHECKING:
    from meshd.store.engine.write_batch import StagedMember, WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.index.versions import VersionStatus
    from meshd.store.records import Record, UploadedPart
    from meshd.store.replica.changes import Change


class ApplyDeleteMarker(Mutation):
    """Enters a delete marker."""

    exclusive = True

    def __init__(self, change: Marked) -> None:
        self.bucket, self.key, self.record = change.bucket, change.key, change.record
        self.entered: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        if version_status(batch, txn, object_key(self.bucket, self.key), self.record) == "new":
            self.entered = self.record

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        batch.observe_stamp(self.record.stamp)
        if self.entered is None:
            return
        record = self.record
        member = Member(
            stamp_text(record.stamp),
            "marker",
            self.bucket,
            self.key,
            modified=record.modified,
            version=record.version,
        )
        staged = batch.append_member(member, record.stamp, (), 0)
        self.entered = msgspec.structs.replace(record, extents=(staged.extent,))

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        name = object_key(self.bucket, self.key)
        if self.entered is not None:
            insert_version(batch, txn, name, self.entered)
        return Applied(newest_stamp_of_name(batch, txn, name), self.entered is not None)


class ApplyTagsAndAcl(Mutation):
    """Enters tags and ACL of a version. Raises ReplicaLacksError if the version is not here."""

    exclusive = True
    needs_free_space = True

    def __init__(self, change: Amended) -> None:
        self.bucket, self.key, self.received = change.bucket, change.key, change.record
        self.existing: Record | None = None
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        name = object_key(self.bucket, self.key)
        found = version_status(batch, txn, name, self.received)
        if found == "new":
            raise ReplicaLacksError(
                "this replica does not have the version whose tags or ACL changed; send the whole version"
            )
        if found == "stale":
            self.existing = batch.index.versions.version_at(txn, name, self.received.stamp)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        existing, received = self.existing, self.received
        batch.observe_stamp(received.amended)
        if existing is None:
            return
        amended = msgspec.structs.replace(
            existing,
            tags=received.tags,
            acl=received.acl,
            manifest=None,
            moves=existing.moves + 1,
            amended=received.amended,
        )
        batch.next_stamp()  # makes `revision` rise
        self.record = write_manifest(batch, self.bucket, self.key, amended)

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        name = object_key(self.bucket, self.key)
        if self.record is not None and self.existing is not None:
            replace_version(batch, txn, name, self.record, self.existing)
        held = batch.index.versions.version_at(txn, name, self.received.stamp)
        amended = held.amended if held is not None and held.version == self.received.version else 0
        return Applied(newest_stamp_of_name(batch, txn, name), self.record is not None, amended)


class ApplyRemoval(Mutation):
    """Removes a version for good, or the null versions below a stamp."""

    exclusive = True

    def __init__(self, change: VersionGone) -> None:
        self.bucket, self.key, self.version = change.bucket, change.key, change.version
        self.stamp = change.stamp
        self.wanted = True

    def check(self, batch: WriteBatch, txn: Any) -> None:
        known = batch.tombstones(txn).stamp_of(txn, object_key(self.bucket, self.key), self.version)
        self.wanted = known < self.stamp if not self.version else not known

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        batch.observe_stamp(self.stamp)
        if self.wanted:
            member = Member(
                stamp_text(self.stamp),
                "deleted",
                self.bucket,
                self.key,
                modified=batch.clock.now_ms(),
                version=self.version,
            )
            batch.append_member(member, self.stamp, (), 0)

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        name = object_key(self.bucket, self.key)
        if self.wanted:
            existing = batch.index.versions.find_version(txn, name, self.version or NULL)
            if existing is not None and (existing.version or existing.stamp < self.stamp):
                batch.release_extents(existing.used_extents)
                batch.index.versions.remove_version(txn, name, existing)
            batch.tombstones(txn).add(txn, name, self.stamp, self.version)
        return Applied(newest_stamp_of_name(batch, txn, name), self.wanted)


class ApplyUpload(Mutation):
    """Enters a multipart upload. Does nothing if it is known or has ended."""

    exclusive = True
    needs_free_space = True

    def __init__(self, change: UploadBegun) -> None:
        self.upload = change.upload
        self.wanted = True
        self.staged: StagedMember | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        upload = self.upload
        known = batch.index.uploads.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
        name = object_key(upload.bucket, upload.key)
        self.wanted = known is None and not batch.tombstones(txn).stamp_of(txn, name, upload.upload_id)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        upload = self.upload
        batch.observe_stamp(upload.stamp)
        if self.wanted:
            body = msgspec.json.encode(upload)
            member = Member(
                stamp_text(upload.stamp),
                "upload",
                upload.bucket,
                upload.key,
                checksums.crc32c(body),
                upload=upload.upload_id,
            )
            self.staged = batch.append_member(member, upload.stamp, (body,), len(body))

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        if self.staged is not None:
            batch.retain_extents((self.staged.extent,))
            batch.index.uploads.put_upload(
                txn, msgspec.structs.replace(self.upload, place=self.staged.extent)
            )
        return Applied(0, self.wanted)


class ApplyAbort(Mutation):
    """Ends an upload that was aborted."""

    exclusive = True

    def __init__(self, change: UploadEnded) -> None:
        self.change = change
        self.wanted = True

    def check(self, batch: WriteBatch, txn: Any) -> None:
        change = self.change
        name = object_key(change.bucket, change.key)
        self.wanted = not batch.tombstones(txn).stamp_of(txn, name, change.upload_id)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        change = self.change
        batch.observe_stamp(change.stamp)
        if self.wanted:
            _append_abort(batch, change.bucket, change.key, change.upload_id, change.stamp)

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        change = self.change
        if self.wanted:
            _record_end(batch, txn, change.bucket, change.key, change.upload_id, change.stamp)
        return Applied(0, self.wanted)


def _append_abort(batch: WriteBatch, bucket: str, key: str, upload_id: str, stamp: int) -> None:
    batch.append_member(Member(stamp_text(stamp), "aborted", bucket, key, upload=upload_id), stamp, (), 0)


def _record_end(batch: WriteBatch, txn: Any, bucket: str, key: str, upload_id: str, stamp: int) -> None:
    """Removes an upload from the index, if it is there, and records that it ended."""
    upload = batch.index.uploads.get_upload(txn, bucket, key, upload_id)
    if upload is not None:
        end_upload(batch, txn, upload, stamp)
    else:
        batch.tombstones(txn).add(txn, object_key(bucket, key), stamp, upload_id)


class ApplyCompletion(Mutation):
    """Enters the object that an upload became. Raises ReplicaLacksError if parts are not here."""

    exclusive = True
    needs_free_space = True

    def __init__(self, change: UploadCompleted) -> None:
        self.change = change
        self.status: VersionStatus = "new"
        self.ended = False
        self.parts: list[UploadedPart] = []
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        change = self.change
        name = object_key(change.bucket, change.key)
        self.ended = batch.tombstones(txn).stamp_of(txn, name, change.upload_id) > 0
        self.status = version_status(batch, txn, name, change.record)
        if self.status != "new":
            return
        for chosen in change.parts:
            part = batch.index.uploads.get_part(txn, change.upload_id, chosen.number)
            if part is None or (part.stamp, part.etag) != (chosen.stamp, chosen.etag):
                raise ReplicaLacksError(
                    "this replica lacks parts of the completed upload; send the whole object"
                )
            self.parts.append(part)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        change = self.change
        batch.observe_stamp(change.record.stamp)
        if self.status == "new":
            extents = tuple(extent for part in self.parts for extent in part.extents)
            record = msgspec.structs.replace(change.record, extents=extents)
            self.record = write_manifest(batch, change.bucket, change.key, record, change.upload_id)
        elif not self.ended:
            _append_abort(batch, change.bucket, change.key, change.upload_id, change.record.stamp)

    def update_index(self, batch: WriteBatch, txn: Any) -> Applied:
        change = self.change
        name = object_key(change.bucket, change.key)
        if self.record is not None:
            insert_version(batch, txn, name, self.record)
        if self.record is not None or not self.ended:
            _record_end(batch, txn, change.bucket, change.key, change.upload_id, change.record.stamp)
        return Applied(newest_stamp_of_name(batch, txn, name), self.record is not None)


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
        known = existing.amended >= record.amended
        return Applied(newest.stamp, False, existing.amended) if known else None
