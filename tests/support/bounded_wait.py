"""Bounded waits for threads, processes and conditions in tests.

Law: a wait ends after `PATIENCE` seconds with an error; nothing here waits forever.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

_clock = SystemClock()
WAIT_TIMEOUT: Final = 60.0
"""Seconds; a machine that is slow, or has other things to do, is no failure."""


_SHORTEST: Final = 0.1
_LONGEST: Final = 0.35


class Joinable(Protocol):
    """A thread, or a process of `multiprocessing`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait that long at most."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""


def await_end(*awaited: Joinable, patience: float = WAIT_TIMEOUT) -> None:
    """Wait until each has ended. Raises AssertionError for one that does not."""
    for each in awaited:
        each.join(patience)
        assert not each.is_alive(), f"{each!r} has not ended within {patience} s"


def await_true(
    condition: Callable[[], object],
    patience: float = WAIT_TIMEOUT,
    *,
    told: Callable[[], object] | None = None,
) -> None:
    """Wait until it holds, asked ten times a second at first, and three times after a while. Raises
    AssertionError, with what `told` returns, when it never does."""
    begun = _clock.monotonic()
    while not condition():
        assert _clock.monotonic() - begun < patience, told() if told else f"{condition} did not hold"
        pause(begun)


def pause(begun: float) -> None:
    """Rest between two looks at what has been waited for since `begun`, by the clock that only rises: what is
    waited for needs the machine more than who looks."""
    threading.Event().wait(min(_LONGEST, max(_SHORTEST, (_clock.monotonic() - begun) / 16)))
