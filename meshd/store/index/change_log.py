"""The log of changed names: which names of clients the last commits changed, for listings made again.

An entry belongs to one commit: the revision before it, the revision after it, and the names whose current
version it changed, or ranges of names if they are many.

Law: the entries that follow a revision form a chain, in which each begins where the one before ends. A
commit of a release that does not write the log breaks the chain, and then nothing is known of what changed:
the log never leaves out a change. It is bounded, and can be lost: it only saves work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.index.ordered_table import OrderedTable
from meshd.store.records import RESERVED_BUCKET, StoreChanges

_NAMES: Final = 64
_BYTES: Final = 1024
"""Names that an entry has, and their bytes: an entry fits into a page of the index. Ranges replace more."""
_BUCKETS: Final = 8
_KEPT: Final = 2048
"""Entries from which on the older half is removed."""
_DOCUMENTS: Final = RESERVED_BUCKET.encode() + b"\0"

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """`before`: the revision before the commit. `names` (bucket, NUL, key) that it changed; `ranges`: the
    first and the last of them by bucket, if they are too many; None: not known."""

    before: int
    names: tuple[bytes, ...] = ()
    ranges: tuple[tuple[bytes, bytes], ...] | None = ()


_encode = msgspec.msgpack.Encoder().encode
_entry = msgspec.msgpack.Decoder(_Entry).decode


class RecordedTable(OrderedTable):
    """The table of current versions, which collects the names that a transaction changes."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self._names: list[bytes] = []
        self._bytes = 0
        self._ranges: dict[bytes, tuple[bytes, bytes]] = {}  # by bucket, once there are too many names

    @property
    def is_changed(self) -> bool:
        """Whether the transaction changed a name of a client."""
        return bool(self._names or self._ranges)

    def put(self, txn: Any, key: bytes, value: bytes) -> None:
        self._note(key)
        super().put(txn, key, value)

    def delete(self, txn: Any, key: bytes) -> bool:
        self._note(key)
        return super().delete(txn, key)

    def forget_changes(self) -> None:
        """Begins with no names: a transaction has begun."""
        if self._names or self._ranges:
            self._names, self._bytes, self._ranges = [], 0, {}

    def entry(self, before: int) -> bytes:
        """Returns the log's entry for this transaction; `before`: the revision before it."""
        if len(self._ranges) > _BUCKETS:
            return _encode(_Entry(before, (), None))
        return _encode(_Entry(before, tuple(self._names), tuple(self._ranges.values())))

    def _note(self, name: bytes) -> None:
        if name.startswith(_DOCUMENTS):
            return
        if self._ranges:
            self._extend(name)
            return
        self._names.append(name)
        self._bytes += len(name)
        if len(self._names) > _NAMES or self._bytes > _BYTES:
            names, self._names = self._names, []
            for each in names:
                self._extend(each)

    def _extend(self, name: bytes) -> None:
        bucket = name[: name.index(b"\0")]
        first, last = self._ranges.get(bucket, (name, name))
        self._ranges[bucket] = min(first, name), max(last, name)


class ChangeLog:
    """The table of the log: by the revision after a commit, its entry."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def append(self, txn: Any, after: int, entry: bytes) -> None:
        """Adds the entry of a commit, and removes the oldest ones if there are many."""
        txn.put(_number(after), entry, db=self._db)
        entries = txn.stat(self._db)["entries"]
        if entries <= _KEPT:
            return
        with txn.cursor(self._db) as cursor:
            found = cursor.first()
            for _ in range(entries - _KEPT // 2):
                if not (found and cursor.delete()):
                    break

    def since(self, txn: Any, revision: int, now: int, bucket: str) -> StoreChanges | None:
        """Returns what changed in a bucket from one revision to another, None if that is not known."""
        names, ranges = set[bytes](), list[tuple[bytes, bytes]]()
        for entry in self._chain(txn, revision, now):
            if entry is None or entry.ranges is None:
                return None
            names.update(entry.names)
            ranges += entry.ranges
        start = bucket.encode() + b"\0"
        skip = len(start)
        return StoreChanges(
            now,
            tuple(name[skip:].decode() for name in sorted(names) if name.startswith(start)),
            tuple(
                (first[skip:].decode(), last[skip:].decode())
                for first, last in ranges
                if first.startswith(start)
            ),
        )

    def _chain(self, txn: Any, revision: int, now: int) -> Iterator[_Entry | None]:
        """Yields the entries from `now` back to a revision; None where the chain is broken."""
        with txn.cursor(self._db) as cursor:
            while now != revision:
                found = now > revision and cursor.set_key(_number(now))
                entry = _entry(cursor.value()) if found else None
                yield entry
                if entry is None or entry.before >= now:
                    return
                now = entry.before


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
