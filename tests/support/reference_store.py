"""Reference implementation of ObjectStore in memory: the oracle of the store's property tests.

Law: as plain as possible. Where it and `Store` differ, one of them is wrong.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from awscrt import checksums

from meshd.store.engine.member_header import version_id_of
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    CorruptExtentError,
    ExtentGoneError,
    InvalidPartError,
    NoSuchUploadError,
    SizeMismatchError,
    StaleEpochError,
    StoreClosedError,
)
from meshd.store.records import (
    INTERNAL_WRITE,
    NULL,
    EntryPage,
    Extent,
    Location,
    Part,
    PartPage,
    Record,
    Removed,
    Span,
    StoreStats,
    UploadedPart,
    UploadPage,
)
from meshwire.http_values.conditional_requests import Conditions, failed_write_condition
from meshwire.s3.result_types import ObjectEntry
from tests.support.reference_replica import MemoryReplicas, MemoryReplicaWriter
from tests.support.reference_versions import MemoryVersions, is_in, roll

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from meshd.store.records import (
        Meta,
        NewObject,
        Page,
        StoreChanges,
        Upload,
        VersionPage,
        WriteContext,
    )
    from meshd.store.replica.changes import Applied, Change
    from meshd.store.writer_api import Buffer
    from meshd.util.clock import Clock
    from meshwire.s3.bucket_settings import Acl, Versioning


class MemoryWriter:
    """See ObjectWriter."""

    def __init__(
        self, store: MemoryStore, bucket: str, key: str, size: int | None, part: tuple[Upload, int] | None
    ) -> None:
        self._store, self._bucket, self._key, self._declared, self._part = store, bucket, key, size, part
        self._data = bytearray()
        self._open = True

    async def write(self, data: Buffer) -> None:
        self._expect_open()
        self._data += data
        if self._declared is not None and len(self._data) > self._declared:
            raise SizeMismatchError(f"more than the declared {self._declared} bytes were written")

    async def write_borrowed(self, data: memoryview) -> None:
        await self.write(data)

    async def commit(
        self,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        self._expect_open()
        if self._declared is not None and len(self._data) != self._declared:
            raise SizeMismatchError(f"{len(self._data)} of the declared {self._declared} bytes were written")
        self._store.require_epoch(context)
        self._open = False
        extent = self._store.keep(bytes(self._data))
        if self._part is not None:
            return self._store.enter_part(*self._part, meta, extent, context)
        return self._store.enter(
            self._bucket, self._key, meta, (extent,), meta.parts, conditions, versioning, context
        )

    async def read_back(self) -> AsyncGenerator[bytes, None]:
        self._expect_open()
        yield bytes(self._data)

    async def abort(self) -> None:
        self._open = False

    def _expect_open(self) -> None:
        if not self._open:
            raise StoreClosedError(f"the writer of {self._bucket}/{self._key} is closed; open a new one")


def _close_all(blobs: dict[int, int]) -> None:
    while blobs:
        os.close(blobs.popitem()[1])


class MemoryStore:
    """See ObjectStore."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._versions = MemoryVersions()
        self._uploads: dict[str, Upload] = {}
        self._parts: dict[str, dict[int, UploadedPart]] = {}
        self._blobs: dict[int, int] = {}  # extent's file → memfd
        self._end = weakref.finalize(self, _close_all, self._blobs)
        self._next = self._epoch = 0
        self._replicas = MemoryReplicas(self._versions, self._uploads, self._parts)

    def __repr__(self) -> str:
        return f"<MemoryStore {self._versions!r} uploads={len(self._uploads)}>"

    def close(self) -> None:
        """What nobody closes is closed with the store itself."""
        self._end()

    async def raise_fence(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)

    def require_epoch(self, context: WriteContext) -> None:
        """See `WriteContext`. Raises StaleEpochError."""
        epoch = context.epoch
        if (epoch and epoch < self._epoch) or context.is_past_deadline(self._clock.stamp()):
            raise StaleEpochError(self._epoch)
        self._epoch = max(self._epoch, epoch)

    def _stamp(self, context: WriteContext) -> int:
        """Above every stamp of this store, other nodes' too."""
        self.require_epoch(context)
        stamp = self._replicas.seen = max(self._clock.stamp(), self._replicas.seen + 1)
        return stamp

    # bytes ----------------------------------------------------------------------------------------------

    def keep(self, data: bytes) -> Extent:
        """Stores bytes for good (until `close`)."""
        self._next += 1
        fd = self._blobs[self._next] = os.memfd_create(f"extent-{self._next}")
        os.pwrite(fd, data, 0)
        return Extent(0, self._next, 0, len(data), checksums.crc32c(data))

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        whole = b"".join(self._bytes(extent) for extent in record.extents)
        return whole[offset : offset + length]

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        return self.read_range(record, offset, length) if len(record.extents) == 1 else None

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        spans = self._spans(record, offset, length)
        return spans[0] if len(spans) == 1 else None

    def _bytes(self, extent: Extent) -> bytes:
        if extent.file not in self._blobs:
            raise ExtentGoneError("the source was removed during the copy; look it up again")
        data = os.pread(self._blobs[extent.file], extent.length, extent.offset)
        if len(data) != extent.length or checksums.crc32c(data) != extent.crc32c:
            raise CorruptExtentError(f"extent {extent} is damaged")
        return data

    @contextmanager
    def open_spans(self, record: Record, offset: int, length: int) -> Iterator[Sequence[Span]]:
        yield self._spans(record, offset, length)

    @contextmanager
    def open_spans_many(
        self, wanted: Sequence[tuple[Record, int, int]]
    ) -> Iterator[Sequence[Sequence[Span] | None]]:
        yield [self._spans(*each) for each in wanted]

    def _spans(self, record: Record, offset: int, length: int) -> list[Span]:
        spans, end, at = [], offset + length, 0
        for extent in record.extents:
            first, last = max(offset, at), min(end, at + extent.length)
            if first < last:
                spans.append(Span(self._blobs[extent.file], extent.offset + first - at, last - first, extent))
            at += extent.length
        return spans

    def locate(self, record: Record) -> Sequence[Location]:
        folder = f"/proc/{os.getpid()}/fd"
        return [
            Location(f"{folder}/{self._blobs[e.file]}", e.offset, e.length, e.crc32c)
            for e in record.extents
            if e.length
        ]

    # objects --------------------------------------------------------------------------------------------

    def get(self, bucket: str, key: str) -> Record | None:
        return self._versions.get(bucket, key)

    def newest_version(self, bucket: str, key: str) -> Record | None:
        return self._versions.newest_version(bucket, key)

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        return self._versions.get_version(bucket, key, version)

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> Page:
        return self._versions.list(
            bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit, slots=slots
        )

    def list_entries(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> EntryPage:
        page = self.list(bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit, slots=slots)
        owners = tuple(record.owner for _, record in page.entries)
        entries = tuple(_entry(key, record) for key, record in page.entries)
        return EntryPage(entries, owners, page.prefixes, page.truncated, page.next_after)

    def list_versions(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        version_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> VersionPage:
        return self._versions.list_versions(
            bucket,
            prefix=prefix,
            delimiter=delimiter,
            key_marker=key_marker,
            version_marker=version_marker,
            limit=limit,
            slots=slots,
        )

    def is_empty(self, bucket: str) -> bool:
        return not self._versions.holds(bucket) and not any(
            upload.bucket == bucket for upload in self._uploads.values()
        )

    def writer(self, bucket: str, key: str, *, size: int | None) -> MemoryWriter:
        return MemoryWriter(self, bucket, key, size, None)

    async def put_many(
        self,
        bucket: str,
        objects: Sequence[NewObject],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Sequence[Record]:
        self.require_epoch(context)
        if any(checksums.crc32c(new.data) != new.crc32c for new in objects):
            raise CorruptExtentError("bytes were corrupted in transit")
        return [
            self.enter(bucket, new.key, new.meta, (self.keep(new.data),), (), None, versioning, context)
            for new in objects
        ]

    def enter(
        self,
        bucket: str,
        key: str,
        meta: Meta,
        extents: tuple[Extent, ...],
        parts: tuple[Part, ...],
        conditions: Conditions | None,
        versioning: Versioning,
        context: WriteContext,
    ) -> Record:
        """Judges and sets an object."""
        self.require_epoch(context)
        _judge(conditions, self.get(bucket, key))
        stamp = self._stamp(context)
        record = Record(
            sum(extent.length for extent in extents),
            meta.etag,
            stamp,
            self._clock.now_ms(),
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
        )
        self._versions.add(bucket, key, record)
        return record

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        self.require_epoch(context)
        existing = self.get(bucket, key)
        _judge(conditions, existing)
        if versioning == "" and existing is None:
            return Removed()
        if versioning == "" and existing is not None and not existing.version:
            return self._remove(bucket, key, NULL, context)
        stamp = self._stamp(context)
        version = version_id_of(stamp) if versioning == "Enabled" else ""
        marker = Record(0, "", stamp, self._clock.now_ms(), (), version=version, marker=True)
        return Removed(self._versions.add(bucket, key, marker), marker)

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        return {
            key: await self.delete(bucket, key, versioning=versioning, context=context)
            for key in dict.fromkeys(keys)
        }

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
        self.require_epoch(context)
        found = self.get_version(bucket, key, version)
        _judge(conditions, found)
        if stamp is not None and found is not None and found.stamp != stamp:
            raise ConditionFailedError("replaced", "If-Match")
        return self._remove(bucket, key, version, context)

    def _remove(self, bucket: str, key: str, version: str, context: WriteContext) -> Removed:
        record = self._versions.remove(bucket, key, version)
        if record is None:
            return Removed()
        stamp = self._stamp(context)
        self._replicas.add_tombstone(bucket, key, record.version, stamp)
        return Removed(record, stamp=stamp)

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
        stamp = self._stamp(context)
        return self._versions.amend(bucket, key, version, tags=tags, acl=acl, amended=stamp)

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
        return self.enter(bucket, key, meta, source.extents, source.parts, conditions, versioning, context)

    # uploads --------------------------------------------------------------------------------------------

    async def create_upload(self, draft: Upload, *, context: WriteContext = INTERNAL_WRITE) -> Upload:
        stamp, now = self._stamp(context), self._clock.now_ms()
        upload_id = f"{stamp:016x}{0:016x}"
        upload = msgspec.structs.replace(draft, upload_id=upload_id, initiated=now, stamp=stamp)
        self._uploads[upload_id] = upload
        self._parts[upload_id] = {}
        return upload

    def get_upload(self, bucket: str, key: str, upload_id: str) -> Upload | None:
        upload = self._uploads.get(upload_id)
        return upload if upload is not None and (upload.bucket, upload.key) == (bucket, key) else None

    def part_writer(self, upload: Upload, number: int, size: int | None) -> MemoryWriter:
        return MemoryWriter(self, upload.bucket, upload.key, size, (upload, number))

    def enter_part(
        self, upload: Upload, number: int, meta: Meta, extent: Extent, context: WriteContext
    ) -> Record:
        """Sets a part of an upload in progress."""
        parts = self._running(upload)
        modified, stamp = self._clock.now_ms(), self._stamp(context)
        parts[number] = UploadedPart(
            number, extent.length, meta.etag, meta.checksums, modified, (extent,), stamp
        )
        return Record(extent.length, meta.etag, stamp, modified, (extent,), checksums=meta.checksums)

    def _running(self, upload: Upload) -> dict[int, UploadedPart]:
        if upload.upload_id not in self._uploads:
            raise NoSuchUploadError(f"upload {upload.upload_id} was completed or aborted")
        return self._parts[upload.upload_id]

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        parts = self._parts.get(upload.upload_id, {})
        numbers = sorted(number for number in parts if number > after)
        page = numbers[:limit]
        truncated = limit > 0 and len(numbers) > limit
        return PartPage(tuple(parts[number] for number in page), truncated, page[-1] if truncated else 0)

    def list_uploads(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        id_marker: str = "",
        limit: int = 1000,
        slots: bytes | None = None,
    ) -> UploadPage:
        found: dict[tuple[bytes, str], Upload | None] = {}
        marker = (key_marker.encode(), id_marker or "~")
        for upload in self._uploads.values():
            if upload.bucket != bucket or not upload.key.startswith(prefix):
                continue
            if not is_in(slots, bucket, upload.key):
                continue
            rolled = roll(upload.key, prefix, delimiter)
            name = (rolled.encode(), "") if rolled else (upload.key.encode(), upload.upload_id)
            if name > marker:
                found[name] = None if rolled else upload
        names = sorted(found)
        page = names[:limit]
        truncated = limit > 0 and len(names) > limit
        return UploadPage(
            tuple(entry for name in page if (entry := found[name]) is not None),
            tuple(name[0].decode() for name in page if found[name] is None),
            truncated,
            page[-1][0].decode() if truncated else "",
            page[-1][1] if truncated else "",
        )

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
        stored = self._running(upload)
        chosen = []
        for number, etag in zip(parts, etags or (None,) * len(parts), strict=True):
            if number not in stored or etag not in (None, stored[number].etag):
                raise InvalidPartError(number)
            chosen.append(stored[number])
        extents = tuple(extent for part in chosen for extent in part.extents)
        listed = tuple(Part(part.size, part.etag, part.checksums) for part in chosen)
        record = self.enter(upload.bucket, upload.key, meta, extents, listed, conditions, versioning, context)
        self._replicas.end(upload.bucket, upload.key, upload.upload_id, record.stamp)
        return record

    async def abort_upload(self, upload: Upload, *, context: WriteContext = INTERNAL_WRITE) -> int:
        self._running(upload)
        stamp = self._stamp(context)
        self._replicas.end(upload.bucket, upload.key, upload.upload_id, stamp)
        return stamp

    # as a replica ---------------------------------------------------------------------------------------

    def replica_writer(self, bucket: str, key: str, *, size: int | None) -> MemoryReplicaWriter:
        return MemoryReplicaWriter(self, self._replicas, bucket, key, size)

    async def apply_change(self, change: Change, *, context: WriteContext = INTERNAL_WRITE) -> Applied:
        self.require_epoch(context)
        return self._replicas.apply_change(change)

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        return

    async def wait_upload_end_replicated(self, bucket: str, key: str, upload_id: str) -> None:
        return

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        _judge(conditions, self.get(bucket, key))

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        return self._replicas.tombstone_stamp(bucket, key, what)

    def removals_since(self, bucket: str, key: str, after: int) -> Sequence[tuple[str, int]]:
        return self._replicas.removals_since(bucket, key, after)

    def ended_uploads(self, bucket: str, key: str) -> Sequence[tuple[str, int]]:
        return self._replicas.ended_uploads(bucket, key)

    def revision(self) -> int:
        return self._versions.revision

    def changes_since(self, revision: int, bucket: str) -> StoreChanges | None:
        return self._versions.changes_since(revision, bucket)

    def stats(self) -> StoreStats:
        kept = list(self._versions.all())
        objects = sum(1 for _ in self._versions.current())
        live = sum(record.size for record in kept)
        return StoreStats(
            objects=objects, uploads=len(self._uploads), live_bytes=live, versions=len(kept) - objects
        )


def _judge(conditions: Conditions | None, existing: Record | None) -> None:
    etag, modified = (existing.etag, existing.modified // 1000) if existing else (None, 0)
    failed = failed_write_condition(conditions or Conditions(), etag, modified)
    if failed and existing is None:
        raise ConditionMissingError("If-Match was given, but there is no object with this key")
    if failed:
        raise ConditionFailedError("the object changed meanwhile, or exists already", failed)


if TYPE_CHECKING:
    from meshd.store.api import ObjectStore
    from meshd.store.store import Store

    def _same_interface(store: Store, memory: MemoryStore) -> tuple[ObjectStore, ObjectStore]:
        return store, memory  # mypy says so when one of them drifts


def _entry(key: str, record: Record) -> ObjectEntry:
    algorithm = next(iter(record.checksums), "")
    return ObjectEntry(
        key,
        record.size,
        record.etag,
        record.modified,
        checksum_algorithm=algorithm,
        checksum_type=record.checksum_type,
    )
