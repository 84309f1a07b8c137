"""One page of a listing from a sorted walk.

Law: pure over the walk. A common prefix is given once and only when it sorts after `after`.
Invariant: work is proportional to what is returned: past a prefix the walk seeks, it does not step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshd.store.records import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.store.ordered import Walk
    from meshd.store.records import Record


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


def list_page(walk: Walk, query: Query, decode: Callable[[Any], Record]) -> Page:
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
