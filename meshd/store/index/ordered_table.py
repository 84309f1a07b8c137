"""Ordered tables over LMDB with keys of any length, and cursors restricted to hash slots.

Law: the table knows bytes, not buckets. Keys shorter than LONG are stored as they are; a longer key is
stored under its first LONG bytes plus an 8-byte label. Labels rise with the keys of their group; a full
gap is relabeled. Invariant: the LMDB cursor visits all keys, short and long, in byte order. A listing
through a slot cursor equals the listing of a store that holds only the names of those slots.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


LONG = 440
_LABEL_BITS = 64
_LABELS = 1 << _LABEL_BITS
_LEAST_BITS, _SPARSE = 8, 4 / 3
_STRIDE = 1 << 32
_FIRST = 1 << 63


def _label(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _pack(key: bytes, value: bytes) -> bytes:
    return len(key).to_bytes(2, "big") + key + value


def _unpack(stored: Any) -> tuple[bytes, Any]:
    stop = 2 + int.from_bytes(stored[:2], "big")
    return bytes(stored[2:stop]), stored[stop:]


class OrderedTable:
    """A table with keys of any length. Every method takes an LMDB transaction (with buffers=True or
    False)."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def get(self, txn: Any, key: bytes) -> Any | None:
        """Returns the value (bytes or a buffer valid within `txn`), or None."""
        if len(key) < LONG:
            return txn.get(key, None, self.db)
        with txn.cursor(self.db) as cursor:
            found = self._seek_long(cursor, key)
            return _unpack(cursor.value())[1] if found else None

    def put(self, txn: Any, key: bytes, value: bytes) -> None:
        if len(key) < LONG:
            txn.put(key, value, db=self.db)
            return
        with txn.cursor(self.db) as cursor:
            if self._seek_long(cursor, key):
                place = bytes(cursor.key())
            else:
                place = key[:LONG] + _label(self._free_label(txn, cursor, key))
        txn.put(place, _pack(key, value), db=self.db)

    def delete(self, txn: Any, key: bytes) -> bool:
        if len(key) < LONG:
            return bool(txn.delete(key, db=self.db))
        with txn.cursor(self.db) as cursor:
            return bool(self._seek_long(cursor, key) and cursor.delete())

    def count(self, txn: Any) -> int:
        """Returns the number of keys."""
        return int(txn.stat(self.db)["entries"])

    def open_cursor(self, txn: Any, start: bytes) -> TableCursor:
        """Opens a cursor over (key, value) pairs from the first key ≥ `start`."""
        return TableCursor(self, txn.cursor(self.db), start)

    def open_batch_cursor(self, txn: Any, start: bytes) -> BatchCursor:
        """Opens a cursor that returns many pairs at a time; `txn` must copy (buffers=False)."""
        return BatchCursor(self, txn.cursor(self.db), start)

    def items(self, txn: Any, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, Any]]:
        """Yields all pairs from max(start, prefix) whose key begins with `prefix`, in order."""
        with self.open_cursor(txn, max(start, prefix)) as cursor:
            while cursor.key is not None and cursor.key.startswith(prefix):
                yield cursor.key, cursor.value
                cursor.next()

    def seek(self, cursor: Any, key: bytes) -> bool:
        """Moves to the first entry ≥ key; returns False at the end."""
        if len(key) < LONG:
            return bool(cursor.set_range(key))
        self._seek_long(cursor, key)
        return bool(cursor.key())

    def _seek_long(self, cursor: Any, key: bytes) -> bool:
        """Moves to the first entry ≥ key (in any group); returns True if its key equals `key`."""
        group = key[:LONG]
        low, high = 0, _LABELS  # the wanted label is in [low, high)
        while low < high:
            middle = (low + high) // 2
            inside = cursor.set_range(group + _label(middle)) and cursor.key()[:LONG] == group
            if not inside or _unpack(cursor.value())[0] >= key:
                high = middle
            else:
                low = int.from_bytes(cursor.key()[LONG:], "big") + 1
        if low >= _LABELS:
            positioned = cursor.set_range(group + _label(_LABELS - 1)) and cursor.next()
        else:
            positioned = cursor.set_range(group + _label(low))
        return bool(positioned and cursor.key()[:LONG] == group and _unpack(cursor.value())[0] == key)

    def _free_label(self, txn: Any, cursor: Any, key: bytes) -> int:
        """Returns a label for a new key between its neighbors; `cursor` is at the first entry ≥ key."""
        group = key[:LONG]
        for _ in range(2):
            below, above = self._neighbours(cursor, group)
            label = _between(below, above)
            if label is not None:
                return label
            self._relabel(txn, group, above if below is None else below)
            self._seek_long(cursor, key)
        raise OverflowError("a group of long keys has no free label")  # 2**62 keys with one prefix

    def _neighbours(self, cursor: Any, group: bytes) -> tuple[int | None, int | None]:
        """Returns the labels just before and at the cursor, None where the group has none."""
        above = _label_of(cursor, group)
        moved = cursor.prev() if cursor.key() else cursor.last()
        return _label_of(cursor, group) if moved else None, above

    def _relabel(self, txn: Any, group: bytes, around: int | None) -> int:
        """Spreads labels evenly around a full gap; returns how many entries it moved.

        It takes the smallest enclosing range that is sparse enough; larger ranges must be sparser (Bender et
        al. 2002). So an insertion moves few other entries on average, in whatever order keys arrive.
        """
        assert around is not None
        entries: list[tuple[bytes, bytes]] = []
        low = size = 0
        for bits in range(_LEAST_BITS, _LABEL_BITS + 1):
            size = 1 << bits
            low = around >> bits << bits
            most = int(_SPARSE**bits) if bits < _LABEL_BITS else _LABELS >> 2
            entries = self._within(txn, group, low, low + size, most)
            if len(entries) < most:
                break
        for place, _ in entries:
            txn.delete(place, db=self.db)
        step = size // (len(entries) + 1)
        for number, (_, stored) in enumerate(entries, start=1):
            txn.put(group + _label(low + step * number), stored, db=self.db)
        return len(entries)

    def _within(self, txn: Any, group: bytes, low: int, end: int, most: int) -> list[tuple[bytes, bytes]]:
        """Returns up to `most` entries of a group with labels from `low` up to (excluding) `end`."""
        entries: list[tuple[bytes, bytes]] = []
        with txn.cursor(self.db) as cursor:
            found = cursor.set_range(group + _label(low))
            while found and len(entries) < most:
                label = _label_of(cursor, group)
                if label is None or label >= end:
                    break
                entries.append((bytes(cursor.key()), bytes(cursor.value())))
                found = cursor.next()
        return entries


def _label_of(cursor: Any, group: bytes) -> int | None:
    key = cursor.key()
    return int.from_bytes(key[LONG:], "big") if key[:LONG] == group else None


def _between(below: int | None, above: int | None) -> int | None:
    """Returns a free label between two that leaves space for more; None if there is none."""
    if below is None and above is None:
        return _FIRST
    low, end = -1 if below is None else below, _LABELS if above is None else above
    middle = (low + end) // 2 if end - low > 1 else None
    if below is None:
        return end - _STRIDE if end > _STRIDE else middle
    if above is None:
        return low + _STRIDE if low + _STRIDE < end else middle
    return middle


class TableCursor:
    """A cursor over decoded keys: `key` is None at the end; `value` is valid until the next move."""

    def __init__(self, table: OrderedTable, cursor: Any, start: bytes) -> None:
        self._table, self._cursor = table, cursor
        self.key: bytes | None = None
        self.value: Any = None
        self.seek(start)

    def seek(self, start: bytes) -> None:
        """Moves to the first key ≥ `start`."""
        self._load(self._table.seek(self._cursor, start))

    def next(self) -> None:
        """Moves to the next key."""
        self._load(self._cursor.next())

    def _load(self, found: bool) -> None:
        if not found:
            self.key = self.value = None
            return
        key, value = self._cursor.item()
        if len(key) < LONG:
            self.key, self.value = bytes(key), value
        else:
            self.key, self.value = _unpack(value)

    def __enter__(self) -> TableCursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cursor.close()


class BatchCursor:
    """A cursor that decodes pairs in batches with a few C calls, for pages of many small values."""

    def __init__(self, table: OrderedTable, cursor: Any, start: bytes) -> None:
        self._table, self._cursor = table, cursor
        self.seek(start)

    def seek(self, start: bytes) -> None:
        """Moves to the first key ≥ `start`."""
        found = self._table.seek(self._cursor, start)
        self._pairs = self._cursor.iternext(keys=True, values=True) if found else iter(())

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]:
        """Returns the next `count` pairs, fewer only at the end."""
        pairs: list[tuple[bytes, bytes]] = list(islice(self._pairs, count))
        if pairs and max([len(key) for key, _ in pairs]) >= LONG:
            return [pair if len(pair[0]) < LONG else _unpack(pair[1]) for pair in pairs]
        return pairs

    def __enter__(self) -> BatchCursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cursor.close()


class Cursor(Protocol):
    """The part of `TableCursor` that listings need."""

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> Any: ...

    def seek(self, start: bytes) -> None: ...

    def next(self) -> None: ...


class BatchReader(Protocol):
    """The part of `BatchCursor` that listings need."""

    def seek(self, start: bytes) -> None: ...

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]: ...


def slot_filter(slots: bytes) -> Callable[[bytes], bool]:
    """Returns a predicate: does an index key (`bucket NUL key`) hash to one of `slots` (one byte per slot,
    nonzero if included)? The hash is that of `meshwire.cluster.routes.slot_of`."""
    mask, blake2b = len(slots) - 1, hashlib.blake2b

    def accepts(name: bytes) -> bool:
        digest = blake2b(name, digest_size=8, person=b"mesh-name").digest()
        return slots[int.from_bytes(digest, "big") & mask] != 0

    return accepts


class SlotCursor:
    """A cursor that stops only at accepted names. `tail`: bytes after the name in the table's keys."""

    def __init__(
        self, cursor: Cursor, accepts: Callable[[bytes], bool], within: bytes, tail: int = 0
    ) -> None:
        self._cursor, self._accepts, self._within, self._tail = cursor, accepts, within, tail
        self._settle()

    @property
    def key(self) -> bytes | None:
        return self._cursor.key

    @property
    def value(self) -> Any:
        return self._cursor.value

    def seek(self, start: bytes) -> None:
        """Moves to the first accepted name ≥ `start`."""
        self._cursor.seek(start)
        self._settle()

    def next(self) -> None:
        """Moves to the next accepted name."""
        self._cursor.next()
        self._settle()

    def _settle(self) -> None:
        cursor, tail = self._cursor, self._tail
        while (key := cursor.key) is not None and key.startswith(self._within):
            if self._accepts(key[:-tail] if tail else key):
                return
            cursor.next()


class SlotBatchReader:
    """A batch reader that returns only accepted names."""

    def __init__(self, reader: BatchCursor, accepts: Callable[[bytes], bool], within: bytes) -> None:
        self._reader, self._accepts, self._within = reader, accepts, within

    def seek(self, start: bytes) -> None:
        """Moves to the first name ≥ `start`."""
        self._reader.seek(start)

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]:
        """Returns the next `count` accepted pairs, fewer only at the end."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < count:
            wanted = count - len(found)
            batch = self._reader.next_batch(wanted)
            found += [pair for pair in batch if self._accepts(pair[0])]
            if len(batch) < wanted or not batch[-1][0].startswith(self._within):
                break
        return found
