"""When a dead child is started again, and when that is given up. Pure: time comes in, a decision goes out.

Law: a first death is answered at once, repeated ones with doubling delays; a child that lived is forgiven.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGIVEN_AFTER = 30.0
FIRST_DELAY = 0.1
LONGEST_DELAY = 5.0
ATTEMPTS_AT_START = 3


@dataclass(frozen=True, slots=True)
class Deaths:
    """What is remembered of one child: deaths in a row, and whether it was ever ready."""

    in_a_row: int = 0
    was_ready: bool = False

    def ready(self) -> Deaths:
        """The child came up."""
        return Deaths(self.in_a_row, was_ready=True)

    def died(self, lived: float) -> Deaths:
        """The child died after `lived` seconds."""
        return Deaths(1 if lived >= FORGIVEN_AFTER else self.in_a_row + 1, self.was_ready)

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if self.in_a_row <= 1:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** min(self.in_a_row - 2, 30), LONGEST_DELAY)

    @property
    def hopeless(self) -> bool:
        """It never came up, and several tries are enough to know."""
        return not self.was_ready and self.in_a_row >= ATTEMPTS_AT_START
