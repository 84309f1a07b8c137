"""S3-FIFO: a small queue for newcomers, a main one for what was read again, a ghost one for what was let go.

J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, algorithm 1: the small queue
takes a tenth, counts stop at 3, the ghost queue remembers as many bytes as the main one holds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.cache.policies.interface import Item

_MOST = 3


class S3Fifo:
    """Three queues, oldest first."""

    moved = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._small_share = max(1, capacity // 10)
        self._small: OrderedDict[Item, int] = OrderedDict()
        self._main: OrderedDict[Item, int] = OrderedDict()
        self._ghost: OrderedDict[Item, int] = OrderedDict()
        self._counts: dict[Item, int] = {}
        self._small_bytes = self._main_bytes = self._ghost_bytes = 0

    def __repr__(self) -> str:
        return f"<S3Fifo {len(self._counts)} items, {self.used} of {self.capacity} bytes>"

    @property
    def used(self) -> int:
        return self._small_bytes + self._main_bytes

    def read(self, item: Item, size: int) -> int:
        if item in self._counts:
            if self._small.get(item, self._main.get(item)) == size:
                self._counts[item] = min(self._counts[item] + 1, _MOST)
                return size
            self._forget(item)
        if size > self.capacity:
            return 0
        while self.used + size > self.capacity:
            self._evict()
        self._counts[item] = 0
        if item in self._ghost:
            self._ghost_bytes -= self._ghost.pop(item)
            self._into_main(item, size)
        else:
            self._small[item] = size
            self._small_bytes += size
        return 0

    def _forget(self, item: Item) -> None:
        del self._counts[item]
        if item in self._small:
            self._small_bytes -= self._small.pop(item)
        else:
            self._main_bytes -= self._main.pop(item)

    def _into_main(self, item: Item, size: int) -> None:
        self._main[item] = size
        self._main_bytes += size

    def _evict(self) -> None:
        if self._small and (self._small_bytes >= self._small_share or not self._main):
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        item, size = self._small.popitem(last=False)
        self._small_bytes -= size
        if self._counts[item] > 1:
            self._counts[item] = 0
            self._into_main(item, size)
            return
        del self._counts[item]
        self._ghost[item] = size
        self._ghost_bytes += size
        while self._ghost_bytes > self.capacity - self._small_share:
            self._ghost_bytes -= self._ghost.popitem(last=False)[1]

    def _evict_main(self) -> None:
        while True:
            item, size = self._main.popitem(last=False)
            if self._counts[item] == 0:
                break
            self._counts[item] -= 1
            self._main[item] = size
        self._main_bytes -= size
        del self._counts[item]
