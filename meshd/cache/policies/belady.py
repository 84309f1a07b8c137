"""Belady's bound: with the whole future known, let go what is read again last.

L. Belady, IBM Systems Journal 5(2), 1966, with bypassing. Bytes are kept one by one: of the item that is read
again last, as many go as must. So no policy of whole items has a higher byte hit ratio, whatever their sizes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.cache.policies.interface import Item

_NEVER = 1 << 62


class Belady:
    """Must be asked for exactly the reads it was given."""

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

    def read(self, item: Item, size: int) -> int:
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
            heapq.heappop(self._farthest)  # of an earlier read
            return
        less = min(held, self.used - self.capacity)
        self.used -= less
        if less == held:
            heapq.heappop(self._farthest)
            del self._held[item]
        else:
            self._held[item] = held - less
