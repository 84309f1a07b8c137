"""Clock jumps: whether the time of day may decide that something is old enough to be removed.

A clock that is days ahead (a wrong time server, a machine whose clock lost its battery) makes everything old.
What is written and used in the meantime has the wrong time, too, so a restarted process could not notice the
jump by that: the node keeps the time in a file.
"""

from __future__ import annotations

import logging
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.clock")
SETTLE_SECONDS: Final = 3600.0
"""Time to set a clock that jumped."""
_SETTLE_MS: Final = round(1000 * SETTLE_SECONDS)
_DAY_MS: Final = 86_400_000


class ClockJumps:
    """Notices that a clock is more than a day later than it should be. `settle_seconds`: how long it is not
    trusted then; 0: it always is. One for each task that removes things for their age; `watch`: what the node
    knows of its clock."""

    def __init__(self, clock: Clock, settle_seconds: float, watch: ClockWatch | None = None) -> None:
        self._clock, self._settle_seconds, self._watch = clock, settle_seconds, watch
        self._last: tuple[int, float] | None = None
        self._trusted_from = float("-inf")
        self.days_ahead = 0
        """How far ahead it was, if the last call has noticed that; else 0."""

    def __repr__(self) -> str:
        return f"<ClockJumps, trusted from {self._trusted_from:.0f}>"

    def trusts_clock(self, now: int, known_ms: int) -> bool:
        """Whether the clock has gone as it should since the last call, or has stayed where it is for long.

        `now`: what it has just shown, by which things are to be removed; `known_ms`: a time that has passed,
        with which the first call compares; 0: none is known.
        """
        passed = self._clock.monotonic()
        if self._last is None:
            ahead = float(now - known_ms) if known_ms else 0.0
        else:
            ahead = now - self._last[0] - 1000 * (passed - self._last[1])
        self._last, self.days_ahead = (now, passed), 0
        if ahead > _DAY_MS and self._settle_seconds:
            self._trusted_from = passed + self._settle_seconds
            self.days_ahead = round(ahead / _DAY_MS)
        settling = self._watch is not None and self._watch.is_settling()
        return passed >= self._trusted_from and not settling


_STATE: Final = struct.Struct("<QQ")  # when the clock was last seen, and until when it settles


class ClockWatch:
    """Notices jumps of a node's clock, and remembers them in `file` when the node restarts. One per node; to
    be asked every minute."""

    def __init__(self, clock: Clock, file: Path) -> None:
        self._clock, self._file = clock, file
        self._jumps = ClockJumps(clock, SETTLE_SECONDS)
        self._seen_ms, self._until_ms = self._read()
        self._write(os.O_CREAT)  # only now: a disk that is replaced later stays empty

    def __repr__(self) -> str:
        return f"<ClockWatch {self._file}>"

    def is_settling(self) -> bool:
        """Whether the clock has jumped ahead within the last hour, so that nothing is old yet."""
        now = self._clock.now_ms()
        trusted = self._jumps.trusts_clock(now, self._seen_ms)
        if self._jumps.days_ahead:
            self._until_ms = now + _SETTLE_MS
            _log.warning(
                "the clock is days later than it should be: nothing is removed for its age for an hour, in "
                "case it is wrong",
                extra={"days": self._jumps.days_ahead},
            )
        self._seen_ms = now
        self._write()
        # A clock that is before this hour has been set back.
        return not trusted or self._until_ms - _SETTLE_MS <= now < self._until_ms

    def _read(self) -> tuple[int, int]:
        try:
            seen, until = _STATE.unpack(self._file.read_bytes())
        except (OSError, struct.error):
            return 0, 0
        return seen, until

    def _write(self, how: int = 0) -> None:
        with suppress(OSError):  # without the file, a restart forgets the jump
            fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC | how, 0o600)
            try:
                os.pwrite(fd, _STATE.pack(self._seen_ms, self._until_ms), 0)
            finally:
                os.close(fd)
