"""Clock: time as an argument.

Law: the only module of the daemon that reads the system clock; everything else gets a `Clock`.
Invariant: `stamp()` never repeats and never goes back within one clock, even when the system clock does.
Seam: tests give a node a clock that jumps (`MESHD_CLOCK_SHIFT` names a file of eight bytes).
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from pathlib import Path
from typing import Final, Protocol

CLOCK_SHIFT_ENV: Final = "MESHD_CLOCK_SHIFT"
"""Names a file of eight bytes: the error of the wall clock in nanoseconds, read at every use."""


def write_clock_shift(path: Path, seconds: float) -> None:
    """Makes the clocks of nodes that use this file jump."""
    if not path.exists():
        path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        file.write(round(seconds * 1e9).to_bytes(8, "little", signed=True))


def _open_shift() -> mmap.mmap | None:
    path = os.environ.get(CLOCK_SHIFT_ENV)
    if not path:
        return None
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)


class Clock(Protocol):
    """The daemon's source of time. Safe to call from any thread."""

    def now_ms(self) -> int:
        """Returns milliseconds since the epoch (wall clock, which may step)."""
        ...

    def stamp(self) -> int:
        """Returns nanoseconds since the epoch, strictly rising from call to call."""
        ...

    def monotonic(self) -> float:
        """Returns seconds of a clock that never steps; only differences are meaningful."""
        ...


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._shift = _open_shift()

    def _now_ns(self) -> int:
        if self._shift is None:
            return time.time_ns()
        return time.time_ns() + int.from_bytes(self._shift[:8], "little", signed=True)

    def now_ms(self) -> int:
        return (time.time_ns() if self._shift is None else self._now_ns()) // 1_000_000

    def stamp(self) -> int:
        with self._lock:
            self._last = max(self._now_ns(), self._last + 1)
            return self._last

    def monotonic(self) -> float:
        return time.monotonic()


class WorkClock(Protocol):
    """Measures the work of the calling thread."""

    def mark(self) -> tuple[float, ...]:
        """Return the present, for `since`."""
        ...

    def since(self, mark: tuple[float, ...]) -> float:
        """Return the seconds of work since a mark."""
        ...


class ThreadWorkClock:
    """Counts the processor time of the calling thread; of a stretch in which the thread waited for something
    (a disk, another process), the elapsed time. So work takes as long on a busy machine as on an idle one.
    """

    def mark(self) -> tuple[float, ...]:
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return time.thread_time(), time.monotonic(), waits

    def since(self, mark: tuple[float, ...]) -> float:
        busy, now, waits = self.mark()
        return now - mark[1] if waits > mark[2] else busy - mark[0]


def cpu_seconds() -> float:
    """Return the processor time of all threads of this process."""
    return time.process_time()
