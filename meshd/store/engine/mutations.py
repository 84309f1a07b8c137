"""Mutations of objects and versions: put, copy, delete marker, version removal, tag and ACL change.

Law: `check` and `write_data` may raise StoreError, and then the mutation had no effect; `update_index`
changes the index and returns the result. An exclusive mutation runs `check` and `write_data` inside the
index write transaction, any other one before it. The removal of a version for good is also recorded in
the data files, as a member without data, so that an index rebuild knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.store.engine.member_header import Member, stamp_text, version_id_of
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
    NoSuchVersionError,
)
from meshd.store.index.index import object_key
from meshd.store.records import NULL, Record, Removed
from meshd.util import failpoints
from meshwire.http_values.conditional_requests import failed_write_condition

if TYPE_CHECKING:
    from meshd.store.engine.write_batch import Payload, StagedMember, WriteBatch
    from meshd.store.index.versions import VersionStatus
    from meshd.store.records import Extent, Meta, Part
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning


def check_write_conditions(conditions: Conditions | None, existing: Record | None) -> None:
    """Raises ConditionFailedError or ConditionMissingError if the conditions do not hold for `existing`."""
    if conditions is None:
        return
    etag = existing.etag if existing else None
    failed = failed_write_condition(conditions, etag, existing.modified // 1000 if existing else 0)
    if failed and existing is None:
        raise ConditionMissingError("If-Match was given, but no object has this key")
    if failed:
        raise ConditionFailedError(
            "the object was changed or already exists; read it again before writing", failed
        )


class Mutation:
    """Base of all mutations. `bucket`: where it writes. `data_bytes`: bytes it will append.
    `needs_free_space`: a nearly full disk refuses it; a mutation that frees space or ends an upload does not
    set this."""

    bucket = ""
    exclusive = False
    needs_free_space = False
    data_bytes = 0
    epoch = 0  # the map version that it is bound to, 0 without a fence; see `WriteContext`
    submitted_stamp = 0  # the stamp of the time of submission
    staged: StagedMember | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        """Raises StoreError if the mutation must not take place."""

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        """Stages members in the data files. `txn` is the write transaction of an exclusive group, otherwise
        None."""

    def update_index(self, batch: WriteBatch, txn: Any) -> Any:
        """Enters the mutation in the index and returns its result."""

    def withdraw(self, batch: WriteBatch) -> None:
        """Voids what `write_data` has staged, since the mutation must not commit. Raises OSError."""
        if self.staged is not None:
            batch.withdraw_member(self.staged)


def stamp_floor(batch: WriteBatch, txn: Any, name: bytes, newest: Record | None, staged: StagedMember) -> int:
    """Returns the stamp that a new version must exceed: that of the newest version, and that of a null
    version's deletion made after this member was staged, because a deletion ends all older null versions."""
    if newest is not None and not newest.version and not newest.marker:
        return newest.stamp
    return max(newest.stamp if newest else 0, batch.tombstones(txn).stamp_floor(txn, name, staged.stamp))


def push_version(
    batch: WriteBatch, txn: Any, name: bytes, record: Record, newest: Record | None
) -> Record | None:
    """Puts `record` on top of the versions of a key and updates the accounts; returns the null version it
    replaced."""
    replaced = batch.index.versions.push_version(txn, name, record, newest)
    batch.replace_extents(replaced.used_extents if replaced else (), record.used_extents)
    return replaced


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
    batch.replace_extents(replaced.used_extents if replaced else (), record.used_extents)


def replace_version(batch: WriteBatch, txn: Any, name: bytes, record: Record, existing: Record) -> Record:
    """Replaces `existing` by `record`, which has the same stamp, and updates the accounts of both."""
    batch.replace_extents(existing.used_extents, record.used_extents)
    batch.index.versions.replace_version(txn, name, record)
    return record


def make_record(
    meta: Meta,
    versioning: Versioning,
    *,
    size: int,
    stamp: int,
    modified: int,
    extents: tuple[Extent, ...],
    parts: tuple[Part, ...] = (),
) -> Record:
    """Builds the record of a new version."""
    return Record(
        size,
        meta.etag,
        stamp,
        modified,
        extents,
        meta.headers,
        meta.metadata,
        meta.checksums,
        meta.checksum_type,
        parts,
        meta.owner,
        version=version_id_of(stamp) if versioning == "Enabled" else "",
        tags=meta.tags,
        acl=meta.acl,
        through=meta.through,
    )


class PutObject(Mutation):
    """Stores a new version of an object."""

    needs_free_space = True

    def __init__(
        self,
        bucket: str,
        key: str,
        meta: Meta,
        payload: Payload,
        conditions: Conditions | None,
        versioning: Versioning,
    ) -> None:
        self.bucket, self.key, self.meta, self.payload = bucket, key, meta, payload
        self.conditions, self.versioning = conditions, versioning
        self.exclusive = self.exclusive or conditions is not None
        self.data_bytes = 0 if payload.large_file else payload.size
        self.staged: StagedMember | None = None
        self.modified = 0

    def check(self, batch: WriteBatch, txn: Any) -> None:
        check_write_conditions(self.conditions, batch.index.get_in(txn, self.bucket, self.key))

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp, meta = batch.next_stamp(), self.meta
        self.modified = batch.clock.now_ms()
        member = Member(
            stamp_text(stamp),
            "object",
            self.bucket,
            self.key,
            self.payload.crc,
            meta.etag,
            self.modified,
            meta.headers,
            meta.metadata,
            meta.checksums,
            meta.checksum_type,
            meta.owner,
            version=version_id_of(stamp) if self.versioning == "Enabled" else "",
            tags=meta.tags,
            acl=meta.acl,
            through=meta.through,
        )
        self.staged = self.payload.stage_member(batch, member, stamp)

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        staged = self.staged
        assert staged is not None
        name = object_key(self.bucket, self.key)
        newest = batch.index.versions.newest_version(txn, name)
        record = make_record(
            self.meta,
            self.versioning,
            size=self.payload.size,
            stamp=batch.restamp_if_behind(staged, stamp_floor(batch, txn, name, newest, staged)),
            modified=self.modified,
            extents=(staged.extent,),
        )
        push_version(batch, txn, name, record, newest)
        return record


class PutWithManifest(PutObject):
    """Stores a new version whose source was uploaded in parts; a manifest records the parts."""

    exclusive = True  # an index rebuild would accept a manifest that no record uses
    record: Record | None = None

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp = batch.next_stamp()
        member = Member(stamp_text(stamp), "part", self.bucket, self.key, self.payload.crc)
        self.staged = self.payload.stage_member(batch, member, stamp)
        record = make_record(
            self.meta,
            self.versioning,
            size=self.payload.size,
            stamp=batch.next_stamp(),
            modified=batch.clock.now_ms(),
            extents=(self.staged.extent,),
            parts=self.meta.parts,
        )
        self.record = write_manifest(batch, self.bucket, self.key, record)

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        assert self.record is not None
        name = object_key(self.bucket, self.key)
        push_version(batch, txn, name, self.record, batch.index.versions.newest_version(txn, name))
        return self.record


def write_manifest(batch: WriteBatch, bucket: str, key: str, record: Record, upload_id: str = "") -> Record:
    """Writes a manifest of the extents of `record`; returns the record with the manifest's extent."""
    body = msgspec.json.encode(msgspec.structs.replace(record, broken=False) if record.broken else record)
    crc, stamp = checksums.crc32c(body), stamp_text(record.stamp)
    member = Member(
        stamp,
        "manifest",
        bucket,
        key,
        crc,
        record.etag,
        record.modified,
        upload=upload_id,
        version=record.version,
    )
    staged = batch.append_member(member, record.stamp, (body,), len(body))
    return msgspec.structs.replace(record, manifest=staged.extent)


class LinkObject(Mutation):
    """Copies an object by sharing the source's large object files. `copied` holds the bytes of extents in
    segments."""

    exclusive = True
    needs_free_space = True

    def __init__(
        self,
        bucket: str,
        key: str,
        source: Record,
        copied: dict[Extent, bytes],
        meta: Meta,
        conditions: Conditions | None,
        versioning: Versioning,
    ) -> None:
        self.bucket, self.key, self.source, self.copied = bucket, key, source, copied
        self.meta, self.conditions, self.versioning = meta, conditions, versioning
        self.data_bytes = sum(map(len, copied.values()))
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        for extent in self.source.extents:
            if extent not in self.copied and batch.index.files.get_file(txn, extent.file) is None:
                raise ExtentGoneError("the source was removed during the copy; look it up again")
        check_write_conditions(self.conditions, batch.index.get_in(txn, self.bucket, self.key))

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        record = make_record(
            self.meta,
            self.versioning,
            size=self.source.size,
            stamp=batch.next_stamp(),
            modified=batch.clock.now_ms(),
            extents=tuple(self._extent(batch, extent) for extent in self.source.extents),
            parts=self.source.parts,
        )
        self.record = write_manifest(batch, self.bucket, self.key, record)

    def _extent(self, batch: WriteBatch, extent: Extent) -> Extent:
        data = self.copied.get(extent)
        if data is None:
            return extent
        stamp = batch.next_stamp()
        member = Member(stamp_text(stamp), "part", self.bucket, self.key, extent.crc32c)
        return batch.append_member(member, stamp, (data,), len(data)).extent

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        assert self.record is not None
        name = object_key(self.bucket, self.key)
        push_version(batch, txn, name, self.record, batch.index.versions.newest_version(txn, name))
        return self.record


class RemoveVersion(Mutation):
    """Removes one version for good; the next older version becomes the newest."""

    def __init__(
        self, bucket: str, key: str, version: str, conditions: Conditions | None, stamp: int | None = None
    ) -> None:
        self.bucket, self.key, self.version, self.conditions = bucket, key, version, conditions
        self.stamp, self.exclusive = stamp, conditions is not None or stamp is not None
        self.staged: StagedMember | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        existing = batch.index.versions.find_version(txn, object_key(self.bucket, self.key), self.version)
        check_write_conditions(self.conditions, existing)
        if self.stamp is not None and existing is not None and existing.stamp != self.stamp:
            raise ConditionFailedError("the object was replaced; read it again before writing", "If-Match")

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp, version = batch.next_stamp(), "" if self.version == NULL else self.version
        member = Member(
            stamp_text(stamp),
            "deleted",
            self.bucket,
            self.key,
            modified=batch.clock.now_ms(),
            version=version,
        )
        self.staged = batch.append_member(member, stamp, (), 0)
        failpoints.hit("store.delete.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> Removed:
        name = object_key(self.bucket, self.key)
        existing = batch.index.versions.find_version(txn, name, self.version)
        assert self.staged is not None
        if existing is None:
            if self.version == NULL:  # the staged member ends older null versions even so
                batch.tombstones(txn).add(txn, name, self.staged.stamp)
            return Removed()
        # A deletion of the null version covers everything older, so its stamp must exceed the version's.
        stamp = (
            self.staged.stamp if existing.version else batch.restamp_if_behind(self.staged, existing.stamp)
        )
        batch.tombstones(txn).add(txn, name, stamp, existing.version)
        batch.release_extents(existing.used_extents)
        batch.index.versions.remove_version(txn, name, existing)
        return Removed(existing, stamp=stamp)


class PutDeleteMarker(Mutation):
    """Hides a key under a delete marker. While versioning is suspended, the marker replaces the null
    version."""

    def __init__(self, bucket: str, key: str, conditions: Conditions | None, versioning: Versioning) -> None:
        self.bucket, self.key, self.conditions, self.versioning = bucket, key, conditions, versioning
        self.exclusive = conditions is not None
        self.staged: StagedMember | None = None
        self.modified = 0

    def check(self, batch: WriteBatch, txn: Any) -> None:
        check_write_conditions(self.conditions, batch.index.get_in(txn, self.bucket, self.key))

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp = batch.next_stamp()
        self.modified = batch.clock.now_ms()
        member = Member(
            stamp_text(stamp),
            "marker",
            self.bucket,
            self.key,
            modified=self.modified,
            version=version_id_of(stamp) if self.versioning == "Enabled" else "",
        )
        self.staged = batch.append_member(member, stamp, (), 0)
        failpoints.hit("store.marker.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> Removed:
        staged = self.staged
        assert staged is not None
        name = object_key(self.bucket, self.key)
        newest = batch.index.versions.newest_version(txn, name)
        stamp = batch.restamp_if_behind(staged, stamp_floor(batch, txn, name, newest, staged))
        version = version_id_of(stamp) if self.versioning == "Enabled" else ""
        marker = Record(0, "", stamp, self.modified, (staged.extent,), version=version, marker=True)
        return Removed(push_version(batch, txn, name, marker, newest), marker)


class UpdateTagsAndAcl(Mutation):
    """Changes tags and ACL of the current or a given version, by writing a manifest with the same stamp."""

    exclusive = True
    needs_free_space = True

    def __init__(
        self, bucket: str, key: str, version: str | None, tags: dict[str, str] | None, acl: Acl | None
    ) -> None:
        self.bucket, self.key, self.version, self.tags, self.acl = bucket, key, version, tags, acl
        self.existing: Record | None = None
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        name, versions = object_key(self.bucket, self.key), batch.index.versions
        found = (
            versions.current_version(txn, name)
            if self.version is None
            else versions.find_version(txn, name, self.version)
        )
        if found is None or found.marker:
            raise NoSuchVersionError("the object or this version does not exist; list its versions")
        self.existing = found

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        existing = self.existing
        assert existing is not None
        amended = msgspec.structs.replace(
            existing,
            tags=existing.tags if self.tags is None else self.tags,
            acl=existing.acl if self.acl is None else self.acl,
            manifest=None,
            moves=existing.moves + 1,
            amended=batch.next_stamp(),
        )
        self.record = write_manifest(batch, self.bucket, self.key, amended)
        failpoints.hit("store.amend.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        assert self.existing is not None
        assert self.record is not None
        return replace_version(batch, txn, object_key(self.bucket, self.key), self.record, self.existing)
