"""How background work in a process of its own gives way: by what those that answer clients measure.

Law: a worker says how long its event loop is kept waiting, while somebody works in the background; who does
pauses longer while that is long, and shorter while it is not. Without clients there are no pauses.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.kit import failpoints, pulse
from meshd.kit.pulse import CALL, PIECE

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.kit.clock import Clock

BEARABLE: Final = 0.003
"""Seconds that an event loop may be kept waiting, but for the worst tenth of its turns."""
LONGEST: Final = 0.008  # seconds of a pause: about 60 MB/s are left
SHORTEST: Final = 0.001  # what event loops can tell apart
_LOOK: Final = 0.1
_TICK: Final = 0.005
_TICKS: Final = 20  # of which one is as long as is told
_DOZE: Final = 0.25
_NICE: Final = 10
GIVING_WAY: Final = "yielding.nice"
"""The failpoint at which a system refuses to put a thread behind others."""


def give_way() -> None:
    """This thread, and those it starts from now on, get a tenth of a busy processor and all of an idle one
    (on Linux, where every thread has a niceness of its own)."""
    with suppress(OSError):
        failpoints.hit(GIVING_WAY)
        os.nice(_NICE)


class Yielding:
    """Pauses between small pieces of work. One a process, for all of its background work; `told` hears of
    every other length of the pause, in seconds."""

    def __init__(self, clock: Clock, told: Callable[[float], None] = lambda pause: None) -> None:
        self._clock, self._told = clock, told
        self._done, self._looked = 0, -_LOOK
        self._turn = asyncio.Lock()
        self.pause = 0.0

    def __repr__(self) -> str:
        return f"<Yielding {self.pause * 1e3:.0f} ms>"

    async def rest(self, size: int = 0) -> None:
        """After a piece of work of so many bytes; PIECE for what keeps an event loop for a millisecond."""
        now = self._clock.monotonic()
        pulse.works(now)
        if now - self._looked >= _LOOK:
            self._looked = now
            self._adapt(now)
        if not self.pause:
            self._done = 0
            await asyncio.sleep(0)
            return
        self._done += size + CALL
        async with self._turn:
            if self._done < PIECE:
                await asyncio.sleep(0)
                return
            self._done -= PIECE
            await asyncio.sleep(self.pause)

    def _adapt(self, now: float) -> None:
        before = self.pause
        if not pulse.is_busy(now):
            self.pause = 0.0
        elif pulse.longest_wait() > BEARABLE:
            self.pause = min(max(2 * self.pause, SHORTEST), LONGEST)
        else:
            self.pause = self.pause / 2 if self.pause > SHORTEST else 0.0
        if self.pause != before:
            self._told(self.pause)


async def tell_waits(clock: Clock, process: int) -> None:
    """Measure how long this event loop is kept waiting whenever somebody works in the background, for ever.
    `process` as in `pulse.goes_by`."""
    while True:
        if not pulse.is_worked(clock.monotonic()):
            pulse.waited(process, 0.0)
            await asyncio.sleep(_DOZE)
            continue
        late: list[float] = []
        for _ in range(_TICKS):
            due = clock.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            late.append(clock.monotonic() - due)
        pulse.waited(process, sorted(late)[_TICKS - 1 - _TICKS // 10])
