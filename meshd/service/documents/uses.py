"""When results of views were last read: a minute a slot, in a file that all processes of a node write to.

Law: a sketch. Names share slots by their hash, so a result may look more recently used than it is, never
less; memory does not grow with the number of results. Losing it costs order, not results.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from meshd.kit.clock import Clock

MINUTE_MS: Final = 60_000
_SLOTS: Final = 1 << 20
_SLOT = struct.Struct("=I")


class Uses(Protocol):
    """Who notes and tells uses."""

    def note(self, key: str) -> None:
        """A result was read."""
        ...

    def table(self) -> LastUses:
        """All that was noted until now."""
        ...


class LastUses:
    """What was noted at some moment."""

    def __init__(self, minutes: npt.NDArray[np.uint32]) -> None:
        self._minutes = minutes

    def __repr__(self) -> str:
        return f"<LastUses, {np.count_nonzero(self._minutes)} slots used>"

    def minute(self, key: str) -> int:
        """The minute (since 1970) a result was last read in; 0 when none was noted."""
        return int(self._minutes[_slot(key)])


class UseFile:
    """The sketch in a file, read and written in place: not mapped, for a full disk must not end a process."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, _SLOTS * _SLOT.size)

    def __repr__(self) -> str:
        return f"<UseFile fd {self._fd}>"

    def note(self, key: str) -> None:
        minute = self._clock.now_ms() // MINUTE_MS
        with suppress(OSError):
            os.pwrite(self._fd, _SLOT.pack(minute), _slot(key) * _SLOT.size)

    def table(self) -> LastUses:
        data = os.pread(self._fd, _SLOTS * _SLOT.size, 0)
        return LastUses(np.frombuffer(data, np.uint32))

    def close(self) -> None:
        os.close(self._fd)


def _slot(key: str) -> int:
    return zlib.crc32(key.encode()) % _SLOTS
