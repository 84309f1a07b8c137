"""Mutations of multipart uploads: create, put part, complete, abort.

Law: the same as in `mutations`. Completing an upload copies no bytes: the object consists of the parts'
extents, which a manifest lists.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.store.engine.member_header import Member, stamp_text
from meshd.store.engine.mutations import (
    Mutation,
    check_write_conditions,
    make_record,
    push_version,
    write_manifest,
)
from meshd.store.errors import InvalidPartError, NoSuchUploadError
from meshd.store.index.index import object_key
from meshd.store.records import Part, Record, UploadedPart
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.engine.write_batch import Payload, StagedMember, WriteBatch
    from meshd.store.records import Meta, Upload
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning


class CreateUpload(Mutation):
    """Begins a multipart upload. The id is made here, so ids of one process rise in commit order."""

    needs_free_space = True

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.staged: StagedMember | None = None

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp = batch.next_stamp()
        upload_id = f"{stamp:016x}{os.urandom(8).hex()}"
        self.upload = msgspec.structs.replace(
            self.upload, upload_id=upload_id, initiated=batch.clock.now_ms(), stamp=stamp
        )
        body = msgspec.json.encode(self.upload)
        crc = checksums.crc32c(body)
        member = Member(
            stamp_text(stamp), "upload", self.upload.bucket, self.upload.key, crc, upload=upload_id
        )
        self.staged = batch.append_member(member, stamp, (body,), len(body))

    def update_index(self, batch: WriteBatch, txn: Any) -> Upload:
        assert self.staged is not None
        upload = msgspec.structs.replace(self.upload, place=self.staged.extent)
        batch.retain_extents((self.staged.extent,))
        batch.index.uploads.put_upload(txn, upload)
        return upload


class PutPart(Mutation):
    """Stores a part of an upload. A later part with the same number replaces it."""

    needs_free_space = True

    def __init__(self, upload: Upload, number: int, meta: Meta, payload: Payload) -> None:
        self.upload, self.number, self.meta, self.payload = upload, number, meta, payload
        self.data_bytes = 0 if payload.large_file else payload.size
        self.staged: StagedMember | None = None
        self.modified = 0

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp = batch.next_stamp()
        self.modified = batch.clock.now_ms()
        member = Member(
            stamp_text(stamp),
            "part",
            self.upload.bucket,
            self.upload.key,
            self.payload.crc,
            self.meta.etag,
            self.modified,
            checksums=self.meta.checksums,
            upload=self.upload.upload_id,
            part=self.number,
        )
        self.staged = self.payload.stage_member(batch, member, stamp)

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        staged, upload, meta = self.staged, self.upload, self.meta
        assert staged is not None
        if batch.index.uploads.get_upload(txn, upload.bucket, upload.key, upload.upload_id) is None:
            batch.discard_member(staged)
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        existing = batch.index.uploads.get_part(txn, upload.upload_id, self.number)
        stamp = batch.restamp_if_behind(staged, existing.stamp if existing else 0)
        if existing is not None:
            batch.release_extents(existing.extents)
        batch.retain_extents((staged.extent,))
        size = self.payload.size
        part = UploadedPart(
            self.number, size, meta.etag, meta.checksums, self.modified, (staged.extent,), stamp
        )
        batch.index.uploads.put_part(txn, upload.upload_id, part)
        return Record(size, meta.etag, stamp, self.modified, (staged.extent,), checksums=meta.checksums)


def _require_upload(batch: WriteBatch, txn: Any, upload: Upload) -> Upload:
    stored = batch.index.uploads.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
    if stored is None:
        raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
    return stored


class CompleteUpload(Mutation):
    """Makes an object of an upload's parts: their extents in order, without copying bytes."""

    exclusive = True

    def __init__(
        self,
        upload: Upload,
        numbers: Sequence[int],
        etags: Sequence[str],
        meta: Meta,
        conditions: Conditions | None,
        versioning: Versioning,
    ) -> None:
        self.upload, self.numbers, self.etags = upload, tuple(numbers), tuple(etags)
        self.meta, self.conditions, self.versioning = meta, conditions, versioning
        self.parts: list[UploadedPart] = []
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        upload = self.upload = _require_upload(batch, txn, self.upload)
        wanted = self.etags or (None,) * len(self.numbers)
        for number, etag in zip(self.numbers, wanted, strict=True):
            part = batch.index.uploads.get_part(txn, upload.upload_id, number)
            if part is None or etag not in (None, part.etag):
                raise InvalidPartError(number)
            self.parts.append(part)
        check_write_conditions(self.conditions, batch.index.get_in(txn, upload.bucket, upload.key))

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        record = make_record(
            self.meta,
            self.versioning,
            size=sum(part.size for part in self.parts),
            stamp=batch.next_stamp(),
            modified=batch.clock.now_ms(),
            extents=tuple(extent for part in self.parts for extent in part.extents),
            parts=tuple(Part(part.size, part.etag, part.checksums) for part in self.parts),
        )
        self.record = write_manifest(
            batch, self.upload.bucket, self.upload.key, record, self.upload.upload_id
        )
        failpoints.hit("store.complete.placed")

    def update_index(self, batch: WriteBatch, txn: Any) -> Record:
        assert self.record is not None
        name = object_key(self.upload.bucket, self.upload.key)
        push_version(batch, txn, name, self.record, batch.index.versions.newest_version(txn, name))
        end_upload(batch, txn, self.upload, self.record.stamp)
        failpoints.hit("store.complete.applied")
        return self.record


def end_upload(batch: WriteBatch, txn: Any, upload: Upload, stamp: int) -> None:
    """Removes an upload and its parts from the index and records that it ended with `stamp`."""
    batch.tombstones(txn).add(txn, object_key(upload.bucket, upload.key), stamp, upload.upload_id)
    drop_unowned_upload(batch, txn, upload)


def drop_unowned_upload(batch: WriteBatch, txn: Any, upload: Upload) -> None:
    """Removes an upload and its parts from the index without recording it."""
    for part in list(batch.index.uploads.parts_of(txn, upload.upload_id)):
        batch.release_extents(part.extents)
        batch.index.uploads.delete_part(txn, upload.upload_id, part.number)
    if upload.place is not None:
        batch.release_extents((upload.place,))
    batch.index.uploads.delete_upload(txn, upload)


class AbortUpload(Mutation):
    """Drops an upload, and records that in a member without data."""

    exclusive = True

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.stamp = 0

    def check(self, batch: WriteBatch, txn: Any) -> None:
        self.upload = _require_upload(batch, txn, self.upload)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        stamp = self.stamp = batch.next_stamp()
        member = Member(
            stamp_text(stamp), "aborted", self.upload.bucket, self.upload.key, upload=self.upload.upload_id
        )
        batch.append_member(member, stamp, (), 0)

    def update_index(self, batch: WriteBatch, txn: Any) -> int:
        end_upload(batch, txn, self.upload, self.stamp)
        return self.stamp
