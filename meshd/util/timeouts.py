"""Timeouts of blocks of code: `asyncio.timeout`, made right where Python's own is not.

Before Python 3.11.3 (Debian 12 has 3.11.2) the first timeout that expires in a task after a TaskGroup has
failed there raises CancelledError instead of TimeoutError: the task ends without a word. A failed TaskGroup
leaves a cancel request counted, and the timeout takes it for somebody else's (CPython issue 102780).

Law: code of the daemon uses these functions, never asyncio's own.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final, Self, cast

if TYPE_CHECKING:
    from types import TracebackType

_IS_RIGHT: Final = sys.version_info >= (3, 11, 3)


class CorrectedTimeout:
    """A timeout for Python before 3.11.3: cancel requests that were counted when the block began are not
    somebody else's."""

    def __init__(self, when: float | None) -> None:
        self._timeout = asyncio.Timeout(when)
        self._task: asyncio.Task[object] | None = None
        self._counted = 0

    def __repr__(self) -> str:
        return f"<CorrectedTimeout {self._timeout!r}>"

    def when(self) -> float | None:
        """Return when it expires, on the loop's clock."""
        return self._timeout.when()

    def reschedule(self, when: float | None) -> None:
        """Let it expire at another time."""
        self._timeout.reschedule(when)

    def expired(self) -> bool:
        """Return whether it has expired."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._counted = self._task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await self._timeout.__aexit__(kind, error, trace)
        # Its own cancel request is no longer counted.
        is_mine = self._timeout.expired() and self._task.cancelling() <= self._counted
        if is_mine and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error


def timeout_at(when: float | None) -> asyncio.Timeout:
    """Limit a block to a time on the loop's clock: `async with timeout_at(when):` raises TimeoutError then.
    None: no limit."""
    return asyncio.timeout_at(when) if _IS_RIGHT else cast("asyncio.Timeout", CorrectedTimeout(when))


def timeout(seconds: float | None) -> asyncio.Timeout:
    """Limit a block to so many seconds from now: `async with timeout(5):` raises TimeoutError after them.
    None: no limit."""
    return timeout_at(None if seconds is None else asyncio.get_running_loop().time() + seconds)
