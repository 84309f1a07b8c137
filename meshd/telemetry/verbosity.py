"""How much the processes of a node log: as its settings say, or otherwise for a while.

Law: one 64-bit word in memory that all processes share, made before the first fork, so that it is never read
half written. A process looks at it when it starts to log, and at SIGUSR1.
Invariant: nothing of it outlives the supervisor, which also sees to it that what was asked for ends.
"""

from __future__ import annotations

import mmap
import signal
from dataclasses import dataclass
from typing import Final

from meshd.config.options import LOG_LEVELS
from meshd.telemetry import logs

_LEVEL_BITS: Final = 3  # of the word; the rest is when it ends, in milliseconds of the monotonic clock


@dataclass(frozen=True, slots=True)
class Asked:
    """A level somebody asked for, and the second of the monotonic clock at which that ends."""

    level: str
    until: float


class Verbosity:
    """The level asked for, as every process of the node sees it."""

    def __init__(self) -> None:
        self._word = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def __repr__(self) -> str:
        return f"<Verbosity {self.asked()}>"

    def asked(self) -> Asked | None:
        """None while the settings decide."""
        word = self._word[0]
        if not word:
            return None
        return Asked(LOG_LEVELS[word & ((1 << _LEVEL_BITS) - 1)], (word >> _LEVEL_BITS) / 1000)

    def ask(self, level: str, until: float) -> None:
        """`level`, one of LOG_LEVELS, until that second of the monotonic clock; nobody is told."""
        self._word[0] = round(until * 1000) << _LEVEL_BITS | LOG_LEVELS.index(level)

    def forget(self) -> None:
        """The settings decide again; nobody is told."""
        self._word[0] = 0


shared: Final = Verbosity()


def follow(configured: str) -> None:
    """Have this process log as the settings (`configured`) or whoever asked for another level say, now and at
    every SIGUSR1. In the main thread."""

    def look(*_: object) -> None:
        asked = shared.asked()
        logs.set_level(asked.level if asked else configured)

    signal.signal(signal.SIGUSR1, look)
    signal.siginterrupt(signal.SIGUSR1, False)
    look()
