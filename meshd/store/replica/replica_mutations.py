"""Mutations on a replica: changes that the primary has committed, entered at exactly their stamp.

Law: the same as in `engine.mutations`, but stamps are the only condition: a null version holds until a
higher stamp, a version with an id and an upload until their tombstone. Invariant: every order and every
repetition ends in the same state, in the index as well as in one rebuilt from the data files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.store.engine.member_header import Member, stamp_text
from meshd.store.engine.mutations import Mutation, replace_version, used_extents, write_manifest
from meshd.store.engine.upload_mutations import end_upload
from meshd.store.errors import NoSuchUploadError, ReplicaLacksError
from meshd.store.index.index import object_key
from meshd.store.integrity.quarantine import release_from_quarantine
from meshd.store.records import NULL
from meshd.store.replica.changes import Applied
from meshd.util import failpoints

if TYPE_CHECKING:
    from meshd.store.engine.write_batch import Payload, StagedMember, WriteBatch
    from meshd.store.index.versions import VersionStatus
    from meshd.store.records import Record, UploadedPart
    from meshd.store.replica.changes import (
        Amended,
        Marked,
        PartOf,
        UploadBegun,
        UploadCompleted,
        UploadEnded,
        VersionGone,
    )


def version_status(batch: WriteBatch, txn: Any, name: bytes, record: Record) -> VersionStatus:
    """Returns the VersionStatus of `record`."""
    tombstone = batch.tombstones(txn).stamp_of(txn, name, record.version)
    return batch.index.versions.status_of(txn, name, record, tombstone)


def newest_stamp_of_name(batch: WriteBatch, txn: Any, name: bytes) -> int:
    """Returns the highest stamp known for a name."""
    newest = batch.index.versions.newest_version(txn, name)
    return max(newest.stamp if newest else 0, batch.tombstones(txn).stamp_of(txn, name))


def insert_version(batch: WriteBatch, txn: Any, name: bytes, record: Record) -> None:
    """Inserts a `new` version where its stamp belongs, and updates the accounts."""
    replaced = batch.index.versions.insert_version(txn, name, record)
    batch.replace_extents(used_extents(replaced) if replaced else (), used_extents(record))


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
            self.staged = payload.stage_member(batch, self._member(), record.stamp)
            self.entered = msgspec.structs.replace(record, extents=(self.staged.extent,))
        failpoints.hit("store.replica.placed")

    def _member(self) -> Member:
        record = self.record
        return Member(
            stamp_text(record.stamp),
            "object",
            self.bucket,
            self.key,
            self.payload.crc,
            record.etag,
            record.modified,
            record.headers,
            record.metadata,
            record.checksums,
            record.checksum_type,
            record.owner,
            version=record.version,
            tags=record.tags,
            acl=record.acl,
            amended=record.amended,
            moves=record.moves,
        )

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
        return Applied(newest_stamp_of_name(batch, txn, name), self.record is not None)


class ApplyRemoval(Mutation):
    """Removes a version for good, or the null versions below a stamp."""

    exclusive = True

    def __init__(self, change: VersionGone) -> None:
        self.bucket, self.key, self.version, self.stamp = (
            change.bucket,
            change.key,
            change.version,
            change.stamp,
        )
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
                batch.release_extents(used_extents(existing))
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
        known = batch.index.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
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
            batch.index.put_upload(txn, msgspec.structs.replace(self.upload, place=self.staged.extent))
        return Applied(0, self.wanted)


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
        if batch.index.get_upload(txn, upload.bucket, upload.key, upload.upload_id) is None:
            batch.discard_member(staged)
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        existing = batch.index.get_part(txn, upload.upload_id, part.number)
        if existing is not None and existing.stamp >= part.stamp:
            batch.discard_member(staged)
            return Applied(existing.stamp, False)
        if existing is not None:
            batch.release_extents(existing.extents)
        batch.retain_extents((staged.extent,))
        batch.index.put_part(
            txn, upload.upload_id, msgspec.structs.replace(part, extents=(staged.extent,), moves=0)
        )
        return Applied(part.stamp, True)


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
    upload = batch.index.get_upload(txn, bucket, key, upload_id)
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
            part = batch.index.get_part(txn, change.upload_id, chosen.number)
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
