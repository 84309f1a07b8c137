"""LRU, S3-FIFO, SIEVE and Belady: the policies that the simulator compares the segment policy with.

J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023; Y. Zhang et al., "SIEVE is
Simpler than LRU", NSDI 2024; L. Belady, IBM Systems Journal 5(2), 1966. Belady bypasses and evicts
partial items, so no policy of whole items has a higher byte hit ratio.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.origins.eviction.policy_api import Item


class Lru:
    """Least recently used: a dict in order of use."""

    moved = 0

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._sizes: dict[Item, int] = {}

    def __repr__(self) -> str:
        return f"<Lru {len(self._sizes)} items, {self.used} of {self.capacity} bytes>"

    def read_item(self, item: Item, size: int) -> int:
        held = self._sizes.pop(item, None)
        if held == size:
            self._sizes[item] = size
            return size
        self.used -= held or 0
        if size <= self.capacity:
            while self.used + size > self.capacity:
                self.used -= self._sizes.pop(next(iter(self._sizes)))
            self._sizes[item] = size
            self.used += size
        return 0


_MOST = 3


class S3Fifo:
    """S3-FIFO: three queues (small, main, ghost), oldest first."""

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

    def read_item(self, item: Item, size: int) -> int:
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


@dataclass(slots=True, eq=False)
class _Node:
    item: Item
    size: int
    visited: bool = False
    newer: _Node | None = None
    older: _Node | None = None


class Sieve:
    """SIEVE: a linked list from newest to oldest, with a hand that moves towards the newest."""

    moved = 0

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._nodes: dict[Item, _Node] = {}
        self._newest: _Node | None = None
        self._oldest: _Node | None = None
        self._hand: _Node | None = None

    def __repr__(self) -> str:
        return f"<Sieve {len(self._nodes)} items, {self.used} of {self.capacity} bytes>"

    def read_item(self, item: Item, size: int) -> int:
        node = self._nodes.get(item)
        if node is not None and node.size == size:
            node.visited = True
            return size
        if node is not None:
            self._unlink(node)
        if size <= self.capacity:
            while self.used + size > self.capacity:
                self._evict()
            self._push(_Node(item, size))
        return 0

    def _push(self, node: _Node) -> None:
        node.older = self._newest
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = self._nodes[node.item] = node
        self.used += node.size

    def _unlink(self, node: _Node) -> None:
        if self._hand is node:
            self._hand = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        del self._nodes[node.item]
        self.used -= node.size

    def _evict(self) -> None:
        node = self._hand or self._oldest
        while node is not None and node.visited:
            node.visited = False
            node = node.newer or self._oldest
        assert node is not None, "the cache is not empty, so there is a node"
        self._hand = node
        self._unlink(node)


_NEVER = 1 << 62


class Belady:
    """The optimal policy of partial items. It must see exactly the reads that it was given."""

    moved = 0

    def __init__(self, capacity: int, reads: Iterable[Item]) -> None:
        self.capacity, self.used = capacity, 0
        self._uses: dict[Item, deque[int]] = defaultdict(deque)
        for position, item in enumerate(reads):
            self._uses[item].append(position)
        self._held: dict[Item, int] = {}
        self._next: dict[Item, int] = {}
        self._farthest: list[tuple[int, Item]] = []

    def __repr__(self) -> str:
        return f"<Belady {len(self._held)} items, {self.used} of {self.capacity} bytes>"

    def read_item(self, item: Item, size: int) -> int:
        uses = self._uses[item]
        uses.popleft()
        hit = min(self._held.get(item, 0), size)
        self.used += size - self._held.get(item, 0)
        self._held[item] = size
        self._next[item] = uses[0] if uses else _NEVER
        heapq.heappush(self._farthest, (-self._next[item], item))
        while self.used > self.capacity:
            self._shrink()
        return hit

    def _shrink(self) -> None:
        use, item = self._farthest[0]
        held = self._held.get(item, 0)
        if not held or self._next[item] != -use:
            heapq.heappop(self._farthest)  # an entry of an earlier read
            return
        less = min(held, self.used - self.capacity)
        self.used -= less
        if less == held:
            heapq.heappop(self._farthest)
            del self._held[item]
        else:
            self._held[item] = held - less
