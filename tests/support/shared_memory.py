"""What lies in the machine's shared memory, where other tests work at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

from meshd.util.clock import SystemClock

_SHARED = Path("/dev/shm")
_clock = SystemClock()


def segments() -> set[str]:
    """Names of the files; directories are other tests' scratch."""
    return {path.name for path in _SHARED.iterdir() if not path.is_dir()}


def await_no_more(before: set[str]) -> None:
    """Until there is nothing that was not there `before`: what others have for a moment goes, what is left
    behind stays."""
    deadline = _clock.monotonic() + 60
    while left := segments() - before:
        assert _clock.monotonic() < deadline, left
        threading.Event().wait(0.05)
