"""Log level of a running node: show, change for a limited time, reset.

A change always expires by itself, so that it cannot be forgotten. A permanent level is a setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.auth.identities.admin_errors import AdminError
from meshd.config.options import LOG_LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.telemetry.logs import RuntimeLogLevel
    from meshd.util.clock import Clock

DEFAULT_SECONDS: Final = 900
MAX_SECONDS: Final = 86_400


class LevelDuration(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `PUT /-/admin/log-level/LEVEL`: for how long it holds."""

    seconds: int = DEFAULT_SECONDS


class LogLevelStatus(msgspec.Struct, frozen=True):
    """The log level of a node's processes. `seconds_left` is 0 while the configured level holds."""

    node: str
    level: str
    configured: str
    seconds_left: int


class LogLevelService:
    """Shows and changes the log level. `tell` makes all processes of the node read `verbosity` again."""

    def __init__(
        self,
        node_id: str,
        configured: str,
        verbosity: RuntimeLogLevel,
        clock: Clock,
        tell: Callable[[], None],
    ) -> None:
        self._node, self._configured = node_id, configured
        self._verbosity, self._clock, self._tell = verbosity, clock, tell

    def __repr__(self) -> str:
        return f"<LogLevelService of {self._node}, {self._verbosity!r}>"

    def current_level(self) -> LogLevelStatus:
        """Return the present level."""
        asked = self._verbosity.requested()
        left = max(0, round(asked.until - self._clock.monotonic())) if asked else 0
        level = asked.level if asked and left else self._configured
        return LogLevelStatus(self._node, level, self._configured, left)

    def set_level(self, level: str, wanted: LevelDuration) -> LogLevelStatus:
        """Set the level of all processes of the node for a limited time. Raises AdminError BadRequest."""
        if level not in LOG_LEVELS:
            raise AdminError(
                "BadRequest", f"the log level must be one of {', '.join(LOG_LEVELS)}, not {level[:20]!r}"
            )
        if not 1 <= wanted.seconds <= MAX_SECONDS:
            raise AdminError(
                "BadRequest",
                f"seconds must be from 1 to {MAX_SECONDS} (a day), not {wanted.seconds}",
                help="for a permanent level, set --log-level and restart the node",
            )
        self._verbosity.request_level(level, self._clock.monotonic() + wanted.seconds)
        self._tell()
        return self.current_level()

    def reset_level(self) -> LogLevelStatus:
        """Return all processes of the node to the configured level."""
        self._verbosity.reset_level()
        self._tell()
        return self.current_level()
