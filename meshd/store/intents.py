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

from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    ExtentGoneError,
)
from meshd.store.index import object_key
from meshd.store.members import Member, stamp_text, version_of
from meshd.store.records import Record
from meshwire.conditions import failed_write_condition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.index import Index
    from meshd.store.interface import Buffer
    from meshd.store.ownfiles import OwnFile
    from meshd.store.records import Extent, Meta, Part
    from meshd.store.works import Placed, Work
    from meshwire.conditions import Conditions
    from meshwire.s3.settings import Versioning


def judge_conditions(conditions: Conditions | None, existing: Record | None) -> None:
    """Raises ConditionFailedError or ConditionMissingError."""
    if conditions is None:
        return
    etag = existing.etag if existing else None
    failed = failed_write_condition(conditions, etag, existing.modified // 1000 if existing else 0)
    if failed and existing is None:
        raise ConditionMissingError("If-Match was given, but there is no object with this key")
    if failed:
        raise ConditionFailedError(
            "the object changed meanwhile, or exists already; read it again and decide", failed
        )


def used_extents(record: Record) -> tuple[Extent, ...]:
    """Every extent a record keeps alive."""
    return record.extents if record.manifest is None else (*record.extents, record.manifest)


def user_of(index: Index, txn: Any, member: Member, extent: Extent) -> Record | None:
    """The version that uses this extent of `member`: its own, or for a part any one of its key."""
    name = object_key(member.bucket, member.key)
    if member.kind == "part":
        return next(
            (record for record in index.versions.of(txn, name) if extent in used_extents(record)), None
        )
    own = index.versions.at(txn, name, int(member.stamp))
    return own if own is not None and extent in used_extents(own) else None


class Intent:
    """Base: a request waiting for the committer. `weight`: bytes it will append; `grows`: a nearly full disk
    refuses it, so that what frees room, or ends an upload, still finds some.
    """

    exclusive = False
    grows = False
    weight = 0
    epoch = 0  # see `epochs`
    asked = 0  # the stamp of the moment it was submitted
    placed: Placed | None = None

    def judge(self, work: Work, txn: Any) -> None:
        """Raises StoreError when the request must not take place."""

    def place(self, work: Work, txn: Any | None) -> None:
        """Lays members out. `txn` is the write transaction of an exclusive group, else None."""

    def apply(self, work: Work, txn: Any) -> Any:
        """Enters the request in the index; its result."""


def floor_of(work: Work, txn: Any, name: bytes, newest: Record | None, placed: Placed) -> int:
    """What a new version's stamp must lie above: the newest version, and a null one that was removed since it
    was placed, for its deletion ends all that is older.
    """
    if newest is not None and not newest.version and not newest.marker:
        return newest.stamp
    return max(newest.stamp if newest else 0, work.graves(txn).floor(txn, name, placed.stamp))


def enter(work: Work, txn: Any, name: bytes, record: Record, newest: Record | None) -> Record | None:
    """Puts `record` on top of the versions of a key and keeps the accounts; the null version it replaced."""
    replaced = work.index.versions.add(txn, name, record, newest)
    work.exchange(used_extents(replaced) if replaced else (), used_extents(record))
    return replaced


def rewrite(work: Work, txn: Any, name: bytes, record: Record, existing: Record) -> Record:
    """Puts `record` where `existing`, of the same stamp, was, and keeps the accounts of both."""
    work.exchange(used_extents(existing), used_extents(record))
    work.index.versions.replace(txn, name, record)
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
    """A new version of an object."""
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
        version=version_of(stamp) if versioning == "Enabled" else "",
        tags=meta.tags,
        acl=meta.acl,
    )


@dataclass(slots=True)
class Payload:
    """Bytes on their way in: either chunks in memory or a settled file of its own."""

    size: int
    crc: int
    chunks: Sequence[Buffer] = ()
    own: OwnFile | None = None

    def lay(self, work: Work, member: Member, stamp: int) -> Placed:
        if self.own is not None:
            return work.publish(self.own, member, stamp)
        return work.append(member, stamp, self.chunks, self.size)


class PutObject(Intent):
    """A new version of an object."""

    grows = True

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
            version=version_of(stamp) if self.versioning == "Enabled" else "",
            tags=meta.tags,
            acl=meta.acl,
        )
        self.placed = self.payload.lay(work, member, stamp)

    def apply(self, work: Work, txn: Any) -> Record:
        placed = self.placed
        assert placed is not None
        name = object_key(self.bucket, self.key)
        newest = work.index.versions.newest(txn, name)
        record = make_record(
            self.meta,
            self.versioning,
            size=self.payload.size,
            stamp=work.overtake(placed, floor_of(work, txn, name, newest, placed)),
            modified=self.modified,
            extents=(placed.extent,),
        )
        enter(work, txn, name, record, newest)
        return record


class PutParted(PutObject):
    """A new version whose bytes were uploaded in parts elsewhere: a manifest says in which."""

    exclusive = True  # a manifest without use would be believed by a rebuild
    record: Record | None = None

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        member = Member(stamp_text(stamp), "part", self.bucket, self.key, self.payload.crc)
        self.placed = self.payload.lay(work, member, stamp)
        record = make_record(
            self.meta,
            self.versioning,
            size=self.payload.size,
            stamp=work.stamp(),
            modified=work.clock.now_ms(),
            extents=(self.placed.extent,),
            parts=self.meta.parts,
        )
        self.record = write_manifest(work, self.bucket, self.key, record)

    def apply(self, work: Work, txn: Any) -> Record:
        assert self.record is not None
        name = object_key(self.bucket, self.key)
        enter(work, txn, name, self.record, work.index.versions.newest(txn, name))
        return self.record


def write_manifest(work: Work, bucket: str, key: str, record: Record, upload_id: str = "") -> Record:
    """Writes down in the data files which extents make `record`; the record with the manifest's place."""
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
    placed = work.append(member, record.stamp, (body,), len(body))
    return msgspec.structs.replace(record, manifest=placed.extent)


class LinkObject(Intent):
    """A copy that shares the source's own files; `copied` holds the bytes of extents in segments."""

    exclusive = True
    grows = True

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
        self.weight = sum(map(len, copied.values()))
        self.record: Record | None = None

    def judge(self, work: Work, txn: Any) -> None:
        for extent in self.source.extents:
            if extent not in self.copied and work.index.get_file(txn, extent.file) is None:
                raise ExtentGoneError("the object to copy was removed meanwhile; look it up again")
        judge_conditions(self.conditions, work.index.get_in(txn, self.bucket, self.key))

    def place(self, work: Work, txn: Any | None) -> None:
        record = make_record(
            self.meta,
            self.versioning,
            size=self.source.size,
            stamp=work.stamp(),
            modified=work.clock.now_ms(),
            extents=tuple(self._extent(work, extent) for extent in self.source.extents),
            parts=self.source.parts,
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
        name = object_key(self.bucket, self.key)
        enter(work, txn, name, self.record, work.index.versions.newest(txn, name))
        return self.record


class Reserve(Intent):
    """Asks for nothing: when it is done, the committer has topped up the free file numbers."""

    def apply(self, work: Work, txn: Any) -> None:
        return None
