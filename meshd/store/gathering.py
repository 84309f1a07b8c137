"""The versions of all keys as a rebuild finds them, file by file, and their order in the end.

Law: works in the rebuild's fresh index. Memory does not grow with the number of keys.
Invariant: the result does not depend on the order of `enter` and `remove`. Until `arrange` the table of
current objects holds every null version, delete markers too, and the other table everything with an id.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.members import stamp_of
from meshd.store.ordered import OrderedTable
from meshd.store.versions import TAIL, decode, older_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.index import Index
    from meshd.store.records import Record

_encode = msgspec.msgpack.Encoder().encode
_BATCH = 10_000


class GatheredVersions:
    """Every method but `drop_scratch` may be called in any transaction of the rebuild."""

    def __init__(self, index: Index) -> None:
        self._versions = index.versions
        self._voided = OrderedTable(index.env.open_db(b"voided"))
        self._gone = OrderedTable(index.env.open_db(b"gone"))

    def enter(self, txn: Any, name: bytes, record: Record) -> None:
        """A member says that there is this version."""
        if record.version:
            table, place = self._versions.older, older_key(name, record.stamp)
            gone = self._gone.get(txn, place) is not None
        else:
            table, place = self._versions.objects, name
            voided = self._voided.get(txn, name)
            gone = voided is not None and int.from_bytes(voided, "big") > record.stamp
        if gone:
            return
        existing = table.get(txn, place)
        if existing is None or _rank(decode(existing)) < _rank(record):
            table.put(txn, place, _encode(record))

    def remove(self, txn: Any, name: bytes, version: str, stamp: int) -> None:
        """A member says that this version was removed, or all null ones that are older than `stamp`."""
        if version:
            place = older_key(name, stamp_of(version) or 0)
            self._gone.put(txn, place, b"")
            self._versions.older.delete(txn, place)
            return
        voided = self._voided.get(txn, name)
        if voided is None or int.from_bytes(voided, "big") < stamp:
            self._voided.put(txn, name, stamp.to_bytes(16, "big"))
        existing = self._versions.current(txn, name)
        if existing is not None and existing.stamp < stamp:
            self._versions.objects.delete(txn, name)

    def drop(self, txn: Any, name: bytes, record: Record) -> None:
        """Leaves out a version that was entered."""
        if record.version:
            self._versions.older.delete(txn, older_key(name, record.stamp))
        else:
            self._versions.objects.delete(txn, name)

    def arrange(self, txn: Any) -> None:
        """Each key's newest version becomes the current one, its null version an older one if it is older."""
        versions = self._versions
        for batch in _batches(versions.objects, txn):
            for name, raw in batch:
                record = decode(raw)
                if record.marker:
                    versions.objects.delete(txn, name)
                    versions.keep(txn, name, record)
        for batch in _batches(versions.older, txn):
            for name in dict.fromkeys(key[:-TAIL] for key, _ in batch):
                self._raise(txn, name)

    def _raise(self, txn: Any, name: bytes) -> None:
        versions = self._versions
        current, older = versions.current(txn, name), next(versions.older_of(txn, name), None)
        if older is None or (current is not None and current.stamp > older.stamp):
            return
        if current is not None:
            versions.objects.delete(txn, name)
            versions.keep(txn, name, current)
        versions.raise_newest(txn, name)

    def drop_scratch(self, txn: Any) -> None:
        """The last call: what was remembered of removals goes."""
        for table in (self._voided, self._gone):
            txn.drop(table.db)


def _rank(record: Record) -> tuple[int, int, bool]:
    """Highest holds: the stamp, then how often it was written again with the same stamp. Compaction may have
    left a copy that was overtaken by a manifest with new tags."""
    return record.stamp, record.moves, record.manifest is not None


def _batches(table: OrderedTable, txn: Any) -> Iterator[list[tuple[bytes, bytes]]]:
    """All pairs of a table that may be changed meanwhile, up to where it was read."""
    start = b""
    while batch := [(key, bytes(raw)) for key, raw in islice(table.items(txn, start), _BATCH)]:
        yield batch
        start = batch[-1][0] + b"\0"
