"""One page of the versions of all keys: `objects` and the older versions walked side by side.

Law: like `listing`. A key's current version comes before its older ones, which are stored the newest first.
Invariant: work is proportional to what is returned: past a common prefix both walks seek.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshd.store.choosing import ChosenWalk
from meshd.store.listing import common_prefix, successor
from meshd.store.members import stamp_of
from meshd.store.records import NULL, VersionPage
from meshd.store.versions import TAIL, decode, older_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.store.choosing import AnyWalk
    from meshd.store.records import Record
    from meshd.store.versions import Versions


@dataclass(slots=True)
class VersionQuery:
    """A request in bytes; `base` is what all keys of the bucket begin with."""

    base: bytes
    prefix: bytes
    delimiter: bytes
    key_marker: bytes
    version_marker: str
    limit: int


@dataclass(slots=True)
class _Gathering:
    """The page as it grows, and where the next one begins."""

    entries: list[tuple[str, Record]] = field(default_factory=list)
    latest: list[bool] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    last: tuple[str, str] = ("", "")

    def take(self, key: str, record: Record, *, latest: bool) -> None:
        self.entries.append((key, record))
        self.latest.append(latest)
        self.last = (key, record.version or NULL)

    def roll(self, prefix: str) -> None:
        self.prefixes.append(prefix)
        self.last = (prefix, "")

    def end(self, *, truncated: bool) -> VersionPage:
        following = self.last if truncated else ("", "")
        return VersionPage(
            tuple(self.entries), tuple(self.latest), tuple(self.prefixes), truncated, *following
        )


class _Pair:
    """Both walks; `name` is what they stand at, None at the end."""

    def __init__(self, objects: AnyWalk, older: AnyWalk) -> None:
        self._objects, self._older = objects, older
        self._settle()

    def _settle(self) -> None:
        one, other = self._objects.key, self._older.key
        other = None if other is None else other[:-TAIL]
        self.at_current = one is not None and (other is None or one <= other)
        self.name = one if self.at_current else other

    def seek(self, start: bytes) -> None:
        """Both to the first key ≥ `start`."""
        self._objects.seek(start)
        self._older.seek(start)
        self._settle()

    def take(self) -> Record:
        """The version they stand at; then on to the next."""
        walk = self._objects if self.at_current else self._older
        record: Record = decode(walk.value)
        walk.next()
        self._settle()
        return record


def list_versions(
    versions: Versions, txn: Any, query: VersionQuery, chosen: Callable[[bytes], bool] | None = None
) -> VersionPage:
    """See ObjectStore.list_versions."""
    current_from, older_from = _starts(versions, txn, query)
    with versions.objects.walk(txn, current_from) as objects, versions.older.walk(txn, older_from) as older:
        if chosen is None:
            return _gather(_Pair(objects, older), versions, txn, query)
        within = query.base + query.prefix
        pair = _Pair(ChosenWalk(objects, chosen, within), ChosenWalk(older, chosen, within, TAIL))
        return _gather(pair, versions, txn, query)


def _starts(versions: Versions, txn: Any, query: VersionQuery) -> tuple[bytes, bytes]:
    """Where the two walks begin: behind what was given out before."""
    if query.key_marker < query.prefix or not query.key_marker:
        return (query.base + query.prefix,) * 2
    name = query.base + query.key_marker
    if not query.version_marker:
        return name + b"\0", older_key(name, 0)
    stamp = _stamp(versions, txn, name, query.version_marker)
    if stamp is None:  # it went meanwhile, and its place with it: rather twice than not at all
        return name, name
    current = versions.current(txn, name)
    seen = current is None or current.stamp >= stamp
    return name + b"\0" if seen else name, older_key(name, stamp - 1)


def _stamp(versions: Versions, txn: Any, name: bytes, version: str) -> int | None:
    if version != NULL:
        return stamp_of(version)
    null = versions.null(txn, name)
    return None if null is None else null.stamp


def _gather(pair: _Pair, versions: Versions, txn: Any, query: VersionQuery) -> VersionPage:
    page, room, skip = _Gathering(), query.limit, len(query.base)
    begun = query.base + query.key_marker  # of this key newer versions may have been given out before
    whole, before = query.base + query.prefix, b""
    while room >= 0 and (name := pair.name) is not None and name.startswith(whole):
        rolled = common_prefix(name[skip:], query.prefix, query.delimiter)
        if rolled is not None and rolled <= query.key_marker:
            pair.seek(query.base + successor(rolled))
            continue
        if room == 0:
            return page.end(truncated=query.limit > 0)
        room -= 1
        if rolled is None:
            first, record = pair.at_current or name != before, pair.take()
            if name == begun:
                first = record == versions.newest(txn, name)
            page.take(name[skip:].decode(), record, latest=first)
            before = name
        else:
            page.roll(rolled.decode())
            pair.seek(query.base + successor(rolled))
    return page.end(truncated=False)
