"""What callers ask the committer for, one class a request: how it is judged, laid out and entered in the
index.

Law: `judge` and `place` may raise StoreError and then nothing happened; `apply` changes the index and returns
the result. An `exclusive` intent is judged and placed inside the index's write transaction, others before it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.kit import failpoints
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
    InvalidPartError,
    NoSuchUploadError,
)
from meshd.store.members import Member, stamp_text
from meshd.store.records import Part, Record, UploadedPart
from meshwire.conditions import judge_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.ownfiles import OwnFile
    from meshd.store.records import Extent, Meta, Upload
    from meshd.store.works import Placed, Work
    from meshwire.conditions import Conditions


def judge_conditions(conditions: Conditions | None, existing: Record | None) -> None:
    """Raises ConditionFailedError or ConditionMissingError."""
    if conditions is None:
        return
    etag = existing.etag if existing else None
    verdict = judge_write(conditions, etag, existing.modified // 1000 if existing else 0)
    if verdict == "missing":
        raise ConditionMissingError("If-Match was given, but there is no object with this key")
    if verdict == "failed":
        raise ConditionFailedError(
            "the object changed meanwhile, or exists already; read it again and decide"
        )


def used_extents(record: Record) -> tuple[Extent, ...]:
    """Every extent a record keeps alive."""
    return record.extents if record.manifest is None else (*record.extents, record.manifest)


class Intent:
    """Base: a request waiting for the committer. `weight`: bytes it will append."""

    exclusive = False
    weight = 0

    def judge(self, work: Work, txn: Any) -> None:
        """Raises StoreError when the request must not take place."""

    def place(self, work: Work, txn: Any | None) -> None:
        """Lays members out. `txn` is the write transaction of an exclusive group, else None."""

    def apply(self, work: Work, txn: Any) -> Any:
        """Enters the request in the index; its result."""


def _replace(work: Work, txn: Any, bucket: str, key: str, record: Record, existing: Record | None) -> Record:
    if existing is not None:
        work.release(used_extents(existing))
    work.adopt(used_extents(record))
    work.index.put_object(txn, bucket, key, record)
    return record


@dataclass(slots=True)
class Payload:
    """Bytes on their way in: either chunks in memory or a settled file of its own."""

    size: int
    crc: int
    chunks: Sequence[bytes] = ()
    own: OwnFile | None = None

    def lay(self, work: Work, member: Member, stamp: int) -> Placed:
        if self.own is not None:
            return work.publish(self.own, member, stamp)
        return work.append(member, stamp, self.chunks, self.size)


class PutObject(Intent):
    """A new version of an object."""

    def __init__(
        self, bucket: str, key: str, meta: Meta, payload: Payload, conditions: Conditions | None
    ) -> None:
        self.bucket, self.key, self.meta, self.payload, self.conditions = (
            bucket,
            key,
            meta,
            payload,
            conditions,
        )
        self.exclusive = conditions is not None
        self.weight = 0 if payload.own else payload.size
        self.placed: Placed | None = None
        self.modified = 0

    def judge(self, work: Work, txn: Any) -> None:
        judge_conditions(self.conditions, work.index.get_in(txn, self.bucket, self.key))

    def place(self, work: Work, txn: Any | None) -> None:
        stamp, meta = work.stamp(), self.meta
        self.modified = work.clock.now_ms()
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
        )
        self.placed = self.payload.lay(work, member, stamp)

    def apply(self, work: Work, txn: Any) -> Record:
        existing = work.index.get_in(txn, self.bucket, self.key)
        placed, meta = self.placed, self.meta
        assert placed is not None
        stamp = work.overtake(placed, existing.stamp if existing else 0)
        record = Record(
            self.payload.size,
            meta.etag,
            stamp,
            self.modified,
            (placed.extent,),
            meta.headers,
            meta.metadata,
            meta.checksums,
            meta.checksum_type,
            (),
            meta.owner,
        )
        return _replace(work, txn, self.bucket, self.key, record, existing)


class DeleteObject(Intent):
    """A deletion, remembered in the data files by a member without data."""

    def __init__(self, bucket: str, key: str, conditions: Conditions | None) -> None:
        self.bucket, self.key, self.conditions = bucket, key, conditions
        self.exclusive = conditions is not None
        self.placed: Placed | None = None

    def judge(self, work: Work, txn: Any) -> None:
        judge_conditions(self.conditions, work.index.get_in(txn, self.bucket, self.key))

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        member = Member(stamp_text(stamp), "deleted", self.bucket, self.key, modified=work.clock.now_ms())
        self.placed = work.append(member, stamp, (), 0)
        failpoints.hit("store.delete.placed")

    def apply(self, work: Work, txn: Any) -> bool:
        existing = work.index.get_in(txn, self.bucket, self.key)
        if existing is None:
            return False
        assert self.placed is not None
        work.overtake(self.placed, existing.stamp)
        work.release(used_extents(existing))
        work.index.delete_object(txn, self.bucket, self.key)
        return True


class CreateUpload(Intent):
    """Begins a multipart upload; the id is made here so that ids rise in commit order of one process."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self.placed: Placed | None = None

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        upload_id = f"{stamp:016x}{os.urandom(8).hex()}"
        self.upload = msgspec.structs.replace(
            self.upload, upload_id=upload_id, initiated=work.clock.now_ms(), stamp=stamp
        )
        body = msgspec.json.encode(self.upload)
        crc = checksums.crc32c(body)
        member = Member(
            stamp_text(stamp), "upload", self.upload.bucket, self.upload.key, crc, upload=upload_id
        )
        self.placed = work.append(member, stamp, (body,), len(body))

    def apply(self, work: Work, txn: Any) -> Upload:
        assert self.placed is not None
        upload = msgspec.structs.replace(self.upload, place=self.placed.extent)
        work.adopt((self.placed.extent,))
        work.index.put_upload(txn, upload)
        return upload


class PutPart(Intent):
    """A part of an upload; a later one with the same number replaces it."""

    def __init__(self, upload: Upload, number: int, meta: Meta, payload: Payload) -> None:
        self.upload, self.number, self.meta, self.payload = upload, number, meta, payload
        self.weight = 0 if payload.own else payload.size
        self.placed: Placed | None = None
        self.modified = 0

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        self.modified = work.clock.now_ms()
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
        self.placed = self.payload.lay(work, member, stamp)

    def apply(self, work: Work, txn: Any) -> Record:
        placed, upload, meta = self.placed, self.upload, self.meta
        assert placed is not None
        if work.index.get_upload(txn, upload.bucket, upload.key, upload.upload_id) is None:
            work.waste(placed)
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        existing = work.index.get_part(txn, upload.upload_id, self.number)
        stamp = work.overtake(placed, existing.stamp if existing else 0)
        if existing is not None:
            work.release(existing.extents)
        work.adopt((placed.extent,))
        size = self.payload.size
        part = UploadedPart(
            self.number, size, meta.etag, meta.checksums, self.modified, (placed.extent,), stamp
        )
        work.index.put_part(txn, upload.upload_id, part)
        return Record(size, meta.etag, stamp, self.modified, (placed.extent,), checksums=meta.checksums)


def _manifest(work: Work, bucket: str, key: str, record: Record, upload_id: str = "") -> Record:
    """Writes down in the data files which extents make `record`; the record with the manifest's place."""
    body = msgspec.json.encode(record)
    crc, stamp = checksums.crc32c(body), stamp_text(record.stamp)
    member = Member(stamp, "manifest", bucket, key, crc, record.etag, record.modified, upload=upload_id)
    placed = work.append(member, record.stamp, (body,), len(body))
    return msgspec.structs.replace(record, manifest=placed.extent)


class CompleteUpload(Intent):
    """Makes an object of parts: their extents in order, no bytes copied."""

    exclusive = True

    def __init__(
        self,
        upload: Upload,
        numbers: Sequence[int],
        etags: Sequence[str],
        meta: Meta,
        conditions: Conditions | None,
    ) -> None:
        self.upload, self.numbers, self.etags = upload, tuple(numbers), tuple(etags)
        self.meta, self.conditions = meta, conditions
        self.parts: list[UploadedPart] = []
        self.record: Record | None = None

    def judge(self, work: Work, txn: Any) -> None:
        upload = self.upload
        stored = work.index.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
        if stored is None:
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        self.upload = stored
        wanted = self.etags or (None,) * len(self.numbers)
        for number, etag in zip(self.numbers, wanted, strict=True):
            part = work.index.get_part(txn, upload.upload_id, number)
            if part is None or etag not in (None, part.etag):
                raise InvalidPartError(number)
            self.parts.append(part)
        judge_conditions(self.conditions, work.index.get_in(txn, upload.bucket, upload.key))

    def place(self, work: Work, txn: Any | None) -> None:
        meta = self.meta
        record = Record(
            sum(part.size for part in self.parts),
            meta.etag,
            work.stamp(),
            work.clock.now_ms(),
            tuple(extent for part in self.parts for extent in part.extents),
            meta.headers,
            meta.metadata,
            meta.checksums,
            meta.checksum_type,
            tuple(Part(part.size, part.etag, part.checksums) for part in self.parts),
            meta.owner,
        )
        self.record = _manifest(work, self.upload.bucket, self.upload.key, record, self.upload.upload_id)
        failpoints.hit("store.complete.placed")

    def apply(self, work: Work, txn: Any) -> Record:
        assert self.record is not None
        existing = work.index.get_in(txn, self.upload.bucket, self.upload.key)
        record = _replace(work, txn, self.upload.bucket, self.upload.key, self.record, existing)
        _drop_upload(work, txn, self.upload)
        failpoints.hit("store.complete.applied")
        return record


def _drop_upload(work: Work, txn: Any, upload: Upload) -> None:
    """Removes an upload and all its parts from the index."""
    for part in list(work.index.parts_of(txn, upload.upload_id)):
        work.release(part.extents)
        work.index.delete_part(txn, upload.upload_id, part.number)
    if upload.place is not None:
        work.release((upload.place,))
    work.index.delete_upload(txn, upload)


class AbortUpload(Intent):
    """Drops an upload, remembered by a member without data."""

    exclusive = True

    def __init__(self, upload: Upload) -> None:
        self.upload = upload

    def judge(self, work: Work, txn: Any) -> None:
        upload = self.upload
        stored = work.index.get_upload(txn, upload.bucket, upload.key, upload.upload_id)
        if stored is None:
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        self.upload = stored

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        member = Member(
            stamp_text(stamp), "aborted", self.upload.bucket, self.upload.key, upload=self.upload.upload_id
        )
        work.append(member, stamp, (), 0)

    def apply(self, work: Work, txn: Any) -> None:
        _drop_upload(work, txn, self.upload)


class LinkObject(Intent):
    """A copy that shares the source's files of its own; `copied` holds the bytes of extents that lie in segments."""

    exclusive = True

    def __init__(
        self,
        bucket: str,
        key: str,
        source: Record,
        copied: dict[Extent, bytes],
        meta: Meta,
        conditions: Conditions | None,
    ) -> None:
        self.bucket, self.key, self.source, self.copied = bucket, key, source, copied
        self.meta, self.conditions = meta, conditions
        self.weight = sum(map(len, copied.values()))
        self.record: Record | None = None

    def judge(self, work: Work, txn: Any) -> None:
        for extent in self.source.extents:
            if extent not in self.copied and work.index.get_file(txn, extent.file) is None:
                raise ExtentGoneError("the object to copy was removed meanwhile; look it up again")
        judge_conditions(self.conditions, work.index.get_in(txn, self.bucket, self.key))

    def place(self, work: Work, txn: Any | None) -> None:
        meta, source = self.meta, self.source
        record = Record(
            source.size,
            meta.etag,
            work.stamp(),
            work.clock.now_ms(),
            tuple(self._extent(work, extent) for extent in source.extents),
            meta.headers,
            meta.metadata,
            meta.checksums,
            meta.checksum_type,
            source.parts,
            meta.owner,
        )
        self.record = _manifest(work, self.bucket, self.key, record)

    def _extent(self, work: Work, extent: Extent) -> Extent:
        data = self.copied.get(extent)
        if data is None:
            return extent
        stamp = work.stamp()
        member = Member(stamp_text(stamp), "part", self.bucket, self.key, extent.crc32c)
        return work.append(member, stamp, (data,), len(data)).extent

    def apply(self, work: Work, txn: Any) -> Record:
        assert self.record is not None
        existing = work.index.get_in(txn, self.bucket, self.key)
        return _replace(work, txn, self.bucket, self.key, self.record, existing)


class Reserve(Intent):
    """Asks for nothing: when it is done, the committer has topped up the free file numbers."""

    def apply(self, work: Work, txn: Any) -> None:
        return None
