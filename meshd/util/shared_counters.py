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
from meshd.util.async_tasks import sleep_to_tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.util.clock import Clock


_TIME_BITS: Final = 37
_PER_SECOND: Final = 64
_MAX_TICKS: Final = (1 << _TIME_BITS) - 1  # 68 years of the monotonic clock
MAX_VERSION: Final = (1 << 64 - _TIME_BITS) - 1  # 134 million
TICK: Final = 1 / _PER_SECOND
"""Resolution of times in seconds."""


def shared_words(count: int) -> memoryview:
    """Returns `count` words, initially 0, shared with processes forked from now on."""
    return memoryview(mmap.mmap(-1, 8 * count)).cast("Q")


class VersionTimes:
    """Pairs of a version and a time (seconds of the monotonic clock), initially (0, 0.0), each stored in one
    64-bit word. Create it before the fork; each pair has one writer at a time."""

    def __init__(self, count: int) -> None:
        self._words = shared_words(count)

    def __repr__(self) -> str:
        return f"<VersionTimes {len(self._words)}>"

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[int, float]:
        word = self._words[index]  # a single load: both halves come from the same store
        return word >> _TIME_BITS, (word & _MAX_TICKS) / _PER_SECOND

    def __setitem__(self, index: int, pair: tuple[int, float]) -> None:
        """Stores a pair; the time is rounded down to a TICK. Raises OverflowError if either part does not
        fit."""
        version, ticks = pair[0], floor(pair[1] * _PER_SECOND)
        if not (0 <= version <= MAX_VERSION and 0 <= ticks <= _MAX_TICKS):
            raise OverflowError(f"version {version} at {pair[1]} s does not fit into a 64-bit word")
        self._words[index] = version << _TIME_BITS | ticks


_MAX_PROCESSES: Final = 1024
_client_activity: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_map_versions: Final = VersionTimes(_MAX_PROCESSES)  # per process: its map version and since when
_loop_delays: Final = memoryview(mmap.mmap(-1, 8 * _MAX_PROCESSES)).cast("d")
_background_work: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
_lease: Final = VersionTimes(1)  # the newest map version at the last renewal, and the end of the lease
_ending: Final = shared_words(1)
_deaths: Final = shared_words(1)
_synced_before: Final = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")  # per family of stores
_ACTIVE_SECONDS: Final = 0.25  # seconds for which a request marks clients as active
_BACKGROUND_SECONDS: Final = 1.0
_PAUSE: Final = 0.002
CALL_COST: Final = 8 << 10  # bytes that cost as much time as the overhead of one piece
PIECE_BYTES: Final = 512 << 10


def record_checkpoint(family: int, began: float) -> None:
    """Records that what a store had acknowledged at `began` (monotonic) is on disk."""
    _synced_before[family] = began


def last_checkpoint(family: int) -> float:
    """Returns the time of the monotonic clock before which everything acknowledged is on disk; 0.0 if no
    process takes checkpoints of this store."""
    return _synced_before[family]


def mark_client_activity(now: float) -> None:
    """Records that a client was served at `now` (monotonic)."""
    _client_activity[0] = now


def clients_active(now: float) -> bool:
    """Returns True if clients were served within the last moments."""
    return 0 <= now - _client_activity[0] < _ACTIVE_SECONDS and _client_activity[0] > 0


def mark_background_work(now: float) -> None:
    """Records that a process with a BackgroundThrottle works at `now`."""
    _background_work[0] = now


def background_work_active(now: float) -> bool:
    """Returns True if background work was done within the last second."""
    return 0 <= now - _background_work[0] < _BACKGROUND_SECONDS and _background_work[0] > 0


def set_loop_delay(process: int, seconds: float) -> None:
    """Records the recent event-loop delay of this process (numbered from 0)."""
    if process < _MAX_PROCESSES:
        _loop_delays[process] = seconds


def max_loop_delay() -> float:
    """Returns the largest event-loop delay of all processes."""
    return max(_loop_delays)


def set_map_version(process: int, version: int, now: float) -> None:
    """Records that process `process` (numbered from 0) serves requests under this map version from `now`
    (monotonic) on."""
    if process < _MAX_PROCESSES:
        # Rounded to the safe side: the time up, a version that does not fit down. Otherwise data could be
        # dropped while a process still serves requests under an older map.
        _map_versions[process] = min(version, MAX_VERSION), now + TICK


def oldest_map_version(now: float, grace: float) -> int:
    """Returns the lowest map version that some process used `grace` seconds before `now`; a very high number
    if no process has recorded one."""
    pairs = map(_map_versions.__getitem__, range(len(_map_versions)))
    known = [version if since <= now - grace else version - 1 for version, since in pairs if version]
    return min(known, default=1 << 62)


def newest_map_version() -> int:
    """Returns the newest map version that any process uses; 0 if none has recorded one."""
    return max(version for version, _ in map(_map_versions.__getitem__, range(len(_map_versions))))


def set_lease(until: float, version: int) -> None:
    """Records that the node's lease holds until `until` (monotonic), and the newest map version during that
    time. For a version that does not fit the lease counts as invalid, so the other nodes are asked."""
    _lease[0] = (version, until) if version <= MAX_VERSION else (0, 0.0)


def get_lease() -> tuple[int, float]:
    """Returns the newest map version at the last lease renewal, and the end of the lease (monotonic)."""
    return _lease[0]


def announce_end() -> None:
    """Records that the node is shutting down, and accepts no new connections."""
    _ending[0] = 1


def is_ending() -> bool:
    """Returns True if the node is shutting down."""
    return _ending[0] == 1


def record_death() -> None:
    """Counts a process that has ended although it was not told to, and whose writes may not have reached
    other nodes. Only the supervisor calls this."""
    _deaths[0] += 1


def count_deaths() -> int:
    """Returns how many such processes there were since the node started."""
    return _deaths[0]


class InLoopThrottle:
    """Divides background work into small pieces, with a pause after each while clients are active. One per
    process, for all of its background work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = 0
        self._lock = asyncio.Lock()

    @property
    def clients_active(self) -> bool:
        """True if clients were served within the last moments."""
        return clients_active(self._clock.monotonic())

    async def yield_to_clients(self, size: int = 0) -> None:
        """Call it after a piece of work of `size` bytes; PIECE_BYTES for work that blocks the event loop for
        a millisecond."""
        if not self.clients_active:
            await asyncio.sleep(0)
            return
        self._done += size + CALL_COST
        async with self._lock:  # one piece at a time: a client waits for at most one
            if self._done < PIECE_BYTES:
                await asyncio.sleep(0)
                return
            self._done -= PIECE_BYTES
            await asyncio.sleep(_PAUSE)


TARGET_DELAY: Final = 0.003
"""Target for the 90th percentile of event-loop delay in seconds."""
MAX_PAUSE: Final = 0.008  # seconds; leaves about 60 MB/s
MIN_PAUSE: Final = 0.001  # seconds; the resolution of event loops
_ADAPT_INTERVAL: Final = 0.1
_TICK: Final = 0.005
_TICKS: Final = 20  # samples per measurement
_IDLE_SLEEP: Final = 0.25
_NICE: Final = 10
NICE_FAILPOINT: Final = "yielding.nice"
"""Failpoint at which lowering a thread's priority fails."""


def lower_thread_priority() -> None:
    """Lowers the priority of this thread and those it starts: a tenth of a busy processor, all of an idle one
    (on Linux, where niceness is per thread)."""
    with suppress(OSError):
        failpoints.hit(NICE_FAILPOINT)
        os.nice(_NICE)


class BackgroundThrottle:
    """Pauses between small pieces of background work, by measured event-loop delay. One per process, for all
    of its background work; `on_change` is called with every new pause in seconds."""

    def __init__(self, clock: Clock, on_change: Callable[[float], None] = lambda pause: None) -> None:
        self._clock, self._on_change = clock, on_change
        self._done, self._adapted_at = 0, -_ADAPT_INTERVAL
        self._lock = asyncio.Lock()
        self.pause = 0.0

    def __repr__(self) -> str:
        return f"<BackgroundThrottle {self.pause * 1e3:.0f} ms>"

    async def yield_to_clients(self, size: int = 0) -> None:
        """Call it after a piece of work of `size` bytes; PIECE_BYTES for work that blocks an event loop for a
        millisecond."""
        now = self._clock.monotonic()
        mark_background_work(now)
        if now - self._adapted_at >= _ADAPT_INTERVAL:
            self._adapted_at = now
            self._adapt(now)
        if not self.pause:
            self._done = 0
            await asyncio.sleep(0)
            return
        self._done += size + CALL_COST
        async with self._lock:
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
            self._on_change(self.pause)


async def measure_loop_delay(clock: Clock, process: int) -> None:
    """Measures the delay of this event loop while background work runs, forever. `process` as in
    `set_map_version`."""
    while True:
        if not background_work_active(clock.monotonic()):
            set_loop_delay(process, 0.0)
            await sleep_to_tick(_IDLE_SLEEP)
            continue
        late: list[float] = []
        for _ in range(_TICKS):
            due = clock.monotonic() + _TICK
            await asyncio.sleep(_TICK)
            late.append(clock.monotonic() - due)
        set_loop_delay(process, sorted(late)[_TICKS - 1 - _TICKS // 10])
