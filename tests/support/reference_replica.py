"""Replica half of the reference store: the oracle for the result of applying changes.

Law: as plain as possible; it assigns no stamps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.store.engine.member_header import is_version_id
from meshd.store.errors import (
    NoSuchUploadError,
    ReplicaLacksError,
    SizeMismatchError,
    StoreClosedError,
)
from meshd.store.records import INTERNAL_WRITE, NULL
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
    from meshd.store.records import Extent, Record, Upload, UploadedPart, WriteContext
    from meshd.store.replica.changes import Change, PartOf
    from meshd.store.writer_api import Buffer
    from tests.support.reference_store import MemoryStore
    from tests.support.reference_versions import MemoryVersions


class MemoryReplicas:
    """Changes, entered in a MemoryStore's tables. `seen`: the highest stamp there has been."""

    def __init__(
        self,
        versions: MemoryVersions,
        uploads: dict[str, Upload],
        parts: dict[str, dict[int, UploadedPart]],
    ) -> None:
        self._versions, self._uploads, self._parts = versions, uploads, parts
        self._tombstones: dict[tuple[str, str, str], int] = {}
        self.seen = 0

    def tombstone_stamp(self, bucket: str, key: str, what: str = "") -> int:
        """See ObjectStore.grave."""
        return self._tombstones.get((bucket, key, what), 0)

    def removals_since(self, bucket: str, key: str, after: int) -> list[tuple[str, int]]:
        """See ObjectStore.removals."""
        return [
            (what, stamp)
            for (b, k, what), stamp in self._tombstones.items()
            if (b, k) == (bucket, key) and stamp > after and is_version_id(what)
        ]

    def ended_uploads(self, bucket: str, key: str) -> list[tuple[str, int]]:
        """See ObjectStore.ended_uploads."""
        ends = [
            (what, stamp)
            for (b, k, what), stamp in self._tombstones.items()
            if (b, k) == (bucket, key) and what and not is_version_id(what)
        ]
        return sorted(ends, key=lambda end: end[1], reverse=True)

    def add_tombstone(self, bucket: str, key: str, what: str, stamp: int) -> None:
        """A deletion with this stamp."""
        self._tombstones[bucket, key, what] = max(stamp, self.tombstone_stamp(bucket, key, what))
        self.seen = max(self.seen, stamp)

    def end(self, bucket: str, key: str, upload_id: str, stamp: int) -> None:
        """An upload is over."""
        self.add_tombstone(bucket, key, upload_id, stamp)
        self._uploads.pop(upload_id, None)
        self._parts.pop(upload_id, None)

    def newest_stamp(self, bucket: str, key: str) -> int:
        """The highest stamp known of a name."""
        newest = self._versions.newest_version(bucket, key)
        return max(newest.stamp if newest else 0, self.tombstone_stamp(bucket, key))

    def insert_version(self, bucket: str, key: str, record: Record, extents: tuple[Extent, ...]) -> Applied:
        """A version with its bytes."""
        self.seen = max(self.seen, record.stamp, record.amended)
        existing = self._versions.get_version(bucket, key, record.version or NULL)
        changed = False
        if existing is not None and existing.stamp == record.stamp:
            if existing.amended < record.amended:
                return self._amend(Amended(bucket, key, record))
        elif not self._is_over(bucket, key, record, existing):
            entered = msgspec.structs.replace(without_local_fields(record), extents=extents)
            self._versions.insert(bucket, key, entered)
            changed = True
        return Applied(self.newest_stamp(bucket, key), changed)

    def _is_over(self, bucket: str, key: str, record: Record, null: Record | None) -> bool:
        grave = self.tombstone_stamp(bucket, key, record.version)
        if record.version:
            return grave > 0
        return grave > record.stamp or (null is not None and null.stamp > record.stamp)

    def apply_change(self, change: Change) -> Applied:
        """See ObjectStore.apply."""
        if isinstance(change, Marked):
            return self.insert_version(change.bucket, change.key, change.record, ())
        if isinstance(change, Amended):
            return self._amend(change)
        if isinstance(change, VersionGone):
            return self._remove(change)
        if isinstance(change, UploadBegun):
            return self.begin(change.upload)
        if isinstance(change, UploadEnded):
            known = self.tombstone_stamp(change.bucket, change.key, change.upload_id)
            if not known:
                self.end(change.bucket, change.key, change.upload_id, change.stamp)
            return Applied(0, not known)
        assert isinstance(change, UploadCompleted)
        return self._complete(change)

    def _amend(self, change: Amended) -> Applied:
        told, (bucket, key) = change.record, name_of_change(change)
        self.seen = max(self.seen, told.amended)
        existing = self._versions.get_version(bucket, key, told.version or NULL)
        if existing is None or existing.stamp != told.stamp:
            if self._is_over(bucket, key, told, existing):
                return Applied(self.newest_stamp(bucket, key), False)
            raise ReplicaLacksError("the version whose tags or ACL changed is not here; send it whole")
        if existing.amended >= told.amended:
            return Applied(self.newest_stamp(bucket, key), False, existing.amended)
        amended = msgspec.structs.replace(
            existing, tags=told.tags, acl=told.acl, moves=existing.moves + 1, amended=told.amended
        )
        self._versions.replace(bucket, key, amended)
        return Applied(self.newest_stamp(bucket, key), True, amended.amended)

    def _remove(self, change: VersionGone) -> Applied:
        bucket, key, known = (
            change.bucket,
            change.key,
            self.tombstone_stamp(change.bucket, change.key, change.version),
        )
        if known >= change.stamp or (change.version and known):
            return Applied(self.newest_stamp(bucket, key), False)
        existing = self._versions.get_version(bucket, key, change.version or NULL)
        if existing is not None and (existing.version or existing.stamp < change.stamp):
            self._versions.remove(bucket, key, change.version or NULL)
        self._versions.revision += 1
        self.add_tombstone(bucket, key, change.version, change.stamp)
        return Applied(self.newest_stamp(bucket, key), True)

    def begin(self, upload: Upload) -> Applied:
        """An upload in progress."""
        self.seen = max(self.seen, upload.stamp)
        if upload.upload_id in self._uploads or self.tombstone_stamp(
            upload.bucket, upload.key, upload.upload_id
        ):
            return Applied(0, False)
        self._uploads[upload.upload_id] = upload_without_local_fields(upload)
        self._parts[upload.upload_id] = {}
        return Applied(0, True)

    def insert_part(self, about: PartOf, extent: Extent) -> Applied:
        """A part of an upload."""
        self.begin(about.upload)
        part, parts = about.part, self._parts.get(about.upload.upload_id)
        self.seen = max(self.seen, part.stamp)
        if parts is None:
            raise NoSuchUploadError(f"upload {about.upload.upload_id} was completed or aborted")
        known = parts.get(part.number)
        if known is not None and known.stamp >= part.stamp:
            return Applied(known.stamp, False)
        parts[part.number] = msgspec.structs.replace(part, extents=(extent,), moves=0)
        return Applied(part.stamp, True)

    def _complete(self, change: UploadCompleted) -> Applied:
        (bucket, key), record = name_of_change(change), change.record
        existing = self._versions.get_version(bucket, key, record.version or NULL)
        known = existing is not None and existing.stamp == record.stamp
        extents: tuple[Extent, ...] = ()
        if not known and not self._is_over(bucket, key, record, existing):
            for chosen in change.parts:
                part = self._parts.get(change.upload_id, {}).get(chosen.number)
                if part is None or (part.stamp, part.etag) != (chosen.stamp, chosen.etag):
                    raise ReplicaLacksError(
                        "parts of the completed upload are not here; send the object whole"
                    )
                extents += part.extents
        if not self.tombstone_stamp(bucket, key, change.upload_id):
            self.end(bucket, key, change.upload_id, record.stamp)
        return self.insert_version(bucket, key, record, extents)


class MemoryReplicaWriter:
    """See ReplicaWriter."""

    def __init__(
        self, store: MemoryStore, replicas: MemoryReplicas, bucket: str, key: str, size: int | None
    ) -> None:
        self._store, self._replicas, self._bucket, self._key = store, replicas, bucket, key
        self._declared = size
        self._data = bytearray()
        self._open = True

    async def write(self, data: Buffer) -> None:
        self._expect_open()
        self._data += data
        if self._declared is not None and len(self._data) > self._declared:
            raise SizeMismatchError(f"more than the declared {self._declared} bytes were written")

    async def write_borrowed(self, data: memoryview) -> None:
        await self.write(data)

    async def make_durable(self) -> None:
        self._expect_open()

    async def commit_at_stamp(
        self, record: Record, part: PartOf | None = None, *, context: WriteContext = INTERNAL_WRITE
    ) -> Applied:
        self._expect_open()
        if len(self._data) != record.size or (part is not None and len(self._data) != part.part.size):
            raise SizeMismatchError(f"{len(self._data)} bytes of {record.size} were written")
        self._open = False
        self._store.require_epoch(context)
        extent = self._store.keep(bytes(self._data))
        if part is not None:
            return self._replicas.insert_part(part, extent)
        return self._replicas.insert_version(self._bucket, self._key, record, (extent,))

    async def abort(self) -> None:
        self._open = False

    def _expect_open(self) -> None:
        if not self._open:
            raise StoreClosedError(f"the writer of {self._bucket}/{self._key} is closed; open a new one")


def name_of_change(change: Change) -> tuple[str, str]:
    """(bucket, key) of the name that a change concerns."""
    about = change.upload if isinstance(change, UploadBegun) else change
    return about.bucket, about.key
