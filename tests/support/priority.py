"""Processes of a test before all others: for what is measured while a machine has other things to do."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from tests.support.cpu_report import processes_below

if TYPE_CHECKING:
    from collections.abc import Iterator

_HIGHEST: Final = -20


@contextmanager
def preferred() -> Iterator[None]:
    """Meanwhile this process, and all that it has started and starts, get a processor at once; where that may
    not be done, they do not."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    _set_niceness(_HIGHEST)
    try:
        yield
    finally:
        _set_niceness(usual)


def _set_niceness(niceness: int) -> None:
    for pid in processes_below(os.getpid()):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
