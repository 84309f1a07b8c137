"""Version table of the reference store: for each key the list of its versions, newest last.

Law: as plain as possible; it holds no bytes. The oracle for versions and listings.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING

import msgspec

from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.errors import NoSuchVersionError
from meshd.store.records import NULL, RESERVED_BUCKET, Page, StoreChanges, VersionPage
from meshwire.cluster import slot_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Record
    from meshwire.s3.bucket_settings import Acl


class MemoryVersions:
    """The versions of all keys; what `ObjectStore` says of the methods it shares with this holds here."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], list[Record]] = {}
        self.revision = 0  # rises with every write and deletion of clients
        self._changed: list[tuple[str, str]] = []  # by the revision before

    def __repr__(self) -> str:
        return f"<MemoryVersions keys={len(self._versions)}>"

    def changes_since(self, revision: int, bucket: str) -> StoreChanges:
        """What changed in a bucket since a revision."""
        changed = {key for owner, key in self._changed[revision:] if owner == bucket}
        return StoreChanges(self.revision, tuple(sorted(changed)))

    def _note_change(self, bucket: str, key: str) -> None:
        if bucket != RESERVED_BUCKET:
            self.revision += 1
            self._changed.append((bucket, key))

    def holds(self, bucket: str) -> bool:
        """Whether a bucket has any version of any key."""
        return any(owner == bucket for owner, _ in self._versions)

    def all(self) -> Iterator[Record]:
        """Every version there is."""
        for kept in self._versions.values():
            yield from kept

    def get(self, bucket: str, key: str) -> Record | None:
        newest = self.newest_version(bucket, key)
        return None if newest is None or newest.marker else newest

    def newest_version(self, bucket: str, key: str) -> Record | None:
        return next(reversed(self._versions.get((bucket, key), ())), None)

    def get_version(self, bucket: str, key: str, version: str) -> Record | None:
        named = "" if version == NULL else version or NULL
        return next((r for r in self._versions.get((bucket, key), ()) if r.version == named), None)

    def current(self) -> Iterator[tuple[str, str, Record]]:
        """(bucket, key, record) of everything that can be read."""
        for (bucket, key), versions in self._versions.items():
            if not versions[-1].marker:
                yield bucket, key, versions[-1]

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
        found: dict[str, Record | None] = {}
        for owner, key, record in self.current():
            if owner == bucket and key.startswith(prefix) and is_in(slots, bucket, key):
                rolled = roll(key, prefix, delimiter)
                if (rolled or key).encode() > after.encode():
                    found[rolled or key] = None if rolled else record
        names = sorted(found, key=str.encode)
        page = names[:limit]
        truncated = limit > 0 and len(names) > limit
        return Page(
            tuple((name, entry) for name in page if (entry := found[name]) is not None),
            tuple(name for name in page if found[name] is None),
            truncated,
            page[-1] if truncated else "",
        )

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
        found: dict[tuple[bytes, int], Record | None] = {}
        marker = self._place(bucket, key_marker, version_marker)
        for (owner, key), versions in self._versions.items():
            if owner == bucket and key.startswith(prefix) and is_in(slots, bucket, key):
                rolled = roll(key, prefix, delimiter).encode()
                if rolled and rolled > key_marker.encode():
                    found[rolled, 0] = None
                elif not rolled:
                    places = {(key.encode(), -record.stamp): record for record in versions}
                    found |= {place: record for place, record in places.items() if place > marker}
        names = sorted(found)
        page = names[:limit]
        truncated = limit > 0 and len(names) > limit
        entries = tuple((name.decode(), r) for name, at in page if (r := found[name, at]) is not None)
        last = found[page[-1]] if truncated else None
        return VersionPage(
            entries,
            tuple(record == self.newest_version(bucket, key) for key, record in entries),
            tuple(name.decode() for name, at in page if found[name, at] is None),
            truncated,
            page[-1][0].decode() if truncated else "",
            "" if last is None else last.version or NULL,
        )

    def _place(self, bucket: str, key: str, version: str) -> tuple[bytes, float]:
        """Behind what a page of versions begins: keys in order, then the newest first."""
        if version == NULL:
            null = self.get_version(bucket, key, NULL)
            return key.encode(), -math.inf if null is None else -null.stamp
        stamp = stamp_of_version_id(version)
        return key.encode(), (math.inf if not version else -math.inf) if stamp is None else -stamp

    def add(self, bucket: str, key: str, record: Record) -> Record | None:
        """A new version on top; the null version that it replaced."""
        self._note_change(bucket, key)
        replaced = None if record.version else self.remove(bucket, key, NULL)
        self._versions.setdefault((bucket, key), []).append(record)
        return replaced

    def remove(self, bucket: str, key: str, version: str) -> Record | None:
        """Takes one version out and gives it back."""
        record = self.get_version(bucket, key, version)
        if record is not None:
            self._note_change(bucket, key)
            versions = self._versions[bucket, key]
            versions.remove(record)
            if not versions:
                del self._versions[bucket, key]
        return record

    def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        amended: int = 0,
    ) -> Record:
        found = self.get(bucket, key) if version is None else self.get_version(bucket, key, version)
        if found is None or found.marker:
            raise NoSuchVersionError("the object or this version of it was removed; list its versions")
        return self.replace(
            bucket,
            key,
            msgspec.structs.replace(
                found,
                tags=found.tags if tags is None else tags,
                acl=found.acl if acl is None else acl,
                moves=found.moves + 1,
                amended=amended,
            ),
        )

    def replace(self, bucket: str, key: str, record: Record) -> Record:
        """Puts `record` where the version of the same stamp is."""
        self._note_change(bucket, key)
        versions = self._versions[bucket, key]
        versions[[kept.stamp for kept in versions].index(record.stamp)] = record
        return record

    def insert(self, bucket: str, key: str, record: Record) -> None:
        """A version where its stamp belongs; a null one in place of the null one before."""
        if not record.version:
            self.remove(bucket, key, NULL)
        self._note_change(bucket, key)
        insort(self._versions.setdefault((bucket, key), []), record, key=lambda kept: kept.stamp)


def is_in(slots: bytes | None, bucket: str, key: str) -> bool:
    """Whether a name lies in one of these slots, or all are meant."""
    return slots is None or slots[slot_of(bucket, key, len(slots))] != 0


def roll(key: str, prefix: str, delimiter: str) -> str:
    """The common prefix a key is rolled up to; "" when it stands for itself."""
    at = key.find(delimiter, len(prefix)) if delimiter else -1
    return key[: at + len(delimiter)] if at >= 0 else ""
