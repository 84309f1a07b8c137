"""Clock jumps: whether the time of day may decide that something is old enough to be removed.

A clock that is days ahead (a wrong time server, a machine whose clock lost its battery) makes everything old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshd.util.clock import Clock

SETTLE_SECONDS: Final = 3600.0
"""Time to set a clock that jumped."""
_DAY_MS: Final = 86_400_000


class ClockJumps:
    """Notices that a clock is more than a day later than it should be. `settle_seconds`: how long it is not
    trusted then; 0: it always is. One for each task that removes things for their age."""

    def __init__(self, clock: Clock, settle_seconds: float) -> None:
        self._clock, self._settle_seconds = clock, settle_seconds
        self._last: tuple[int, float] | None = None
        self._trusted_from = float("-inf")
        self.days_ahead = 0
        """How far ahead it was, if the last call has noticed that; else 0."""

    def __repr__(self) -> str:
        return f"<ClockJumps, trusted from {self._trusted_from:.0f}>"

    def trusts_clock(self, known_ms: int) -> bool:
        """Whether the clock has gone as it should since the last call, or has stayed where it is for long.

        `known_ms`: a time that has passed, with which the first call compares; 0: none is known.
        """
        now, passed = self._clock.now_ms(), self._clock.monotonic()
        if self._last is None:
            ahead = float(now - known_ms) if known_ms else 0.0
        else:
            ahead = now - self._last[0] - 1000 * (passed - self._last[1])
        self._last, self.days_ahead = (now, passed), 0
        if ahead > _DAY_MS and self._settle_seconds:
            self._trusted_from = passed + self._settle_seconds
            self.days_ahead = round(ahead / _DAY_MS)
        return passed >= self._trusted_from
