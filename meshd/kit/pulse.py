"""What the processes of a node tell each other without asking: when clients were last served and how long
event loops wait (background work gives way), which version of the cluster map each goes by, and until when
the node's lease holds.

Law: numbers in memory that all processes share, so this module is to be loaded before the first fork. A
number is written whole; who writes last is right. Two numbers that are read together are one word
(`shared_words`): processors may reorder the stores and loads of two.
"""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING, Final

from meshd.kit.shared_words import MAX_VERSION, TICK, VersionTimes

if TYPE_CHECKING:
    from meshd.kit.clock import Clock

_MOST: Final = 1024  # processes
_cell: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_maps: Final = VersionTimes(_MOST)  # of each process: the version it goes by, and since when
_waits: Final = memoryview(mmap.mmap(-1, 8 * _MOST)).cast("d")
_work: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_lease: Final = VersionTimes(1)  # the newest map when it was renewed, and until when it holds
_BUSY: Final = 0.25  # seconds for which a request says that there are clients
_WORKED: Final = 1.0
_PAUSE: Final = 0.002
CALL: Final = 8 << 10  # bytes that take as long as what is done around them
PIECE: Final = 512 << 10


def heard(now: float) -> None:
    """A client was answered at `now` (monotonic)."""
    _cell[0] = now


def is_busy(now: float) -> bool:
    """Whether clients were served a moment ago."""
    return 0 <= now - _cell[0] < _BUSY and _cell[0] > 0


def works(now: float) -> None:
    """A process that gives way by measure works in the background at `now`."""
    _work[0] = now


def is_worked(now: float) -> bool:
    """Whether one did a moment ago."""
    return 0 <= now - _work[0] < _WORKED and _work[0] > 0


def waited(process: int, seconds: float) -> None:
    """So long is the event loop of this process (counted from 0) kept waiting of late."""
    if process < _MOST:
        _waits[process] = seconds


def longest_wait() -> float:
    """Of all processes."""
    return max(_waits)


def goes_by(process: int, version: int, now: float) -> None:
    """Process `process` (counted from 0) answers by this version of the map, from `now` (monotonic) on."""
    if process < _MOST:
        # Rounded so that nothing is let go of too early: the time up, a version that does not fit down.
        _maps[process] = min(version, MAX_VERSION), now + TICK


def gone_by(now: float, grace: float) -> int:
    """The lowest version that some process went by `grace` seconds before `now`; a very high one when nobody
    says anything."""
    pairs = map(_maps.__getitem__, range(len(_maps)))
    known = [version if since <= now - grace else version - 1 for version, since in pairs if version]
    return min(known, default=1 << 62)


def newest_gone_by() -> int:
    """The newest version that some process goes by, 0 while nobody says anything."""
    return max(version for version, _ in map(_maps.__getitem__, range(len(_maps))))


def holds(until: float, version: int) -> None:
    """The node's lease holds until then (monotonic), and this was the newest map while it did. With a version
    that does not fit nobody is sure of it: the other nodes are asked."""
    _lease[0] = (version, until) if version <= MAX_VERSION else (0, 0.0)


def held() -> tuple[int, float]:
    """The newest map when the lease was last renewed, and until when it holds (monotonic)."""
    return _lease[0]


class Courtesy:
    """Background work in small pieces, each followed by a pause, while there are clients; without pauses when
    there are none. One a process, for all of its background work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = 0
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether clients were served a moment ago."""
        return is_busy(self._clock.monotonic())

    async def rest(self, size: int = 0) -> None:
        """After a piece of work of so many bytes; PIECE for what keeps the event loop for a millisecond."""
        if not self.busy:
            await asyncio.sleep(0)
            return
        self._done += size + CALL
        async with self._turn:  # one after the other: clients wait for one piece at most
            if self._done < PIECE:
                await asyncio.sleep(0)
                return
            self._done -= PIECE
            await asyncio.sleep(_PAUSE)
