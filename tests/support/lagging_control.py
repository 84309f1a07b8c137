"""A control store of whose writes a process hears late: its copy follows when the test says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.control.watchers import differences
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.control.control_api import Change, Versioned
    from meshd.util.clock import Clock


class LaggingControl(MemoryControl):
    """A process's view of `engine`, which other processes write to. Its own writes are known at once, as
    those of real engines are, and with them what was written before."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.engine = MemoryControl(clock)
        self._arrived = asyncio.Event()

    def catch_up(self) -> None:
        """Let the copy have all that was written."""
        self._entries, self._revisions = dict(self.engine._entries), dict(self.engine._revisions)
        self._version = self.engine._version
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def get(self, key: str) -> Versioned | None:
        return await self.engine.get(key)

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        try:
            return await self.engine.put(key, value, expect=expect)
        finally:  # a conflict, too, is told when the copy has what caused it
            self.catch_up()

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        try:
            return await self.engine.delete(key, expect=expect)
        finally:
            self.catch_up()

    async def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        seen: Mapping[str, Versioned] = {}
        while True:
            arrived = self._arrived
            now = self.cached_entries(topic)
            for change in differences(seen, now):
                yield change
            seen = now
            await arrived.wait()
