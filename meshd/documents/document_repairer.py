"""Document repairer: ends the quarantine of documents, which no copy of the same version ends.

Law: a shared document is named by its content, and each node stores its copy by itself, so other nodes have
it under other stamps. It is fetched by its name. What no node has any more is removed if a node or a
client makes it again; assets and packs stay in quarantine, as objects of clients do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.core.document_store import (
    INCARNATIONS_PREFIX,
    REBUILT_PREFIXES,
    RESERVED_BUCKET,
    SHARED_PREFIXES,
)
from meshd.store.replica.inventory import HeldName, HeldVersion

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.document_store import DocumentStore
    from meshd.store.store import Store

_log = logging.getLogger("meshd.documents")
_REMOVED: Final = ("snapshots/", "plans/", INCARNATIONS_PREFIX, *REBUILT_PREFIXES)
"""Prefixes of documents that are made again."""


class DocumentRepairer:
    """Repairs the quarantined documents of a node. One per node, in its coordinator."""

    def __init__(self, store: Store, documents: DocumentStore, mesh: ClusterView) -> None:
        self._store, self._documents, self._mesh = store, documents, mesh

    def __repr__(self) -> str:
        return f"<DocumentRepairer of {self._store!r}>"

    async def repair_quarantined(self, count: Callable[[int], None]) -> None:
        """Try once to restore or to remove each document in quarantine; calls `count` with the number of
        those that left it. Raises StoreError."""
        after, fetched, removed = None, 0, 0
        while found := self._store.quarantine.entries(after=after):
            after = found[-1][:2]
            for name, stamp, _ in found:
                bucket, _, key = name.decode().partition("\0")
                record = self._store.version_at(name, stamp) if bucket == RESERVED_BUCKET else None
                if record is None or not record.broken:
                    continue
                shared = key.startswith(SHARED_PREFIXES)
                try:
                    again = shared and await self._documents.fetch_again(key) is not None
                except BatchError:  # a node that does not answer may have it
                    continue
                if again:
                    fetched += 1
                elif key.startswith(REBUILT_PREFIXES if self._mesh.single_node else _REMOVED):
                    held = HeldName(name, (HeldVersion(record.version, stamp),))
                    removed += await self._store.inventory.drop_unowned([held])
        if fetched or removed:
            await self._store.quarantine.prune()
            count(fetched + removed)
            _log.warning("documents left quarantine", extra={"fetched": fetched, "removed": removed})
