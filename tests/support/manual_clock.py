"""A clock that tests move by hand, in place of `meshd.util.clock.SystemClock`."""

from __future__ import annotations

import threading


class ManualClock:
    """A clock that moves only when advanced, as the `Clock` of a part under test."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now = now_ns
        self._last = self._jumped = 0

    def now_ms(self) -> int:
        return self._now // 1_000_000

    def stamp(self) -> int:
        with self._lock:
            self._last = max(self._now, self._last + 1)
            return self._last

    def monotonic(self) -> float:
        return (self._now - self._jumped) / 1e9

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds`."""
        self._now += round(seconds * 1e9)

    def jump(self, seconds: float) -> None:
        """Set the time of day, without time passing."""
        self._jumped += round(seconds * 1e9)
        self.advance(seconds)
