"""The supervisor's part in the runtime log level: signals changes and ends temporary levels.

`telemetry.logs` holds the level; a process that changes it sends the supervisor SIGUSR1. SIGUSR2 toggles
debug logging for an operator whose node does not answer requests.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from meshd.server.api.log_level import DEFAULT_SECONDS
from meshd.telemetry import logs

if TYPE_CHECKING:
    from meshd.telemetry.logs import RequestedLevel, RuntimeLogLevel
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.supervisor")


def notify_supervisor() -> None:
    """Tell the supervisor, from one of its children, that the level was changed."""
    os.kill(os.getppid(), signal.SIGUSR1)


class LogLevelWatcher:
    """Watches the runtime log level for the supervisor."""

    def __init__(self, configured: str, verbosity: RuntimeLogLevel, clock: Clock) -> None:
        self._configured, self._verbosity, self._clock = configured, verbosity, clock
        self._last: RequestedLevel | None = None

    def __repr__(self) -> str:
        return f"<LogLevelWatcher {self._last}>"

    def next_check(self) -> float | None:
        """Return the monotonic time of the next check, if any."""
        return self._last.until if self._last else None

    def toggle_debug(self) -> None:
        """Switch to `debug` for a while, or end the requested level."""
        if self._verbosity.requested():
            self._verbosity.reset_level()
        else:
            self._verbosity.request_level("debug", self._clock.monotonic() + DEFAULT_SECONDS)

    def check_change(self) -> bool:
        """Whether the level has changed, so that the children must be told."""
        now, asked = self._clock.monotonic(), self._verbosity.requested()
        if asked and now >= asked.until:
            self._verbosity.reset_level()
            asked = None
        if asked == self._last:
            return False
        self._last = asked
        level = asked.level if asked else self._configured
        logs.set_level("warning")  # so that the next line is written at any level
        _log.warning(
            "the log level was changed",
            extra={"now": level, "seconds": round(asked.until - now) if asked else "for good"},
        )
        logs.set_level(level)
        return True
