"""How much buckets with origins are read lately, and since when not at all.

Law: pure; time is handed in, in seconds of a clock that never steps. What was before the last ten minutes is
forgotten, but for the moment of the last read. Counted in the process of the cache's policy, for all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

_MINUTES: Final = 10


class Usage(msgspec.Struct, frozen=True):
    """Of the last ten minutes: pieces that were read from the cache (`hits`), pieces that were fetched
    (`misses`). `idle`: seconds since the last of either, or since counting began."""

    hits: int
    misses: int
    idle: float


class Uses:
    """By name in the cache."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._minutes: dict[str, deque[tuple[int, int, int]]] = {}
        self._last: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Uses of {len(self._last)} buckets>"

    def count(self, shelf: str, hits: int, misses: int, now: float) -> None:
        """Something was read."""
        minutes = self._minutes.setdefault(shelf, deque(maxlen=_MINUTES))
        minute = int(now // 60)
        if minutes and minutes[-1][0] == minute:
            _, before, missed = minutes.pop()
            hits, misses = hits + before, misses + missed
        minutes.append((minute, hits, misses))
        self._last[shelf] = now

    def of(self, shelf: str, now: float) -> Usage:
        """What is known of one."""
        since = int(now // 60) - _MINUTES
        lately = [(hits, misses) for minute, hits, misses in self._minutes.get(shelf, ()) if minute > since]
        idle = now - self._last.get(shelf, now if self._began is None else self._began)
        return Usage(sum(hits for hits, _ in lately), sum(misses for _, misses in lately), max(0.0, idle))

    def keep(self, shelves: Collection[str], now: float) -> None:
        """Only these are there any more. Counting begins with the first call."""
        self._began = now if self._began is None else self._began
        for shelf in self._last.keys() - set(shelves):
            del self._last[shelf], self._minutes[shelf]
