"""Tombstones: which versions and uploads were removed for good, and at which stamp.

A deletion of the null version ends every null version of its key with a lower stamp; a version with an
id and an upload are ended by their id. A write that started before a deletion and commits after it gets
a higher stamp; a replica that missed the deletion learns of it and does not bring the object back.
Law: changes need the index write transaction, lookups any transaction. Tombstones live for
`tombstone_seconds`; a single node keeps them only for writes in flight.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from meshd.store.engine.member_header import is_version_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.index.index import Index

_IN_FLIGHT = 4096  # tombstones that a single node keeps
_MAX_OF_NAME = 10_000  # read for one name
_MOST = 10_000_000  # above this, tombstones expire early, so that they do not fill the index
_META = "graves"
_STAMP = 8


class Tombstone(NamedTuple):
    """`what`: "" for all null versions below `stamp`, or the id of a version or an upload."""

    what: str
    stamp: int


def tombstone_key(name: bytes, what: str = "") -> bytes:
    """Returns the index key of a tombstone: those of a name are adjacent, the null version's first."""
    return name + b"\0" + what.encode() if what else name


class Tombstones:
    """One commit group's view of the tombstones; `save` writes what it changed. `keep`: keep them for
    `tombstone_seconds`."""

    def __init__(self, index: Index, txn: Any, *, keep: bool = False) -> None:
        self._index, self._keep = index, keep
        recorded: list[int] = index.get_meta(_META, txn) or [0, 0]
        self._last, self.since = recorded
        self._changed = False

    def add(self, txn: Any, name: bytes, stamp: int, what: str = "") -> None:
        """Records that a deletion with this stamp removed the null version of a key, or the version or upload
        with id `what`. Deletions may be added in any order."""
        if what and not self._keep:
            return  # ids are never reused, so no write in flight can bring this one back
        if self.stamp_of(txn, name, what) < stamp:
            self._index.tombstones.put(txn, tombstone_key(name, what), stamp.to_bytes(_STAMP, "big"))
        self._last = max(self._last, stamp)
        self._changed = True

    def stamp_of(self, txn: Any, name: bytes, what: str = "") -> int:
        """Returns the stamp of the recorded deletion; 0 if there is none."""
        raw = self._index.tombstones.get(txn, tombstone_key(name, what))
        return 0 if raw is None else int.from_bytes(raw, "big")

    def stamp_floor(self, txn: Any, name: bytes, stamp: int) -> int:
        """Returns the stamp of a deletion that a write of this process with `stamp` may have missed; 0 if
        there is none. A forgotten deletion is assumed to concern every key: that only costs a write in flight
        a new stamp."""
        if stamp > self._last:
            return 0
        return self.since if stamp <= self.since else self.stamp_of(txn, name)

    def prune(self, txn: Any, before: int, start: bytes, limit: int) -> bytes:
        """Drops tombstones older than `before` among the next `limit` from `start`; returns where to
        continue, b"" at the end."""
        table = self._index.tombstones
        seen = [(key, int.from_bytes(raw, "big")) for key, raw in islice(table.items(txn, start), limit)]
        for key, stamp in seen:
            if stamp < before:
                table.delete(txn, key)
        self.since = max(self.since, before)
        self._changed = True
        return seen[-1][0] + b"\0" if len(seen) == limit else b""

    def mark_incomplete(self, since: int) -> None:
        """Declares that removals up to this stamp may be missing: an index rebuild does not find those whose
        members are gone."""
        self.since, self._changed = max(self.since, since), True

    def save(self, txn: Any) -> None:
        """Writes the changes. Call it before the commit."""
        if not self._changed:
            return
        if not self._keep and self._index.tombstones.count(txn) > _IN_FLIGHT:
            txn.drop(self._index.tombstones.db, delete=False)
            self.since = self._last
        self._index.put_meta(txn, _META, (self._last, self.since))


def tombstones_complete_since(index: Index, txn: Any) -> int:
    """Returns the stamp above which every removal is recorded."""
    recorded: list[int] = index.get_meta(_META, txn) or [0, 0]
    return recorded[1]


def prunable_before(index: Index, txn: Any, now: int, seconds: float) -> int:
    """Returns the stamp below which tombstones have expired, or must go because there are too many."""
    before = now - round(seconds * 1e9)
    if index.tombstones.count(txn) > _MOST:
        before = max(before, (max(tombstones_complete_since(index, txn), before) + now) // 2)
    return max(0, before)


def tombstones_of_name(index: Index, txn: Any, name: bytes) -> Iterator[Tombstone]:
    """Yields the tombstones of one name."""
    for key, raw in index.tombstones.items(txn, name, name):
        what = key[len(name) :]
        if what and what[0]:
            return  # belongs to a longer key
        yield Tombstone(what[1:].decode(), int.from_bytes(raw, "big"))


def removals_since(index: Index, txn: Any, name: bytes, after: int) -> list[tuple[str, int]]:
    """Returns (id, stamp) of the removed versions of a name with stamps above `after`, among the first
    tombstones of the name."""
    tombstones = islice(tombstones_of_name(index, txn, name), _MAX_OF_NAME)
    return [(what, stamp) for what, stamp in tombstones if stamp > after and is_version_id(what)]


def ended_uploads(index: Index, txn: Any, name: bytes) -> list[tuple[str, int]]:
    """Returns (id, stamp) of the ended uploads of a name, the last end first, among the first tombstones of
    the name."""
    tombstones = islice(tombstones_of_name(index, txn, name), _MAX_OF_NAME)
    ends = [(what, stamp) for what, stamp in tombstones if what and not is_version_id(what)]
    return sorted(ends, key=lambda end: end[1], reverse=True)
