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
    """Every method takes the LMDB transaction to work in (with buffers=True or False)."""

    def __init__(self, db: Any) -> None:
        self.db = db

    def get(self, txn: Any, key: bytes) -> Any | None:
        """The value (bytes or a buffer valid within `txn`), or None."""
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
        """How many keys there are."""
        return int(txn.stat(self.db)["entries"])

    def open_cursor(self, txn: Any, start: bytes) -> TableCursor:
        """A walk over (key, value) pairs from the first key ≥ `start`."""
        return TableCursor(self, txn.cursor(self.db), start)

    def open_batch_cursor(self, txn: Any, start: bytes) -> BatchCursor:
        """A walk over many pairs at a time; `txn` must copy (buffers=False)."""
        return BatchCursor(self, txn.cursor(self.db), start)

    def items(self, txn: Any, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, Any]]:
        """All pairs from max(start, prefix) whose key begins with `prefix`, in order."""
        with self.open_cursor(txn, max(start, prefix)) as walk:
            while walk.key is not None and walk.key.startswith(prefix):
                yield walk.key, walk.value
                walk.next()

    def seek(self, cursor: Any, key: bytes) -> bool:
        """Moves to the first entry ≥ key; False at the end."""
        if len(key) < LONG:
            return bool(cursor.set_range(key))
        self._seek_long(cursor, key)
        return bool(cursor.key())

    def _seek_long(self, cursor: Any, key: bytes) -> bool:
        """Moves to the first entry ≥ key (of any group); True when it is the key itself."""
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
        """A label for a new key, between its neighbours; `cursor` stands on the first entry ≥ key."""
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
        """The labels just before the cursor and at it, None where there is none in this group."""
        above = _label_of(cursor, group)
        moved = cursor.prev() if cursor.key() else cursor.last()
        return _label_of(cursor, group) if moved else None, above

    def _relabel(self, txn: Any, group: bytes, around: int | None) -> int:
        """Spreads labels evenly where too many lie close together: in the smallest surroundings that are
        sparse enough, the sparser the larger they are (Bender et al. 2002), so that a key costs the moves of
        few others, in whatever order keys come. How many were moved."""
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
        """The entries of a group with labels from `low` to before `end`, `most` at most."""
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
    """A free label between two, with room for more; None when there is none."""
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
        """Moves to the following key."""
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
    """A cursor that gives decoded pairs by the run, in a few calls of C: for pages of many small values."""

    def __init__(self, table: OrderedTable, cursor: Any, start: bytes) -> None:
        self._table, self._cursor = table, cursor
        self.seek(start)

    def seek(self, start: bytes) -> None:
        """Moves to the first key ≥ `start`."""
        found = self._table.seek(self._cursor, start)
        self._pairs = self._cursor.iternext(keys=True, values=True) if found else iter(())

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next `count` pairs, fewer only at the end."""
        pairs: list[tuple[bytes, bytes]] = list(islice(self._pairs, count))
        if pairs and max([len(key) for key, _ in pairs]) >= LONG:
            return [pair if len(pair[0]) < LONG else _unpack(pair[1]) for pair in pairs]
        return pairs

    def __enter__(self) -> BatchCursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cursor.close()


class Cursor(Protocol):
    """What listings need of `ordered.Walk`."""

    @property
    def key(self) -> bytes | None: ...

    @property
    def value(self) -> Any: ...

    def seek(self, start: bytes) -> None: ...

    def next(self) -> None: ...


class BatchReader(Protocol):
    """What listings need of `ordered.Runs`."""

    def seek(self, start: bytes) -> None: ...

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]: ...


def slot_filter(slots: bytes) -> Callable[[bytes], bool]:
    """Whether a stored name (`bucket NUL key`) lies in one of `slots`: a byte a slot, 0 or not. The same hash
    as `meshwire.cluster.placement.slot_of`."""
    mask, blake2b = len(slots) - 1, hashlib.blake2b

    def chosen(name: bytes) -> bool:
        digest = blake2b(name, digest_size=8, person=b"mesh-name").digest()
        return slots[int.from_bytes(digest, "big") & mask] != 0

    return chosen


class SlotCursor:
    """A walk that stands at chosen names only. `tail`: bytes behind a name in the table's keys."""

    def __init__(self, walk: Cursor, chosen: Callable[[bytes], bool], within: bytes, tail: int = 0) -> None:
        self._walk, self._chosen, self._within, self._tail = walk, chosen, within, tail
        self._settle()

    @property
    def key(self) -> bytes | None:
        return self._walk.key

    @property
    def value(self) -> Any:
        return self._walk.value

    def seek(self, start: bytes) -> None:
        """To the first chosen name ≥ `start`."""
        self._walk.seek(start)
        self._settle()

    def next(self) -> None:
        """To the following chosen name."""
        self._walk.next()
        self._settle()

    def _settle(self) -> None:
        walk, tail = self._walk, self._tail
        while (key := walk.key) is not None and key.startswith(self._within):
            if self._chosen(key[:-tail] if tail else key):
                return
            walk.next()


class SlotBatchReader:
    """The same for a walk by the run."""

    def __init__(self, runs: BatchCursor, chosen: Callable[[bytes], bool], within: bytes) -> None:
        self._runs, self._chosen, self._within = runs, chosen, within

    def seek(self, start: bytes) -> None:
        """To the first name ≥ `start`."""
        self._runs.seek(start)

    def next_batch(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next `count` chosen pairs, fewer only at the end."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < count:
            wanted = count - len(found)
            run = self._runs.next_batch(wanted)
            found += [pair for pair in run if self._chosen(pair[0])]
            if len(run) < wanted or not run[-1][0].startswith(self._within):
                break
        return found
