"""Fetch windows: which items of a comparison are requested together.

Law: small items are collected into large windows, because the peer reads a window in the order of its disks:
the larger the window, the fewer seeks. Large items, which have data files of their own, are requested a few
at a time and in parallel. Memory is bounded by three windows; an item waits for at most `_PATIENCE` calls of
`add`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshd.cluster.rebalance.sync_plan import Item

STREAMS: Final = 4
"""Parallel fetches of large items from one peer."""
LARGE: Final = 1 << 20
WINDOW_ITEMS: Final = 32_768
_REQUEST_BYTES: Final = 3 << 20  # of a window's items in a request
_ITEM_BYTES: Final = 40  # of an item in a request, besides its name and id
_BATCH_BYTES: Final = 4 << 20  # of large items
_PATIENCE: Final = 64


class FetchWindows:
    """The items that are to be fetched from one peer. `window` returns how many small items to request at
    a time."""

    def __init__(self, window: Callable[[], int] = lambda: WINDOW_ITEMS) -> None:
        self._window = window
        self.small: asyncio.Queue[tuple[Item, ...] | None] = asyncio.Queue(1)
        self.large: asyncio.Queue[tuple[Item, ...] | None] = asyncio.Queue(2 * STREAMS)
        self._small: list[Item] = []
        self._large: list[Item] = []
        self._request_bytes = self._large_bytes = self._age = 0

    def __repr__(self) -> str:
        return f"<FetchWindows {len(self._small)} small and {len(self._large)} large items collected>"

    async def add(self, items: Iterable[Item]) -> None:
        """Add items; wait while earlier ones are fetched."""
        for item in items:
            if item.size > LARGE:
                self._large.append(item)
                self._large_bytes += item.size
                if self._large_bytes >= _BATCH_BYTES:
                    await self._put_large()
                continue
            self._small.append(item)
            self._request_bytes += len(item.name) + len(item.what) + _ITEM_BYTES
            if len(self._small) >= min(self._window(), WINDOW_ITEMS) or self._request_bytes >= _REQUEST_BYTES:
                await self._put_small()
        self._age += 1
        if self._age >= _PATIENCE:
            await self._put_all()

    async def close(self) -> None:
        """Hand out what is left, then None to each fetch."""
        await self._put_all()
        await self.small.put(None)
        for _ in range(STREAMS):
            await self.large.put(None)

    async def _put_all(self) -> None:
        await self._put_large()
        await self._put_small()

    async def _put_small(self) -> None:
        items, self._small = tuple(self._small), []
        self._request_bytes = self._age = 0
        if items:
            await self.small.put(items)

    async def _put_large(self) -> None:
        items, self._large = tuple(self._large), []
        self._large_bytes = 0
        if items:
            await self.large.put(items)
