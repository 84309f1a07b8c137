"""Plans, snapshots and assets that nobody uses any more: collected, after a time in which anybody could.

Law: what a view, a job or a pushed module names stays, and what that names in turn; of the rest what was
written or read lately. Names are hashes, and whatever holds one names it. Invariant: a doubt keeps a
document.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

from meshd.assembly.catalog import RESERVED_BUCKET, SHARED
from meshd.service.translation import store_errors
from meshd.service.views.uses import MINUTE_MS
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from meshd.kit.clock import Clock
    from meshd.service.views.uses import Uses
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

_log = logging.getLogger("meshd.documents")
SAFE_DAYS: Final = 30
_PAGE: Final = 1000
_NAMING: Final = ("plans/", "packs/")
"""Documents that name others; the rest is only named."""
_HASH: Final = re.compile(rb"[0-9a-f]{64}")


def named_in(text: str | bytes) -> set[str]:
    """The hashes a text holds."""
    data = text.encode() if isinstance(text, str) else text
    return {found.decode() for found in _HASH.findall(data)}


class DocumentKeeper:
    """One a node (the steward's). `roots` gives texts of all that names documents. `alone`: whether this node
    is; what others of a mesh use of its documents it cannot know, and collects none."""

    def __init__(
        self,
        store: ObjectStore,
        uses: Uses,
        roots: Callable[[], Iterable[str]],
        clock: Clock,
        alone: Callable[[], bool],
    ) -> None:
        self._store, self._uses, self._roots, self._clock = store, uses, roots, clock
        self._alone = alone

    def __repr__(self) -> str:
        return "<DocumentKeeper>"

    async def sweep(self) -> int:
        """Remove what nobody uses; how many went."""
        if not self._alone():
            return 0
        unused, gone = await asyncio.to_thread(self._unused), 0
        for start in range(0, len(unused), _PAGE):
            uses, first = self._uses.table(), self._first()  # somebody may have come back to one meanwhile
            some = [key for key in unused[start : start + _PAGE] if uses.minute(key) < first]
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, some)
            for key in some:
                metrics.documents_collected.labels(key.partition("/")[0]).inc()
            gone += len(some)
        if gone:
            _log.info("documents that nobody uses are gone", extra={"documents": gone})
        return gone

    def _first(self) -> int:
        """The minute since which a use counts."""
        return self._clock.now_ms() // MINUTE_MS - SAFE_DAYS * 24 * 60

    def _unused(self) -> list[str]:
        uses, first = self._uses.table(), self._first()
        every = {key: record.modified // MINUTE_MS for key, record in self._documents()}
        live = {_digest(key) for key, made in every.items() if max(made, uses.minute(key)) >= first}
        for text in self._roots():  # read after the documents: what is named since was made since
            live |= named_in(text)
        self._follow(live, every)
        return [key for key in every if _digest(key) not in live]

    def _follow(self, live: set[str], every: Iterable[str]) -> None:
        """Adds to `live` what the documents of these names hold."""
        naming = {key for key in every if key.startswith(_NAMING)}
        while found := {key for key in naming if _digest(key) in live}:
            naming -= found
            for key in found:
                live |= self._held(key)

    def _held(self, key: str) -> set[str]:
        record = self._store.get(RESERVED_BUCKET, key)
        return set() if record is None else named_in(self._store.read(record, 0, record.size))

    def _documents(self) -> Iterator[tuple[str, Record]]:
        for prefix in SHARED:
            after, more = "", True
            while more:
                page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_PAGE)
                yield from page.entries
                after, more = page.next_after, page.truncated


def _digest(key: str) -> str:
    return key.rpartition("/")[2]
