"""Least recently used: what everybody knows, and what one scan of more than the capacity empties."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.cache.policies.interface import Item


class Lru:
    """A dict in order of use."""

    moved = 0

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._sizes: dict[Item, int] = {}

    def __repr__(self) -> str:
        return f"<Lru {len(self._sizes)} items, {self.used} of {self.capacity} bytes>"

    def read(self, item: Item, size: int) -> int:
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
