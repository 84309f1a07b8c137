"""Log level of a running node: show, change for a limited time, reset.

A changed level always ends by itself, so nobody has to remember it. A permanent level is a setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from meshd.auth.identities.admin_responses import AdminError
from meshd.config.options import LOG_LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.telemetry.logs import RuntimeLogLevel
    from meshd.util.clock import Clock

DEFAULT_SECONDS: Final = 900
MAX_SECONDS: Final = 86_400


class LevelDuration(msgspec.Struct, forbid_unknown_fields=True):
    """For how long."""

    seconds: int = DEFAULT_SECONDS


class LogLevelStatus(msgspec.Struct, frozen=True):
    """What the processes of a node log. `seconds_left` 0: as its settings say."""

    node: str
    level: str
    configured: str
    seconds_left: int


class LogLevelService:
    """`tell` has all processes of the node look at `verbosity` again."""

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
        return f"<Loudness of {self._node}, {self._verbosity!r}>"

    def current_level(self) -> LogLevelStatus:
        """The level now."""
        asked = self._verbosity.requested()
        left = max(0, round(asked.until - self._clock.monotonic())) if asked else 0
        level = asked.level if asked and left else self._configured
        return LogLevelStatus(self._node, level, self._configured, left)

    def set_level(self, level: str, wanted: LevelDuration) -> LogLevelStatus:
        """All processes of the node log at `level` for so long. Raises AdminError BadRequest."""
        if level not in LOG_LEVELS:
            raise AdminError(
                "BadRequest", f"a log level is one of {', '.join(LOG_LEVELS)}, not {level[:20]!r}"
            )
        if not 1 <= wanted.seconds <= MAX_SECONDS:
            raise AdminError(
                "BadRequest",
                f"seconds must be from 1 to {MAX_SECONDS} (a day), not {wanted.seconds}",
                help="a level that is to stay is a setting: --log-level, and a restart",
            )
        self._verbosity.request_level(level, self._clock.monotonic() + wanted.seconds)
        self._tell()
        return self.current_level()

    def reset_level(self) -> LogLevelStatus:
        """All processes of the node log as its settings say."""
        self._verbosity.reset_level()
        self._tell()
        return self.current_level()
