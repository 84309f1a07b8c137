"""Waiting for threads and processes of tests, with an end.

Law: whoever waits does so for `PATIENCE` seconds, then raises; nothing here waits for ever.
"""

from __future__ import annotations

from typing import Final, Protocol

PATIENCE: Final = 60.0
"""Seconds; a machine that is slow, or has other things to do, is no failure."""


class Joinable(Protocol):
    """A thread, or a process of `multiprocessing`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait that long at most."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""


def await_end(*awaited: Joinable, patience: float = PATIENCE) -> None:
    """Wait until each has ended. Raises AssertionError for one that does not."""
    for each in awaited:
        each.join(patience)
        assert not each.is_alive(), f"{each!r} has not ended within {patience} s"
