"""When clients were last served by any process of this node: background work gives way to them.

Law: one number in memory that all processes share, so this module is to be loaded before the first fork. A
number is written whole; who writes last is right.
"""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshd.kit.clock import Clock

_cell: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_BUSY: Final = 0.25  # seconds for which a request says that there are clients
_SLOT: Final = 0.02


def heard(now: float) -> None:
    """A client was answered at `now` (monotonic)."""
    _cell[0] = now


class Courtesy:
    """Background work in every other slot of time, while there are clients; without pause when there are
    none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @property
    def busy(self) -> bool:
        """Whether clients were served a moment ago."""
        return 0 <= self._clock.monotonic() - _cell[0] < _BUSY and _cell[0] > 0

    async def rest(self, size: int = 0) -> None:
        """Between two pieces of work."""
        now = self._clock.monotonic()
        if self.busy and int(now / _SLOT) % 2:
            await asyncio.sleep(_SLOT - now % _SLOT)
        else:
            await asyncio.sleep(0)
