"""A budget of bytes (or rows, or requests) that tasks take from and give back.

Law: first come, first served: a large request is never overtaken for ever by small ones. A request above the
whole budget is granted alone. Invariant: what is taken never exceeds the limit, except by such a one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Budget:
    """At most `limit` units out at a time. Use on one event loop only."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("a budget needs at least one unit")
        self.limit = limit
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<Budget {self.taken} of {self.limit} taken, {len(self._waiting)} waiting>"

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def try_take(self, units: int) -> bool:
        """Take without waiting, if nobody waits and it fits."""
        if self._waiting or not self._fits(units):
            return False
        self.taken += units
        return True

    async def take(self, units: int) -> None:
        """Wait for the turn, then take. Cancelling takes nothing."""
        if self.try_take(units):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._abandon(units, turn)
            raise

    def give(self, units: int) -> None:
        """Give back what was taken."""
        if units > self.taken:
            raise ValueError(f"{units} given back, only {self.taken} are out")
        self.taken -= units
        self._grant()

    @asynccontextmanager
    async def hold(self, units: int) -> AsyncIterator[None]:
        """Take for the length of a block."""
        await self.take(units)
        try:
            yield
        finally:
            self.give(units)

    def _fits(self, units: int) -> bool:
        return self.taken + units <= self.limit or not self.taken

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            units, turn = self._waiting.popleft()
            self.taken += units
            turn.set_result(None)

    def _abandon(self, units: int, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.give(units)  # granted in the same moment
        else:
            self._waiting.remove((units, turn))
            self._grant()
