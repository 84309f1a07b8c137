"""Bytes that may be brought: so many a second, whoever brings them.

Law: who takes waits until nothing is owed, then owes; in turn. So over any time it is the rate, and what was
taken at once; what was taken and not brought is given back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK: Final = 1.0  # seconds after which the rate is asked for again


class Budget:
    """`rate`: bytes a second, 0 for any; it may change. Use on one event loop only."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self.rate = rate
        self._turn, self._news = asyncio.Lock(), asyncio.Event()
        self._owed, self._at = 0.0, 0.0

    def __repr__(self) -> str:
        return f"<Budget of {self.rate():g} bytes/s, {self._owed:.0f} owed>"

    async def take(self, size: int) -> None:
        """`size` bytes, when nothing is owed any more."""
        async with self._turn:
            while (rest := self._rest()) > 0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(rest, _LOOK)):
                        await self._news.wait()
            self._owed += size

    def give_back(self, size: int) -> None:
        """So much of what was taken was not brought."""
        self._rest()
        self._owed = max(0.0, self._owed - size)
        self._news.set()

    def _rest(self) -> float:
        """Seconds until nothing is owed."""
        now, rate = asyncio.get_running_loop().time(), self.rate()
        self._owed = max(0.0, self._owed - rate * (now - self._at)) if rate else 0.0
        self._at = now
        return self._owed / rate if rate else 0.0
