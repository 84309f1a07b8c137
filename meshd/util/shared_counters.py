"""Counters that all processes of a node share (activity, loop delay, map, lease), and background throttles.

Law: load this module before the first fork. Values that must be consistent with each other are one
aligned 64-bit word: ARM64 may reorder two stores or two loads, so a reader of two words could combine a
new lease with an old map version. An item of a `memoryview` cast to "Q" is one indivisible load or
store; `struct.pack_into` is not, for it clears the bytes first. A background process pauses longer while
workers measure a high event-loop delay, shorter while it is low, and not at all without clients.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from contextlib import suppress
from math import floor
from typing import TYPE_CHECKING, Final

from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.util.clock import Clock


_TIME_BITS: Final = 37
_PER_SECOND: Final = 64
_MAX_TICKS: Final = (1 << _TIME_BITS) - 1  # 68 years of the monotonic clock
MAX_VERSION: Final = (1 << 64 - _TIME_BITS) - 1  # 134 million
TICK: Final = 1 / _PER_SECOND
"""Seconds between two times that can be told apart."""


def shared_words(count: int) -> memoryview:
    """`count` words, all 0, which this process shares with those that it forks from now on."""
    return memoryview(mmap.mmap(-1, 8 * count)).cast("Q")


class VersionTimes:
    """`count` pairs of a version and a time (seconds of the monotonic clock), all (0, 0.0) at first. Make it
    before the processes that share it are forked; each pair has one writer at a time."""

    def __init__(self, count: int) -> None:
        self._words = shared_words(count)

    def __repr__(self) -> str:
        return f"<VersionTimes {len(self._words)}>"

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[int, float]:
        word = self._words[index]  # one load: both halves are of one store
        return word >> _TIME_BITS, (word & _MAX_TICKS) / _PER_SECOND

    def __setitem__(self, index: int, pair: tuple[int, float]) -> None:
        """The time is rounded down to a TICK. Raises OverflowError when one of the two does not fit."""
        version, ticks = pair[0], floor(pair[1] * _PER_SECOND)
        if not (0 <= version <= MAX_VERSION and 0 <= ticks <= _MAX_TICKS):
            raise OverflowError(f"version {version} at {pair[1]} s does not fit into a 64-bit word")
        self._words[index] = version << _TIME_BITS | ticks


_MAX_PROCESSES: Final = 1024  # processes
_client_activity: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_map_versions: Final = VersionTimes(_MAX_PROCESSES)  # of each process: the version it goes by, and since when
_loop_delays: Final = memoryview(mmap.mmap(-1, 8 * _MAX_PROCESSES)).cast("d")
_background_work: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_lease: Final = VersionTimes(1)  # the newest map when it was renewed, and until when it holds
_ACTIVE_SECONDS: Final = 0.25  # seconds for which a request says that there are clients
_BACKGROUND_SECONDS: Final = 1.0
_PAUSE: Final = 0.002
CALL_COST: Final = 8 << 10  # bytes that take as long as what is done around them
PIECE_BYTES: Final = 512 << 10


def mark_client_activity(now: float) -> None:
    """A client was answered at `now` (monotonic)."""
    _client_activity[0] = now


def clients_active(now: float) -> bool:
    """Whether clients were served a moment ago."""
    return 0 <= now - _client_activity[0] < _ACTIVE_SECONDS and _client_activity[0] > 0


def mark_background_work(now: float) -> None:
    """A process that gives way by measure works in the background at `now`."""
    _background_work[0] = now


def background_work_active(now: float) -> bool:
    """Whether one did a moment ago."""
    return 0 <= now - _background_work[0] < _BACKGROUND_SECONDS and _background_work[0] > 0


def set_loop_delay(process: int, seconds: float) -> None:
    """So long is the event loop of this process (counted from 0) kept waiting of late."""
    if process < _MAX_PROCESSES:
        _loop_delays[process] = seconds


def max_loop_delay() -> float:
    """Of all processes."""
    return max(_loop_delays)


def set_map_version(process: int, version: int, now: float) -> None:
    """Process `process` (counted from 0) answers by this version of the map, from `now` (monotonic) on."""
    if process < _MAX_PROCESSES:
        # Rounded so that nothing is let go of too early: the time up, a version that does not fit down.
        _map_versions[process] = min(version, MAX_VERSION), now + TICK


def oldest_map_version(now: float, grace: float) -> int:
    """The lowest version that some process went by `grace` seconds before `now`; a very high one when nobody
    says anything."""
    pairs = map(_map_versions.__getitem__, range(len(_map_versions)))
    known = [version if since <= now - grace else version - 1 for version, since in pairs if version]
    return min(known, default=1 << 62)


def newest_map_version() -> int:
    """The newest version that some process goes by, 0 while nobody says anything."""
    return max(version for version, _ in map(_map_versions.__getitem__, range(len(_map_versions))))


def set_lease(until: float, version: int) -> None:
    """The node's lease holds until then (monotonic), and this was the newest map while it did. With a version
    that does not fit nobody is sure of it: the other nodes are asked."""
    _lease[0] = (version, until) if version <= MAX_VERSION else (0, 0.0)


def get_lease() -> tuple[int, float]:
    """The newest map when the lease was last renewed, and until when it holds (monotonic)."""
    return _lease[0]


class InLoopThrottle:
    """Background work in small pieces, each followed by a pause, while there are clients; without pauses when
    there are none. One a process, for all of its background work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = 0
        self._turn = asyncio.Lock()

    @property
    def clients_active(self) -> bool:
        """Whether clients were served a moment ago."""
        return clients_active(self._clock.monotonic())

    async def yield_to_clients(self, size: int = 0) -> None:
        """After a piece of work of so many bytes; PIECE for what keeps the event loop for a millisecond."""
        if not self.clients_active:
            await asyncio.sleep(0)
            return
        self._done += size + CALL_COST
        async with self._turn:  # one after the other: clients wait for one piece at most
            if self._done < PIECE_BYTES:
                await asyncio.sleep(0)
                return
            self._done -= PIECE_BYTES
            await asyncio.sleep(_PAUSE)


TARGET_DELAY: Final = 0.003
"""Seconds that an event loop may be kept waiting, but for the worst tenth of its turns."""
MAX_PAUSE: Final = 0.008  # seconds of a pause: about 60 MB/s are left
MIN_PAUSE: Final = 0.001  # what event loops can tell apart
_ADAPT_INTERVAL: Final = 0.1
_TICK: Final = 0.005
_TICKS: Final = 20  # of which one is as long as is told
_IDLE_SLEEP: Final = 0.25
_NICE: Final = 10
NICE_FAILPOINT: Final = "yielding.nice"
"""The failpoint at which a system refuses to put a thread behind others."""


def lower_thread_priority() -> None:
    """This thread, and those it starts from now on, get a tenth of a busy processor and all of an idle one
    (on Linux, where every thread has a niceness of its own)."""
    with suppress(OSError):
        failpoints.hit(NICE_FAILPOINT)
        os.nice(_NICE)


class BackgroundThrottle:
    """Pauses between small pieces of work. One a process, for all of its background work; `told` hears of
    every other length of the pause, in seconds."""

    def __init__(self, clock: Clock, told: Callable[[float], None] = lambda pause: None) -> None:
        self._clock, self._told = clock, told
        self._done, self._looked = 0, -_ADAPT_INTERVAL
        self._turn = asyncio.Lock()
        self.pause = 0.0

    def __repr__(self) -> str:
        return f"<Yielding {self.pause * 1e3:.0f} ms>"

    async def yield_to_clients(self, size: int = 0) -> None:
        """After a piece of work of so many bytes; PIECE for what keeps an event loop for a millisecond."""
        now = self._clock.monotonic()
        mark_background_work(now)
        if now - self._looked >= _ADAPT_INTERVAL:
            self._looked = now
            self._adapt(now)
        if not self.pause:
            self._done = 0
            await asyncio.sleep(0)
            return
        self._done += size + CALL_COST
        async with self._turn:
            if self._done < PIECE_BYTES:
                await asyncio.sleep(0)
                return
            self._done -= PIECE_BYTES
            await asyncio.sleep(self.pause)

    def _adapt(self, now: float) -> None:
        before = self.pause
        if not clients_active(now):
            self.pause = 0.0
        elif max_loop_delay() > TARGET_DELAY:
            self.pause = min(max(2 * self.pause, MIN_PAUSE), MAX_PAUSE)
        else:
            self.pause = self.pause / 2 if self.pause > MIN_PAUSE else 0.0
        if self.pause != before:
            self._told(self.pause)


async def measure_loop_delay(clock: Clock, process: int) -> None:
    """Measure how long this event loop is kept waiting whenever somebody works in the background, for ever.
    `process` as in `set_map_version`."""
    while True:
        if not background_work_active(clock.monotonic()):
            set_loop_delay(process, 0.0)
            await asyncio.sleep(_IDLE_SLEEP)
            continue
        late: list[float] = []
        for _ in range(_TICKS):
            due = clock.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            late.append(clock.monotonic() - due)
        set_loop_delay(process, sorted(late)[_TICKS - 1 - _TICKS // 10])
