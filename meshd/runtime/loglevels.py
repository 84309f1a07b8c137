"""The supervisor's part in the log level: it tells all processes of a change, and sees when one is over.

Law: the level lies in `telemetry.verbosity`; whoever changes it sends the supervisor SIGUSR1. SIGUSR2 is for
people whom the node's endpoint does not answer.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from meshd.service.cluster.loudness import DEFAULT_SECONDS
from meshd.telemetry import logs

if TYPE_CHECKING:
    from meshd.kit.clock import Clock
    from meshd.telemetry.verbosity import Asked, Verbosity

_log = logging.getLogger("meshd.supervisor")


def tell_supervisor() -> None:
    """From a child of its: the level was changed."""
    os.kill(os.getppid(), signal.SIGUSR1)


class LevelWatch:
    """What the supervisor knows of the level."""

    def __init__(self, configured: str, verbosity: Verbosity, clock: Clock) -> None:
        self._configured, self._verbosity, self._clock = configured, verbosity, clock
        self._last: Asked | None = None

    def __repr__(self) -> str:
        return f"<LevelWatch {self._last}>"

    def due(self) -> float | None:
        """The second of the monotonic clock at which to look again."""
        return self._last.until if self._last else None

    def toggle(self) -> None:
        """`debug` for a while, or an end to what was asked for."""
        if self._verbosity.asked():
            self._verbosity.forget()
        else:
            self._verbosity.ask("debug", self._clock.monotonic() + DEFAULT_SECONDS)

    def look(self) -> bool:
        """Whether the level is another than it was: the children are to be told."""
        now, asked = self._clock.monotonic(), self._verbosity.asked()
        if asked and now >= asked.until:
            self._verbosity.forget()
            asked = None
        if asked == self._last:
            return False
        self._last = asked
        level = asked.level if asked else self._configured
        logs.set_level("warning")  # the next line is written whatever the level was, and will be
        _log.warning(
            "the log level changes",
            extra={"now": level, "seconds": round(asked.until - now) if asked else "for good"},
        )
        logs.set_level(level)
        return True
