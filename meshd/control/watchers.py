"""Watchers: change streams over a local copy that a background thread keeps current.

Law: a watcher compares two states of the copy; nothing is queued for a slow watcher.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from meshd.control.control_api import Change

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from meshd.control.control_api import Versioned


class Watchers:
    """Tasks of any loop that wait for news. `wake` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watchers, {len(self._waiting)} waiting>"

    async def changes(self, look: Callable[[], Mapping[str, Versioned]]) -> AsyncGenerator[Change, None]:
        """What is new at each look, until `close`."""
        seen: Mapping[str, Versioned] = {}
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiting.add(waiter)
        try:
            while not self._closed:
                waiter[1].clear()
                now = look()
                for change in differences(seen, now):
                    yield change
                seen = now
                await waiter[1].wait()
        finally:
            self._waiting.discard(waiter)

    def wake(self) -> None:
        """The copy has changed."""
        for loop, event in list(self._waiting):
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self.wake()


def differences(before: Mapping[str, Versioned], after: Mapping[str, Versioned]) -> list[Change]:
    """The changes that lead from one state of a topic to another."""
    changed = [Change(key, entry) for key, entry in after.items() if before.get(key) != entry]
    return changed + [Change(key, None) for key in before if key not in after]
