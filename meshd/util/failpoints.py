"""Failpoints: named places where a test makes the process die, fail or stall.

Law: off unless MESHD_FAILPOINTS is set; a disabled `hit` costs one comparison with None. Format:
`name=kill`, `name=error`, `name=error(28)` (an errno), `name=sleep(5)` (ms); `:after N` skips the first
N hits; commas separate several.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SPEC = re.compile(r"([\w.\-]+)=(kill|error|sleep)(?:\((\d+)\))?(?::after (\d+))?\Z")


class _Failpoint:
    def __init__(self, action: str, argument: int, skip: int) -> None:
        self.action, self.argument, self.skip = action, argument, skip
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Returns False for the first hits, which are skipped."""
        with self._lock:
            self.skip -= 1
            return self.skip < 0

    def fire(self, name: str) -> None:
        if not self.is_due():
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "sleep":
            threading.Event().wait(self.argument / 1000)
        else:
            number = self.argument or errno.EIO
            raise OSError(number, f"{os.strerror(number)} (failpoint {name})")


def _parse(text: str) -> dict[str, _Failpoint]:
    points = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _SPEC.match(item)
        if match is None:
            raise ValueError(
                f"MESHD_FAILPOINTS: cannot read {item!r}; write name=kill|error(errno)|sleep(ms)[:after N]"
            )
        name, action, argument, skip = match.groups()
        points[name] = _Failpoint(action, int(argument or 0), int(skip or 0))
    return points


class _Callback:
    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def fire(self, name: str) -> None:
        self.action()


_points: Mapping[str, _Failpoint | _Callback] | None = _parse(os.environ.get("MESHD_FAILPOINTS", "")) or None


def configure(text: str) -> None:
    """Replaces the failpoints of this process (for tests); the empty text disables all."""
    global _points
    _points = _parse(text) or None


def set_callback(name: str, action: Callable[[], None]) -> None:
    """Calls `action` at each hit of `name`, in the thread that hits it (for tests that need an exact
    interleaving)."""
    global _points
    _points = {**(_points or {}), name: _Callback(action)}


def hit(name: str) -> None:
    """Runs the action configured for `name`. Raises OSError for an `error` point."""
    if _points is None:
        return
    point = _points.get(name)
    if point is not None:
        point.fire(name)


async def hit_async(name: str) -> None:
    """Like `hit`, for tasks: `sleep` delays the task without blocking the event loop."""
    point = None if _points is None else _points.get(name)
    if isinstance(point, _Failpoint) and point.action == "sleep":
        if point.is_due():
            await asyncio.sleep(point.argument / 1000)
    elif point is not None:
        point.fire(name)
