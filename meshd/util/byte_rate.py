"""A limit of bytes per second that may change while it is in use."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK: Final = 1.0  # seconds after which the rate is read again


class RateLimiter:
    """Limits bytes per second; `rate()` may change, and 0 means unlimited. Use on one event loop only."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self.rate = rate
        self._turn, self._news = asyncio.Lock(), asyncio.Event()
        self._owed, self._at = 0.0, 0.0

    def __repr__(self) -> str:
        return f"<RateLimiter of {self.rate():g} bytes/s, {self._owed:.0f} owed>"

    async def acquire_bytes(self, size: int) -> None:
        """Wait until earlier bytes are paid off, then take `size` bytes."""
        async with self._turn:
            while (rest := self._rest()) > 0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with timeout(min(rest, _LOOK)):
                        await self._news.wait()
            self._owed += size

    def refund_bytes(self, size: int) -> None:
        """Return bytes that were acquired but not transferred."""
        self._rest()
        self._owed = max(0.0, self._owed - size)
        self._news.set()

    def _rest(self) -> float:
        """Return the seconds until earlier bytes are paid off."""
        now, rate = asyncio.get_running_loop().time(), self.rate()
        self._owed = max(0.0, self._owed - rate * (now - self._at)) if rate else 0.0
        self._at = now
        return self._owed / rate if rate else 0.0
