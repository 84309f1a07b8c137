"""Long work on an event loop that others wait for: given up in between, by time rather than by count.

Law: what a thing costs may be its asker's to say (a policy is up to 20 KB of patterns): nothing is counted.
"""

from __future__ import annotations

import asyncio

_SECONDS = 0.005


class Turn:
    """One piece of work."""

    __slots__ = ("_ends", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + _SECONDS

    def __repr__(self) -> str:
        return f"<Turn, {self._ends - self._loop.time():.3f} s left>"

    async def give(self) -> None:
        """Others get theirs, if this one has lasted long enough."""
        if self._loop.time() >= self._ends:
            await asyncio.sleep(0)
            self._ends = self._loop.time() + _SECONDS
