"""SIEVE: a queue in order of arrival, one bit an item, and a hand that spares what was read since it passed.

Y. Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.cache.policies.interface import Item


@dataclass(slots=True, eq=False)
class _Node:
    item: Item
    size: int
    visited: bool = False
    newer: _Node | None = None
    older: _Node | None = None


class Sieve:
    """A linked list from newest to oldest."""

    moved = 0

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._nodes: dict[Item, _Node] = {}
        self._newest: _Node | None = None
        self._oldest: _Node | None = None
        self._hand: _Node | None = None

    def __repr__(self) -> str:
        return f"<Sieve {len(self._nodes)} items, {self.used} of {self.capacity} bytes>"

    def read(self, item: Item, size: int) -> int:
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
        assert node is not None, "bytes are used, so there is a node"
        self._hand = node
        self._unlink(node)
