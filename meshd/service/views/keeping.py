"""Room for the results of views: the oldest go when all of them exceed their limit.

Law: a result can always be made again, so any may go; what goes is decided by when it was made. Memory does
not grow with the number of results: they are counted by the minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.service.translation import store_errors
from meshd.service.views.transforms import RESULTS
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

_MINUTE = 60_000
_PAGE = 1000
_LEAVE = 0.9  # of the limit: what is kept, so that not every new result costs a look at all


def cutoff(made: Mapping[int, int], limit: int) -> int:
    """The first minute whose results stay, given bytes by the minute they were made in, so that at most
    `limit` bytes do; the newest minute stays in any case."""
    left, kept = limit, max(made, default=0)
    for minute in sorted(made, reverse=True):
        left -= made[minute]
        if left < 0:
            return kept
        kept = minute
    return min(made, default=0)


class ResultKeeper:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, limit: int) -> None:
        self._store, self._limit = store, limit

    def __repr__(self) -> str:
        return f"<ResultKeeper, at most {self._limit} bytes>"

    async def sweep(self) -> int:
        """Measure the results, remove what is too much; how many went."""
        made = await asyncio.to_thread(self._made)
        total = sum(made.values())
        metrics.view_result_bytes.set(total)
        if total <= self._limit:
            return 0
        first = cutoff(made, int(self._limit * _LEAVE))
        gone = 0
        for keys in await asyncio.to_thread(lambda: list(self._older(first))):
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, keys)
            gone += len(keys)
            await asyncio.sleep(0)
        metrics.view_results_evicted.inc(gone)
        return gone

    def _made(self) -> Counter[int]:
        made: Counter[int] = Counter()
        for _, record in self._results():
            made[record.modified // _MINUTE] += record.size
        return made

    def _older(self, first: int) -> Iterator[list[str]]:
        """Keys made before the minute `first`, a page at a time."""
        keys: list[str] = []
        for key, record in self._results():
            if record.modified // _MINUTE < first:
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
