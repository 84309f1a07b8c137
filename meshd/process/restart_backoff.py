"""Restart backoff: when a dead child is restarted, and when the supervisor gives up.

Pure: it receives times and returns decisions. The first crash is followed by an immediate restart, repeated
ones by doubling delays; a child that ran for a while starts from zero again.
"""

from __future__ import annotations

from dataclasses import dataclass

RESET_AFTER = 30.0
FIRST_DELAY = 0.1
MAX_DELAY = 5.0
MAX_START_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """The record of one child: deaths in a row, and whether it was ever ready."""

    in_a_row: int = 0
    was_ready: bool = False

    def after_ready(self) -> CrashHistory:
        """Return the history after the child became ready."""
        return CrashHistory(self.in_a_row, was_ready=True)

    def after_crash(self, lived: float) -> CrashHistory:
        """Return the history after the child died, `lived` seconds after its start."""
        return CrashHistory(1 if lived >= RESET_AFTER else self.in_a_row + 1, self.was_ready)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self.in_a_row <= 1:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** min(self.in_a_row - 2, 30), MAX_DELAY)

    @property
    def should_give_up(self) -> bool:
        """Whether the child never became ready in `MAX_START_ATTEMPTS` starts."""
        return not self.was_ready and self.in_a_row >= MAX_START_ATTEMPTS
