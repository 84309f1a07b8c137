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
    """Waiting tasks of any event loop. `wake` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watchers, {len(self._waiting)} waiting>"

    async def changes(
        self, read_state: Callable[[], Mapping[str, Versioned]]
    ) -> AsyncGenerator[Change, None]:
        """Yields the changes between successive states of `read_state`, until `close`."""
        seen: Mapping[str, Versioned] = {}
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiting.add(waiter)
        try:
            while not self._closed:
                waiter[1].clear()
                now = read_state()
                for change in differences(seen, now):
                    yield change
                seen = now
                await waiter[1].wait()
        finally:
            self._waiting.discard(waiter)

    def wake(self) -> None:
        """Signals that the copy has changed."""
        for loop, event in list(self._waiting):
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Ends all change streams."""
        self._closed = True
        self.wake()


def differences(before: Mapping[str, Versioned], after: Mapping[str, Versioned]) -> list[Change]:
    """Returns the changes that lead from one state of a topic to another."""
    changed = [Change(key, entry) for key, entry in after.items() if before.get(key) != entry]
    return changed + [Change(key, None) for key in before if key not in after]
