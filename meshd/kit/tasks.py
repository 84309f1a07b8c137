"""Background tasks that are kept, named, and never fail in silence.

Law: every task belongs to a group; the group logs what failed and cancels the rest when it is closed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

_log = logging.getLogger("meshd.tasks")


class Tasks:
    """A set of running tasks of one owner. Use on one event loop only."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Tasks of {self._owner}: {sorted(task.get_name() for task in self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` in the background; an exception is logged with the task's name."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", extra={"task": task.get_name()}, exc_info=error)

    async def aclose(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        remaining = list(self._tasks)
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
