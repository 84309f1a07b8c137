"""Time as an argument.

Law: the only module of the daemon that reads the machine's clock; everything else is handed a `Clock`.
Invariant: `stamp()` never repeats and never goes back within one clock, even when the machine's clock does.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What the daemon asks of time. Safe to call from any thread."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch (wall clock: it may step)."""
        ...

    def stamp(self) -> int:
        """Nanoseconds since the epoch, strictly rising from call to call."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never steps; only differences mean anything."""
        ...


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def stamp(self) -> int:
        with self._lock:
            self._last = max(time.time_ns(), self._last + 1)
            return self._last

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told: for tests and replays."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now = now_ns
        self._last = 0

    def now_ms(self) -> int:
        return self._now // 1_000_000

    def stamp(self) -> int:
        with self._lock:
            self._last = max(self._now, self._last + 1)
            return self._last

    def monotonic(self) -> float:
        return self._now / 1e9

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds`."""
        self._now += round(seconds * 1e9)
