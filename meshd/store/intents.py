"""What callers ask the committer for, one class a request: how it is judged, laid out and entered in the
index.

Law: `judge` and `place` may raise StoreError and then nothing happened; `apply` changes the index and returns
the result. An `exclusive` intent is judged and placed inside the index's write transaction, others before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from awscrt import checksums

from meshd.kit import failpoints
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
)
from meshd.store.members import Member, stamp_text
from meshd.store.records import Record
from meshwire.conditions import judge_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.ownfiles import OwnFile
    from meshd.store.records import Extent, Meta
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


def enter(work: Work, txn: Any, bucket: str, key: str, record: Record, existing: Record | None) -> Record:
    """Puts `record` where `existing` was, and keeps the accounts of both."""
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
        return enter(work, txn, self.bucket, self.key, record, existing)


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


def write_manifest(work: Work, bucket: str, key: str, record: Record, upload_id: str = "") -> Record:
    """Writes down in the data files which extents make `record`; the record with the manifest's place."""
    body = msgspec.json.encode(record)
    crc, stamp = checksums.crc32c(body), stamp_text(record.stamp)
    member = Member(stamp, "manifest", bucket, key, crc, record.etag, record.modified, upload=upload_id)
    placed = work.append(member, record.stamp, (body,), len(body))
    return msgspec.structs.replace(record, manifest=placed.extent)


class LinkObject(Intent):
    """A copy that shares the source's own files; `copied` holds the bytes of extents in segments."""

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
        self.record = write_manifest(work, self.bucket, self.key, record)

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
        return enter(work, txn, self.bucket, self.key, self.record, existing)


class Reserve(Intent):
    """Asks for nothing: when it is done, the committer has topped up the free file numbers."""

    def apply(self, work: Work, txn: Any) -> None:
        return None
