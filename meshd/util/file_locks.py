"""Locks of files that the kernel releases when their last holder has ended."""

from __future__ import annotations

import fcntl
import threading
from typing import TYPE_CHECKING, Final

from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

ENDING_SECONDS: Final = 3.0
"""Seconds that processes of a killed daemon have to end. Each closes its files one after the other, so one
of its locks may be free before another."""
_STEP: Final = 0.05


def lock_file(fd: int, kind: int, seconds: float = 0.0, may_end: Callable[[], bool] = lambda: True) -> bool:
    """Lock a file (blocking), and return whether it is locked.

    `kind`: fcntl.LOCK_SH or LOCK_EX; `seconds`: how long to wait for its holder to end, as long as
    `may_end()`.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.monotonic() >= deadline or not may_end():
                return False
            threading.Event().wait(_STEP)
        else:
            return True
