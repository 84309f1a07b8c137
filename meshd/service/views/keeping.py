"""Room for the results of views: the least recently used go when all of them exceed their limit.

Law: a result can always be made again, so any may go; what goes is decided by when it was made or last read.
Memory does not grow with the number of results: they are counted by the minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.service.documents.uses import MINUTE_MS
from meshd.service.semantics.translation import store_errors
from meshd.service.views.making import RESULTS
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.service.documents.uses import LastUses, Uses
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

_PAGE = 1000
_LEAVE = 0.9  # of the limit: what is kept, so that not every new result costs a look at all


def cutoff(used: Mapping[int, int], limit: int) -> int:
    """The first minute whose results stay, given bytes by the minute they were last used in, so that at most
    `limit` bytes do; the newest minute stays in any case."""
    left, kept = limit, max(used, default=0)
    for minute in sorted(used, reverse=True):
        left -= used[minute]
        if left < 0:
            return kept
        kept = minute
    return min(used, default=0)


class ResultKeeper:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, uses: Uses, limit: int) -> None:
        self._store, self._uses, self._limit = store, uses, limit
        self._held: int | None = None

    def __repr__(self) -> str:
        return f"<ResultKeeper, at most {self._limit} bytes>"

    def room(self) -> int | None:
        """Bytes that were free when results were last measured; None before."""
        return None if self._held is None else max(0, int(self._limit * _LEAVE) - self._held)

    async def sweep(self) -> int:
        """Measure the results, remove what is too much; how many went."""
        uses = await asyncio.to_thread(self._uses.table)
        used = await asyncio.to_thread(self._used, uses)
        total = sum(used.values())
        metrics.view_result_bytes.set(total)
        self._held = total
        if total <= self._limit:
            return 0
        first = cutoff(used, int(self._limit * _LEAVE))
        gone = 0
        for keys in await asyncio.to_thread(lambda: list(self._older(uses, first))):
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, keys)
            gone += len(keys)
            await asyncio.sleep(0)
        metrics.view_results_evicted.inc(gone)
        return gone

    def _used(self, uses: LastUses) -> Counter[int]:
        used: Counter[int] = Counter()
        for key, record in self._results():
            used[_last(uses, key, record)] += record.size
        return used

    def _older(self, uses: LastUses, first: int) -> Iterator[list[str]]:
        """Keys last used before the minute `first`, a page at a time."""
        keys: list[str] = []
        for key, record in self._results():
            if _last(uses, key, record) < first:
                keys.append(key)
            if len(keys) == _PAGE:
                yield keys
                keys = []
        if keys:
            yield keys

    def _results(self) -> Iterator[tuple[str, Record]]:
        after, more = "", True
        while more:
            page = self._store.list(RESERVED_BUCKET, prefix=RESULTS, after=after, limit=_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated


def _last(uses: LastUses, key: str, record: Record) -> int:
    """The minute a result was last read, or made."""
    return max(record.modified // MINUTE_MS, uses.minute(key))
