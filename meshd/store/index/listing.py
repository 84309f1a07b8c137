"""Listing pages of objects and of object versions, built from sorted index cursors.

Law: pure over its cursors. A common prefix appears once, and only if it sorts after `after`. A key's
current version comes before its older ones, which are stored newest first.
Invariant: the work is proportional to the size of the page: past a common prefix the cursors seek.
"""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.index.ordered_table import SlotCursor
from meshd.store.index.versions import TAIL, decode, older_version_key
from meshd.store.records import NULL, Brief, EntryPage, Page, VersionPage
from meshwire.s3.result_types import ObjectEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.store.index.ordered_table import BatchReader, Cursor
    from meshd.store.index.versions import Versions
    from meshd.store.records import Record


_brief = msgspec.msgpack.Decoder(Brief).decode
_entry = partial(tuple.__new__, ObjectEntry)  # faster than ObjectEntry's constructor, a Python function

# Pairs are read in batches. A batch is short enough that rare records of many parts (a megabyte each) do no
# harm, and shorter among common prefixes, where all pairs after the first are read in vain.
_RUN, _SHORTEST = 64, 4


def successor(prefix: bytes) -> bytes:
    """Returns the first byte string after all that begin with `prefix` (its last byte is never 0xFF in
    UTF-8)."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def common_prefix(name: bytes, prefix: bytes, delimiter: bytes) -> bytes | None:
    """Returns the common prefix that `name` is rolled up to; None if it is listed itself."""
    if not delimiter:
        return None
    at = name.find(delimiter, len(prefix))
    return name[: at + len(delimiter)] if at >= 0 else None


class ListingQuery(msgspec.Struct):
    """A listing request in bytes. `base` is the prefix of all keys of the bucket."""

    base: bytes
    prefix: bytes
    delimiter: bytes
    after: bytes
    limit: int

    def start(self) -> bytes:
        """Returns the first index key that the page may contain."""
        if self.after < self.prefix:
            return self.base + self.prefix
        return self.base + self.after + b"\0" if self.after else self.base


def list_page(cursor: Cursor, query: ListingQuery, decode: Callable[[Any], Record]) -> Page:
    """Builds the page. `cursor` must be positioned at `query.start()`."""
    entries: list[tuple[str, Record]] = []
    prefixes: list[str] = []
    last = b""
    skip = len(query.base)
    whole = query.base + query.prefix
    remaining = query.limit
    while remaining >= 0 and (key := cursor.key) is not None and key.startswith(whole):
        name = key[skip:]
        rolled = common_prefix(name, query.prefix, query.delimiter)
        if rolled is not None and rolled <= query.after:
            cursor.seek(query.base + successor(rolled))
            continue
        if remaining == 0:
            return Page(tuple(entries), tuple(prefixes), query.limit > 0, last.decode())
        remaining -= 1
        if rolled is None:
            entries.append((name.decode(), decode(cursor.value)))
            last = name
            cursor.next()
        else:
            prefixes.append(rolled.decode())
            last = rolled
            cursor.seek(query.base + successor(rolled))
    return Page(tuple(entries), tuple(prefixes))


class _EntryPageBuilder(msgspec.Struct):
    """A page under construction. `remaining`: how many more entries or prefixes it may take."""

    query: ListingQuery
    remaining: int
    entries: list[ObjectEntry] = msgspec.field(default_factory=list)
    owners: list[str] = msgspec.field(default_factory=list)
    prefixes: list[str] = msgspec.field(default_factory=list)
    last: bytes = b""

    def add(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        skip = len(self.query.base)
        briefs = [_brief(value) for _, value in pairs]
        self.owners += [brief.owner for brief in briefs]
        self.entries += [
            _entry(
                (
                    key[skip:].decode(),
                    brief.size,
                    brief.etag,
                    brief.modified,
                    None,
                    "STANDARD",
                    next(iter(brief.checksums), ""),
                    brief.checksum_type,
                )
            )
            for (key, _), brief in zip(pairs, briefs, strict=True)
        ]
        if pairs:
            self.last = pairs[-1][0][skip:]
            self.remaining -= len(pairs)

    def add_prefix(self, prefix: bytes) -> None:
        self.prefixes.append(prefix.decode())
        self.last = prefix
        self.remaining -= 1

    def build(self, *, truncated: bool) -> EntryPage:
        more = truncated and self.query.limit > 0
        return EntryPage(
            tuple(self.entries),
            tuple(self.owners),
            tuple(self.prefixes),
            more,
            self.last.decode() if more else "",
        )


def entry_page(reader: BatchReader, query: ListingQuery) -> EntryPage:
    """Builds the page in the form S3 shows it. `reader` must be positioned at `query.start()`."""
    page = _EntryPageBuilder(query, query.limit)
    whole = query.base + query.prefix
    length = _SHORTEST if query.delimiter else _RUN
    while True:
        wanted = min(length, page.remaining + 1)
        batch = _inside(reader.next_batch(wanted), whole)
        at, rolled = _first_rolled(batch, query)
        if at > page.remaining:
            page.add(batch[: page.remaining])
            return page.build(truncated=True)
        page.add(batch[:at])
        if rolled is None:
            if len(batch) < wanted:
                return page.build(truncated=False)
            length = min(2 * length, _RUN)
            continue
        if rolled > query.after:
            if page.remaining == 0:
                return page.build(truncated=True)
            page.add_prefix(rolled)
        reader.seek(query.base + successor(rolled))
        length = max(_SHORTEST, min(2 * at, _RUN))


def _inside(batch: list[tuple[bytes, bytes]], whole: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the batch up to where its keys leave the prefix."""
    if not batch or batch[-1][0].startswith(whole):
        return batch
    return list(takewhile(lambda merged: merged[0].startswith(whole), batch))


def _first_rolled(batch: Sequence[tuple[bytes, bytes]], query: ListingQuery) -> tuple[int, bytes | None]:
    """Returns (index, common prefix) of the first key that is rolled up; (length of the batch, None) if none
    is."""
    if query.delimiter:
        begin = len(query.base)
        for at, (key, _) in enumerate(batch):
            rolled = common_prefix(key[begin:], query.prefix, query.delimiter)
            if rolled is not None:
                return at, rolled
    return len(batch), None


class VersionQuery(msgspec.Struct):
    """A version listing request in bytes. `base` is the prefix of all keys of the bucket."""

    base: bytes
    prefix: bytes
    delimiter: bytes
    key_marker: bytes
    version_marker: str
    limit: int


class _VersionPageBuilder(msgspec.Struct):
    """A page under construction, and the position after it."""

    entries: list[tuple[str, Record]] = msgspec.field(default_factory=list)
    latest: list[bool] = msgspec.field(default_factory=list)
    prefixes: list[str] = msgspec.field(default_factory=list)
    last: tuple[str, str] = ("", "")

    def add_version(self, key: str, record: Record, *, latest: bool) -> None:
        self.entries.append((key, record))
        self.latest.append(latest)
        self.last = (key, record.version or NULL)

    def add_prefix(self, prefix: str) -> None:
        self.prefixes.append(prefix)
        self.last = (prefix, "")

    def end(self, *, truncated: bool) -> VersionPage:
        following = self.last if truncated else ("", "")
        return VersionPage(
            tuple(self.entries), tuple(self.latest), tuple(self.prefixes), truncated, *following
        )


class _MergedCursor:
    """Merges the cursors of current and older versions. `name` is the current position, None at the end."""

    def __init__(self, objects: Cursor, older: Cursor) -> None:
        self._objects, self._older = objects, older
        self._settle()

    def _settle(self) -> None:
        one, other = self._objects.key, self._older.key
        other = None if other is None else other[:-TAIL]
        self.at_current = one is not None and (other is None or one <= other)
        self.name = one if self.at_current else other

    def seek(self, start: bytes) -> None:
        """Moves both cursors to the first key ≥ `start`."""
        self._objects.seek(start)
        self._older.seek(start)
        self._settle()

    def next_version(self) -> Record:
        """Returns the version at the current position and advances."""
        cursor = self._objects if self.at_current else self._older
        record: Record = decode(cursor.value)
        cursor.next()
        self._settle()
        return record


def list_versions(
    versions: Versions, txn: Any, query: VersionQuery, accepts: Callable[[bytes], bool] | None = None
) -> VersionPage:
    """Builds the page; see ObjectStore.list_versions."""
    current_from, older_from = _starts(versions, txn, query)
    with (
        versions.objects.open_cursor(txn, current_from) as objects,
        versions.older.open_cursor(txn, older_from) as older,
    ):
        if accepts is None:
            return _build_page(_MergedCursor(objects, older), versions, txn, query)
        within = query.base + query.prefix
        merged = _MergedCursor(SlotCursor(objects, accepts, within), SlotCursor(older, accepts, within, TAIL))
        return _build_page(merged, versions, txn, query)


def _starts(versions: Versions, txn: Any, query: VersionQuery) -> tuple[bytes, bytes]:
    """Returns the start positions of the two cursors: after what earlier pages listed."""
    if query.key_marker < query.prefix or not query.key_marker:
        return (query.base + query.prefix,) * 2
    name = query.base + query.key_marker
    if not query.version_marker:
        return name + b"\0", older_version_key(name, 0)
    stamp = _stamp(versions, txn, name, query.version_marker)
    if stamp is None:  # the marker's version was removed: list the key again rather than skip versions of it
        return name, name
    current = versions.current_version(txn, name)
    seen = current is None or current.stamp >= stamp
    return name + b"\0" if seen else name, older_version_key(name, stamp - 1)


def _stamp(versions: Versions, txn: Any, name: bytes, version: str) -> int | None:
    if version != NULL:
        return stamp_of_version_id(version)
    null = versions.null_version(txn, name)
    return None if null is None else null.stamp


def _build_page(merged: _MergedCursor, versions: Versions, txn: Any, query: VersionQuery) -> VersionPage:
    page, remaining, skip = _VersionPageBuilder(), query.limit, len(query.base)
    begun = query.base + query.key_marker  # an earlier page may have listed newer versions of this key
    whole, before = query.base + query.prefix, b""
    while remaining >= 0 and (name := merged.name) is not None and name.startswith(whole):
        rolled = common_prefix(name[skip:], query.prefix, query.delimiter)
        if rolled is not None and rolled <= query.key_marker:
            merged.seek(query.base + successor(rolled))
            continue
        if remaining == 0:
            return page.end(truncated=query.limit > 0)
        remaining -= 1
        if rolled is None:
            first, record = merged.at_current or name != before, merged.next_version()
            if name == begun:
                first = record == versions.newest_version(txn, name)
            page.add_version(name[skip:].decode(), record, latest=first)
            before = name
        else:
            page.add_prefix(rolled.decode())
            merged.seek(query.base + successor(rolled))
    return page.end(truncated=False)
