"""Indexes of files that no dataset uses any more: collected, on a lone node and on each node of a mesh.

Law: an index is made again when somebody asks for it, so none is worth keeping for its own sake; it stays
while a snapshot pins its file, and for some time after it was made or read. Invariant: a doubt keeps it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

from meshd.assembly.catalog import INDEXES, RESERVED_BUCKET
from meshd.service.documents.uses import MINUTE_MS
from meshd.service.semantics.translation import store_errors
from meshd.telemetry import metrics
from meshwire.columns import ColumnError
from meshwire.snapshotdocuments import pinned_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.kit.clock import Clock
    from meshd.service.documents.uses import Uses
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

_log = logging.getLogger("meshd.documents")
SAFE_DAYS: Final = 30
_PAGE: Final = 1000
_CHOICE: Final = re.compile(r"-[0-9a-f]{32}$")  # of parts of its records


class IndexKeeper:
    """One a node (the steward's)."""

    def __init__(self, store: ObjectStore, uses: Uses, clock: Clock) -> None:
        self._store, self._uses, self._clock = store, uses, clock

    def __repr__(self) -> str:
        return "<IndexKeeper>"

    async def sweep(self) -> int:
        """Remove what nobody uses; how many went."""
        unused = await asyncio.to_thread(self._unused)
        for start in range(0, len(unused), _PAGE):
            some = unused[start : start + _PAGE]
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()
            await asyncio.sleep(0)
        if unused:
            _log.info("indexes of files that no dataset uses are gone", extra={"indexes": len(unused)})
        return len(unused)

    def _unused(self) -> list[str]:
        uses, first = self._uses.table(), self._clock.now_ms() // MINUTE_MS - SAFE_DAYS * 24 * 60
        old = {
            key: etag_of(key)
            for prefix in INDEXES
            for key, record in self._documents(prefix)
            if max(record.modified // MINUTE_MS, uses.minute(key)) < first
        }
        try:
            pinned = self._pinned() if old else set[str]()
        except ColumnError as error:
            _log.warning("a snapshot cannot be read: no index is collected", extra={"why": str(error)})
            return []
        return [key for key, etag in old.items() if etag not in pinned]

    def _pinned(self) -> set[str]:
        """ETags of the files that snapshots were made of by their indexes. Raises ColumnError."""
        found: set[str] = set()
        for key, _ in self._documents("snapshots/"):
            record = self._store.get(RESERVED_BUCKET, key)
            if record is not None:
                found.update(pinned_files(self._store.read(record, 0, record.size)))
        return found

    def _documents(self, prefix: str) -> Iterator[tuple[str, Record]]:
        after, more = "", True
        while more:
            page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated


def etag_of(key: str) -> str:
    """Of the file that an index is of: `lines/ETAG-SIZE`, `tfrecords/ETAG-SIZE-CHOICE`."""
    return _CHOICE.sub("", key.partition("/")[2]).rpartition("-")[0]
