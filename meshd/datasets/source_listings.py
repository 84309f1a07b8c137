"""Listings of the objects of a source: with their records, or in columns where these are enough.

Law: a source of a million plain objects is listed without an object in memory for each of them. Only files
whose content determines the samples are read, and need their records.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.core.listing_columns import ListingColumns
from meshwire.dataset.archive_keys import archive_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.fields import Source

_PAGE: Final = 1000


class SourceListings:
    """Lists sources, for a worker."""

    def __init__(self, store: ObjectStore, objects: RemoteObjects, capacity: SnapshotCapacity) -> None:
        self._store, self._objects, self._capacity = store, objects, capacity

    def __repr__(self) -> str:
        return f"<SourceListings of {self._objects!r}>"

    async def objects(
        self, source: Source, kind: str
    ) -> tuple[list[tuple[str, Record]] | ListingColumns, object | None]:
        """Return the objects of a source, and which listing of an origin they are of: in columns if none of
        them is read to find its samples. Raises BatchError Busy, TooLarge."""
        if kind not in ("auto", "objects"):
            return await self.records(source)
        plain = _PlainObjects(self._capacity, source, kind)
        found, revision = await self._objects.list_columns(source.bucket, source.prefix, plain)
        return await self.records(source) if found is None else (found, revision)

    async def records(self, source: Source) -> tuple[list[tuple[str, Record]], object | None]:
        """Return the objects of a source, and which listing of an origin they are of. Raises BatchError
        Busy."""
        if not self._objects.single_node:
            return await self._objects.list_revision(source.bucket, source.prefix)
        found, after = list[tuple[str, "Record"]](), ""
        while True:
            page = self._store.list(source.bucket, prefix=source.prefix, after=after, limit=_PAGE)
            found += page.entries
            if not page.truncated:
                return found, None
            after = page.next_after
            await asyncio.sleep(0)  # give other requests a turn between pages


class _PlainObjects:
    """Accepts objects that are not read to find samples, as many as fit into memory; a KeyFilter."""

    def __init__(self, capacity: SnapshotCapacity, source: Source, kind: str) -> None:
        self._capacity, self._source, self._kind = capacity, source, kind
        self._listed = 0

    def begin(self) -> None:
        self._listed = 0

    def accepts(self, keys: list[str]) -> bool:
        """Raises BatchError TooLarge."""
        self._listed += len(keys)
        self._capacity.require_room_to_list(self._listed, self._source)
        return self._kind == "objects" or not any(map(archive_kind, keys))


def rows_of(listing: Sequence[tuple[str, Record]] | ListingColumns) -> Iterable[tuple[str, str, int]]:
    """Return (key, ETag, size) of each object."""
    if isinstance(listing, ListingColumns):
        return listing
    return ((key, record.etag, record.size) for key, record in listing)
