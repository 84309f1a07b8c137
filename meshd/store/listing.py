"""One page of a listing from a sorted walk.

Law: pure over the walk. A common prefix is given once and only when it sorts after `after`.
Invariant: work is proportional to what is returned: past a prefix the walk seeks, it does not step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.records import Brief, EntryPage, Page
from meshwire.s3.results import ObjectEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.store.choosing import AnyRuns, AnyWalk
    from meshd.store.records import Record

_brief = msgspec.msgpack.Decoder(Brief).decode
_entry = partial(tuple.__new__, ObjectEntry)  # ObjectEntry's own constructor is a function of Python

# Pairs are read by the run. A run is short enough for the rare records of many parts (a megabyte each) to do
# no harm, and shorter among common prefixes, where all but its first pairs are read for nothing.
_RUN, _SHORTEST = 64, 4


def successor(prefix: bytes) -> bytes:
    """The first byte string after all that begin with `prefix` (UTF-8: its last byte is never 0xFF)."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def common_prefix(name: bytes, prefix: bytes, delimiter: bytes) -> bytes | None:
    """What `name` is rolled up to, None when it stands for itself."""
    if not delimiter:
        return None
    at = name.find(delimiter, len(prefix))
    return name[: at + len(delimiter)] if at >= 0 else None


@dataclass(slots=True)
class Query:
    """A listing request in bytes; `base` is what all keys of the bucket begin with."""

    base: bytes
    prefix: bytes
    delimiter: bytes
    after: bytes
    limit: int

    def start(self) -> bytes:
        """The first stored key that may be in the page."""
        if self.after < self.prefix:
            return self.base + self.prefix
        return self.base + self.after + b"\0" if self.after else self.base


def list_page(walk: AnyWalk, query: Query, decode: Callable[[Any], Record]) -> Page:
    """The page; `walk` must stand at `query.start()`."""
    entries: list[tuple[str, Record]] = []
    prefixes: list[str] = []
    last = b""
    skip = len(query.base)
    whole = query.base + query.prefix
    room = query.limit
    while room >= 0 and (key := walk.key) is not None and key.startswith(whole):
        name = key[skip:]
        rolled = common_prefix(name, query.prefix, query.delimiter)
        if rolled is not None and rolled <= query.after:
            walk.seek(query.base + successor(rolled))
            continue
        if room == 0:
            return Page(tuple(entries), tuple(prefixes), query.limit > 0, last.decode())
        room -= 1
        if rolled is None:
            entries.append((name.decode(), decode(walk.value)))
            last = name
            walk.next()
        else:
            prefixes.append(rolled.decode())
            last = rolled
            walk.seek(query.base + successor(rolled))
    return Page(tuple(entries), tuple(prefixes))


@dataclass(slots=True)
class _Collected:
    """A page in the making; `room`: how many entries or prefixes may still come."""

    query: Query
    room: int
    entries: list[ObjectEntry] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
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
            self.room -= len(pairs)

    def roll(self, prefix: bytes) -> None:
        self.prefixes.append(prefix.decode())
        self.last = prefix
        self.room -= 1

    def page(self, *, truncated: bool) -> EntryPage:
        more = truncated and self.query.limit > 0
        return EntryPage(
            tuple(self.entries),
            tuple(self.owners),
            tuple(self.prefixes),
            more,
            self.last.decode() if more else "",
        )


def entry_page(runs: AnyRuns, query: Query) -> EntryPage:
    """The page as S3 shows it; `runs` must stand at `query.start()`."""
    made = _Collected(query, query.limit)
    whole = query.base + query.prefix
    length = _SHORTEST if query.delimiter else _RUN
    while True:
        wanted = min(length, made.room + 1)
        run = _inside(runs.take(wanted), whole)
        at, rolled = _first_rolled(run, query)
        if at > made.room:
            made.add(run[: made.room])
            return made.page(truncated=True)
        made.add(run[:at])
        if rolled is None:
            if len(run) < wanted:
                return made.page(truncated=False)
            length = min(2 * length, _RUN)
            continue
        if rolled > query.after:
            if made.room == 0:
                return made.page(truncated=True)
            made.roll(rolled)
        runs.seek(query.base + successor(rolled))
        length = max(_SHORTEST, min(2 * at, _RUN))


def _inside(run: list[tuple[bytes, bytes]], whole: bytes) -> list[tuple[bytes, bytes]]:
    """The run up to where its keys leave the prefix."""
    if not run or run[-1][0].startswith(whole):
        return run
    return list(takewhile(lambda pair: pair[0].startswith(whole), run))


def _first_rolled(run: Sequence[tuple[bytes, bytes]], query: Query) -> tuple[int, bytes | None]:
    """(index, common prefix) of the first key that is rolled up; (length of the run, None) without one."""
    if query.delimiter:
        begin = len(query.base)
        for at, (key, _) in enumerate(run):
            rolled = common_prefix(key[begin:], query.prefix, query.delimiter)
            if rolled is not None:
                return at, rolled
    return len(run), None
