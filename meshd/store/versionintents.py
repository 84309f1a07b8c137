"""The committer's intents that remove versions, hide them under a delete marker, or change them in place.

Law: like `intents`. What is removed for good is remembered in the data files by a member without data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshd.kit import failpoints
from meshd.store.errors import NoSuchVersionError
from meshd.store.index import object_key
from meshd.store.intents import (
    Intent,
    enter,
    floor_of,
    judge_conditions,
    rewrite,
    used_extents,
    write_manifest,
)
from meshd.store.members import Member, stamp_text, version_of
from meshd.store.records import NULL, Record, Removed

if TYPE_CHECKING:
    from meshd.store.works import Placed, Work
    from meshwire.conditions import Conditions
    from meshwire.s3.settings import Acl, Versioning

_GRAVES_AT_ONCE = 2000


class RemoveVersion(Intent):
    """Removes one version for good; what is under it comes up."""

    def __init__(self, bucket: str, key: str, version: str, conditions: Conditions | None) -> None:
        self.bucket, self.key, self.version, self.conditions = bucket, key, version, conditions
        self.exclusive = conditions is not None
        self.placed: Placed | None = None

    def judge(self, work: Work, txn: Any) -> None:
        existing = work.index.versions.find(txn, object_key(self.bucket, self.key), self.version)
        judge_conditions(self.conditions, existing)

    def place(self, work: Work, txn: Any | None) -> None:
        stamp, version = work.stamp(), "" if self.version == NULL else self.version
        member = Member(
            stamp_text(stamp),
            "deleted",
            self.bucket,
            self.key,
            modified=work.clock.now_ms(),
            version=version,
        )
        self.placed = work.append(member, stamp, (), 0)
        failpoints.hit("store.delete.placed")

    def apply(self, work: Work, txn: Any) -> Removed:
        name = object_key(self.bucket, self.key)
        existing = work.index.versions.find(txn, name, self.version)
        assert self.placed is not None
        if existing is None:
            if self.version == NULL:  # its member ends what is older all the same
                work.graves(txn).bury(txn, name, self.placed.stamp)
            return Removed()
        # of the null version it ends what is older than itself
        stamp = self.placed.stamp if existing.version else work.overtake(self.placed, existing.stamp)
        work.graves(txn).bury(txn, name, stamp, existing.version)
        work.release(used_extents(existing))
        work.index.versions.remove(txn, name, existing)
        return Removed(existing, stamp=stamp)


class PutMarker(Intent):
    """Hides a key under a delete marker; while versioning is suspended the null version goes."""

    def __init__(self, bucket: str, key: str, conditions: Conditions | None, versioning: Versioning) -> None:
        self.bucket, self.key, self.conditions, self.versioning = bucket, key, conditions, versioning
        self.exclusive = conditions is not None
        self.placed: Placed | None = None
        self.modified = 0

    def judge(self, work: Work, txn: Any) -> None:
        judge_conditions(self.conditions, work.index.get_in(txn, self.bucket, self.key))

    def place(self, work: Work, txn: Any | None) -> None:
        stamp = work.stamp()
        self.modified = work.clock.now_ms()
        member = Member(
            stamp_text(stamp),
            "marker",
            self.bucket,
            self.key,
            modified=self.modified,
            version=version_of(stamp) if self.versioning == "Enabled" else "",
        )
        self.placed = work.append(member, stamp, (), 0)
        failpoints.hit("store.marker.placed")

    def apply(self, work: Work, txn: Any) -> Removed:
        placed = self.placed
        assert placed is not None
        name = object_key(self.bucket, self.key)
        newest = work.index.versions.newest(txn, name)
        stamp = work.overtake(placed, floor_of(work, txn, name, newest, placed))
        version = version_of(stamp) if self.versioning == "Enabled" else ""
        marker = Record(0, "", stamp, self.modified, (placed.extent,), version=version, marker=True)
        return Removed(enter(work, txn, name, marker, newest), marker)


class AmendVersion(Intent):
    """Changes tags and ACL of the current or a given version, in a manifest of the same stamp."""

    exclusive = True
    grows = True

    def __init__(
        self, bucket: str, key: str, version: str | None, tags: dict[str, str] | None, acl: Acl | None
    ) -> None:
        self.bucket, self.key, self.version, self.tags, self.acl = bucket, key, version, tags, acl
        self.existing: Record | None = None
        self.record: Record | None = None

    def judge(self, work: Work, txn: Any) -> None:
        name, versions = object_key(self.bucket, self.key), work.index.versions
        found = (
            versions.current(txn, name) if self.version is None else versions.find(txn, name, self.version)
        )
        if found is None or found.marker:
            raise NoSuchVersionError("the object or this version of it was removed; list its versions")
        self.existing = found

    def place(self, work: Work, txn: Any | None) -> None:
        existing = self.existing
        assert existing is not None
        amended = msgspec.structs.replace(
            existing,
            tags=existing.tags if self.tags is None else self.tags,
            acl=existing.acl if self.acl is None else self.acl,
            manifest=None,
            moves=existing.moves + 1,
            amended=work.stamp(),
        )
        self.record = write_manifest(work, self.bucket, self.key, amended)
        failpoints.hit("store.amend.placed")

    def apply(self, work: Work, txn: Any) -> Record:
        assert self.existing is not None
        assert self.record is not None
        return rewrite(work, txn, object_key(self.bucket, self.key), self.record, self.existing)


class ForgetGraves(Intent):
    """Drops a run of graves that are older than a stamp; where the next begins, b"" after the last."""

    exclusive = True

    def __init__(self, before: int, start: bytes) -> None:
        self.before, self.start = before, start

    def apply(self, work: Work, txn: Any) -> bytes:
        return work.graves(txn).forget(txn, self.before, self.start, _GRAVES_AT_ONCE)
