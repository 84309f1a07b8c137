"""Who is told of each step of a loop: a page for `mesh top`, a trace, ranges of a profiler.

Law: told by the thread of the loop, in microseconds, in the order waits, takes, waits, …, ends. An observer
of the parent process is not told by a forked child. What an observer cannot do it leaves; it never fails a
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshsdk.meters import Meter
    from meshsdk.stalls import Arrival, Stall


@dataclass(frozen=True, slots=True)
class Step:
    """A batch handed over: `since`, `until`: monotonic seconds in which it was waited for; `arrival`: how its
    frame came, `origin`: how the node came by it."""

    epoch: int
    step: int
    rows: int
    bytes: int
    since: float
    until: float
    stall: Stall
    arrival: Arrival | None
    origin: str


class Observer(Protocol):
    """One loader's, in process `pid`."""

    pid: int

    def waits(self, now: float) -> None:
        """The loop asks for a batch."""

    def takes(self, step: Step, meter: Meter) -> None:
        """It has it."""

    def ends(self, now: float, meter: Meter) -> None:
        """The loop is over; another may begin."""

    def close(self) -> None:
        """The loader is closed. Idempotent."""
