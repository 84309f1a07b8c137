"""Version tables of the index: the current version in `objects`, all other versions in `older`.

Law: this module knows tables and records; its callers account for the bytes in use. A name is bucket,
NUL, key. Invariant: `objects` holds a key's newest version unless that is a delete marker. A key has at
most one null version, and `nulls` says which entry of `older` it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.records import NULL, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.engine.member_header import Member
    from meshd.store.index.ordered_table import OrderedTable
    from meshd.store.records import Extent

_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode

_NEWEST = (1 << 64) - 1
TAIL = 9  # NUL and the inverted stamp after each name


def older_version_key(name: bytes, stamp: int) -> bytes:
    """Returns the key of a version in `older`: the newest version of a name sorts first."""
    return name + b"\0" + (_NEWEST - stamp).to_bytes(8, "big")


VersionStatus = Literal["new", "known", "stale", "amended", "gone", "overtaken"]
"""The state of a received version on a replica: `known` as received, `stale` if its tags here are older,
`amended` if they are newer, `gone` if it was removed for good, `overtaken` if it is a null version under a
newer one."""


class Versions:
    """The version tables of an index. Every method takes an LMDB transaction."""

    def __init__(self, objects: OrderedTable, older: OrderedTable, nulls: OrderedTable) -> None:
        self.objects, self.older, self.nulls = objects, older, nulls

    # lookups ----------------------------------------------------------------------------------------------

    def current_version(self, txn: Any, name: bytes) -> Record | None:
        """Returns the readable version; None if the newest is a delete marker."""
        raw = self.objects.get(txn, name)
        return None if raw is None else decode(raw)

    def newest_version(self, txn: Any, name: bytes) -> Record | None:
        """Returns the newest version, which may be a delete marker."""
        return self.current_version(txn, name) or self._newest_older(txn, name)

    def _newest_older(self, txn: Any, name: bytes) -> Record | None:
        if not self.older.count(txn):  # as in most stores
            return None
        return next(self.older_versions(txn, name), None)

    def null_version(self, txn: Any, name: bytes) -> Record | None:
        """Returns the null version, which may be a delete marker."""
        current = self.current_version(txn, name)
        return current if current is not None and not current.version else self._older_null(txn, name)

    def find_version(self, txn: Any, name: bytes, version: str) -> Record | None:
        """Returns the version with this id, or the null version."""
        if version == NULL:
            return self.null_version(txn, name)
        stamp = stamp_of_version_id(version)
        found = None if stamp is None else self.version_at(txn, name, stamp)
        return found if found is not None and found.version == version else None

    def version_at(self, txn: Any, name: bytes, stamp: int) -> Record | None:
        """Returns the version with this stamp."""
        current = self.current_version(txn, name)
        if current is not None and current.stamp <= stamp:
            return current if current.stamp == stamp else None
        raw = self.older.get(txn, older_version_key(name, stamp))
        return None if raw is None else decode(raw)

    def version_using_extent(self, txn: Any, member: Member, extent: Extent) -> Record | None:
        """Returns the version that uses this extent of `member`: its own version or, for a part, any version
        of its key."""
        name = f"{member.bucket}\0{member.key}".encode()
        if member.kind == "part":
            users = (record for record in self.all_versions(txn, name) if extent in record.used_extents)
            return next(users, None)
        found = self.version_at(txn, name, int(member.stamp))
        return found if found is not None and extent in found.used_extents else None

    def status_of(self, txn: Any, name: bytes, record: Record, tombstone: int) -> VersionStatus:
        """Returns the VersionStatus of a received version. `tombstone`: the stamp of its recorded
        deletion."""
        existing = self.version_at(txn, name, record.stamp)
        if existing is not None and existing.version == record.version:
            if existing.amended == record.amended:
                return "known"
            return "stale" if existing.amended < record.amended else "amended"
        if tombstone and (record.version or tombstone > record.stamp):
            return "gone"
        if record.version:
            return "new"
        null = self.null_version(txn, name)
        return "new" if null is None or null.stamp < record.stamp else "overtaken"

    def older_versions(self, txn: Any, name: bytes) -> Iterator[Record]:
        """Yields the versions without the current one, newest first."""
        prefix, length = name + b"\0", len(name) + TAIL
        with self.older.open_cursor(txn, older_version_key(name, _NEWEST - 1)) as cursor:
            while cursor.key is not None and cursor.key.startswith(prefix):
                if len(cursor.key) == length:
                    yield decode(cursor.value)
                cursor.next()

    def all_versions(self, txn: Any, name: bytes) -> Iterator[Record]:
        """Yields all versions of a name, newest first."""
        current = self.current_version(txn, name)
        if current is not None:
            yield current
        yield from self.older_versions(txn, name)

    def all_older(self, txn: Any) -> Iterator[tuple[bytes, Record]]:
        """Yields (name, version) of everything that is not current, in order."""
        for key, raw in self.older.items(txn):
            yield key[:-TAIL], decode(raw)

    def _older_null(self, txn: Any, name: bytes) -> Record | None:
        stamp = self.nulls.get(txn, name)
        raw = (
            None
            if stamp is None
            else self.older.get(txn, older_version_key(name, int.from_bytes(stamp, "big")))
        )
        return None if raw is None else decode(raw)

    # changes ----------------------------------------------------------------------------------------------

    def push_version(self, txn: Any, name: bytes, record: Record, newest: Record | None) -> Record | None:
        """Puts `record` on top of `newest`, the newest version so far; returns the null version that it
        replaced."""
        replaced = None
        if not record.version and newest is not None:
            replaced = self._older_null(txn, name) if newest.version else newest
        if newest is not None and newest is not replaced and not newest.marker:
            self.put_older(txn, name, newest)
        if replaced is not None and (replaced is not newest or replaced.marker):
            self._forget(txn, name, replaced)
        if not record.marker:
            self.objects.put(txn, name, _encode(record))
            return replaced
        if newest is not None and not newest.marker:
            self.objects.delete(txn, name)
        self.put_older(txn, name, record)
        return replaced

    def insert_version(self, txn: Any, name: bytes, record: Record) -> Record | None:
        """Inserts a version where its stamp belongs; returns the older null version that a null version
        replaced."""
        newest = self.newest_version(txn, name)
        if newest is None or newest.stamp < record.stamp:
            return self.push_version(txn, name, record, newest)
        replaced = None if record.version else self._older_null(txn, name)
        if replaced is not None:
            self._forget(txn, name, replaced)
        self.put_older(txn, name, record)
        return replaced

    def replace_version(self, txn: Any, name: bytes, record: Record) -> None:
        """Replaces the version that has the stamp of `record`."""
        current = self.current_version(txn, name)
        if current is not None and current.stamp == record.stamp:
            self.objects.put(txn, name, _encode(record))
        else:
            self.older.put(txn, older_version_key(name, record.stamp), _encode(record))

    def remove_version(self, txn: Any, name: bytes, record: Record) -> None:
        """Removes one version. If it was the newest, the next older one becomes the newest."""
        current = self.current_version(txn, name)
        if current is not None and current.stamp != record.stamp:
            self._forget(txn, name, record)
            return
        if current is not None:
            self.objects.delete(txn, name)
        else:
            self._forget(txn, name, record)
        self.promote_newest(txn, name)

    def promote_newest(self, txn: Any, name: bytes) -> None:
        """Makes the newest of the older versions current, unless it is a delete marker."""
        newest = self._newest_older(txn, name)
        if newest is not None and not newest.marker:
            self._forget(txn, name, newest)
            self.objects.put(txn, name, _encode(newest))

    def put_older(self, txn: Any, name: bytes, record: Record) -> None:
        """Inserts a version among the older ones."""
        self.older.put(txn, older_version_key(name, record.stamp), _encode(record))
        if not record.version:
            self.nulls.put(txn, name, record.stamp.to_bytes(8, "big"))

    def _forget(self, txn: Any, name: bytes, record: Record) -> None:
        self.older.delete(txn, older_version_key(name, record.stamp))
        if not record.version:
            self.nulls.delete(txn, name)
