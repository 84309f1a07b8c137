"""Damaged documents: those that can be made again leave the quarantine at once, and the store.

Law: a document of `REBUILT_PREFIXES` is removed as soon as it is in quarantine; no other node is asked for
it. The process that needs it makes it again. All others stay in quarantine until another node supplies them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from meshd.core.document_store import REBUILT_PREFIXES, RESERVED_BUCKET
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.store import Store

_log = logging.getLogger("meshd.documents")
_PAGE: Final = 1000
_RESERVED: Final = f"{RESERVED_BUCKET}\0".encode()


class DamagedDocuments:
    """Removes damaged documents of one node. In its coordinator."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<DamagedDocuments of {self._store!r}>"

    async def remove(self) -> int:
        """Removes the documents in quarantine that can be made again; returns how many."""
        quarantine = self._store.quarantine
        damaged = list(self._damaged()) if quarantine.count() else []
        for start in range(0, len(damaged), _PAGE):
            await self._store.delete_many(RESERVED_BUCKET, damaged[start : start + _PAGE])
        if damaged:
            _log.warning("removed damaged documents, which are made again", extra={"number": len(damaged)})
            metrics.documents_damaged.inc(len(damaged))
            await quarantine.prune()
        return len(damaged)

    def _damaged(self) -> Iterator[str]:
        after = (_RESERVED.rstrip(b"\0"), 0)
        while found := self._store.quarantine.entries(_PAGE, after):
            for name, stamp, _ in found:
                if not name.startswith(_RESERVED):
                    return
                key = name.removeprefix(_RESERVED).decode()
                record = self._store.version_at(name, stamp)
                if key.startswith(REBUILT_PREFIXES) and record is not None and record.broken:
                    yield key
            after = found[-1][:2]
