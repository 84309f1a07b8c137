"""Entries of samples whose rows other nodes of the mesh now build: the first to go when room is short.

Law: these entries are looked up only when room is short, once for each map, and not on the event loop. None
is dropped without need: a node that left may come back. They are dropped some at a time, between which the
event loop serves others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.transform.decoded_cache.segment_store import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.transform.decoded_cache.sample_set import OwnRows
    from meshd.transform.decoded_cache.segment_store import SegmentStore
    from meshd.transform.decoded_cache.tables import Table


AT_ONCE: Final = 2048
"""Samples whose entries are dropped at once: some milliseconds."""


class _Found(NamedTuple):
    """The samples in a table that other nodes are asked for while this node is asked for its `own`."""

    own: OwnRows
    samples: deque[int]


class UnownedEntries:
    """Of the tables in `segments`. Use on one event loop only."""

    def __init__(self, segments: SegmentStore) -> None:
        self._segments = segments
        self._found: dict[Table, _Found] = {}
        self._wanted: set[Table] = set()

    def __repr__(self) -> str:
        return f"<UnownedEntries, {sum(len(each.samples) for each in self._found.values())} found>"

    def give_back(self, tables: Iterable[Table], wanted: int) -> int | None:
        """Drop such entries of these tables until `wanted` bytes are free, at most AT_ONCE; return the bytes
        that are, None if no such entries are known.

        Tables whose moved entries are not known yet are noted for `find`.
        """
        for table in tables:
            if table.segments and (samples := self._samples(table)):
                return self._segments.give_back(table, islice(_drain(samples), AT_ONCE), wanted)
        return None

    def _samples(self, table: Table) -> deque[int] | None:
        own, found = table.own_rows, self._found.get(table)
        if own is None:
            return None
        if found is None or found.own is not own:
            self._wanted.add(table)
            return None
        return found.samples

    async def find(self) -> None:
        """Find the entries of tables that were short of room."""
        wanted, self._wanted = self._wanted, set()
        for table in wanted:
            own = table.own_rows
            if own is not None:
                samples = await asyncio.to_thread(_moved_rows, table, list(table.segments), own)
                if table.segments:  # else it was dropped in the meantime
                    self._found[table] = _Found(own, deque(samples))

    def forget(self, table: Table) -> None:
        """Forget a table that was dropped."""
        self._found.pop(table, None)
        self._wanted.discard(table)


def _drain(samples: deque[int]) -> Iterator[int]:
    while samples:
        yield samples.popleft()


def _moved_rows(table: Table, segments: Sequence[int], own: OwnRows) -> list[int]:
    kept = table.kept_samples(segments, BLOCK)
    moved: list[int] = kept[~own.include(kept)].tolist() if kept.size else []
    return moved
