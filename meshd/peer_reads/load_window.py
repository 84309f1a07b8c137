"""Load window: bytes that are read into the page cache together, before they are read one by one.

Law: best effort. Only bytes on rotational disks are loaded, each disk in its own order, on this node and on
the nodes that are asked first for what this one does not hold. What cannot be found or loaded is left to the
reader of the bytes, which reports it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from meshd.core.peer_messages import RemoteRecord
from meshd.core.peer_source import ObjectRange
from meshd.store.disks.page_loader import places_by_disk
from meshd.store.errors import StoreError

if TYPE_CHECKING:
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import StoreReader
    from meshd.store.disks.page_loader import PageLoader
    from meshd.store.records import Location, Record


MAX_RANGES: Final = 65_536


class LoadWindow:
    """The bytes of one window, in at most MAX_RANGES ranges; further ones are left to their readers."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._here: dict[int, list[Location]] = defaultdict(list)
        self._far: list[ObjectRange] = []
        self._ranges = 0

    def __repr__(self) -> str:
        return f"<LoadWindow of {self._ranges} ranges, {len(self._far)} of them on other nodes>"

    @property
    def is_full(self) -> bool:
        """Whether it takes no more ranges."""
        return self._ranges == MAX_RANGES

    def add_range(self, bucket: str, key: str, record: Record, offset: int, length: int) -> None:
        """Add bytes of an object."""
        if not length or self.is_full:
            return
        self._ranges += 1
        if isinstance(record, RemoteRecord):
            self._far.append(ObjectRange(bucket, key, record.etag, record.size, offset, length))
            return
        try:
            places = places_by_disk(record, self._store.locate(record), offset, length)
        except StoreError:
            return
        for disk, there in places.items():
            self._here[disk] += there

    async def load(self, pages: PageLoader, objects: RemoteObjects) -> None:
        """Load all of it."""
        far = [] if objects.single_node else self._far
        await asyncio.gather(pages.load_window(self._here), objects.load_parts(far))
