"""Background work pauses as long as event loops that answer clients are kept waiting, and no longer."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from meshd.util import failpoints, shared_counters
from meshd.util.clock import SystemClock
from meshd.util.shared_counters import (
    MAX_PAUSE,
    MIN_PAUSE,
    NICE_FAILPOINT,
    PIECE_BYTES,
    TARGET_DELAY,
    BackgroundThrottle,
    lower_thread_priority,
    measure_loop_delay,
)
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROCESS = 7


@pytest.fixture
def told() -> Iterator[list[float]]:
    yield []
    shared_counters.set_loop_delay(_PROCESS, 0.0)
    shared_counters.mark_client_activity(0.0)
    shared_counters.mark_background_work(0.0)


def test_pauses_grow_while_loops_wait_and_go_when_they_do_not(told: list[float]) -> None:
    clock = ManualClock(5_000_000)
    yielding = BackgroundThrottle(clock, told.append)

    async def work(times: int) -> None:
        for _ in range(times):
            clock.advance(0.2)
            shared_counters.mark_client_activity(clock.monotonic())
            await yielding.yield_to_clients(PIECE_BYTES)

    shared_counters.set_loop_delay(_PROCESS, TARGET_DELAY)
    asyncio.run(work(2))
    assert told == []
    shared_counters.set_loop_delay(_PROCESS, 2 * TARGET_DELAY)
    asyncio.run(work(6))
    assert told == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE, MAX_PAUSE]
    shared_counters.set_loop_delay(_PROCESS, 0.0)
    asyncio.run(work(5))
    assert told[4:] == [4 * MIN_PAUSE, 2 * MIN_PAUSE, MIN_PAUSE, 0.0]


def test_nobody_is_given_way_to_where_there_are_no_clients(told: list[float]) -> None:
    clock = ManualClock(5_000_000)
    yielding = BackgroundThrottle(clock, told.append)
    shared_counters.set_loop_delay(_PROCESS, 1.0)
    shared_counters.mark_client_activity(clock.monotonic())
    asyncio.run(yielding.yield_to_clients(PIECE_BYTES))
    clock.advance(1.0)
    asyncio.run(yielding.yield_to_clients(PIECE_BYTES))
    assert told == [MIN_PAUSE, 0.0]


def test_a_loop_that_stands_still_is_told_while_somebody_works(told: list[float]) -> None:
    async def stand() -> float:
        clock = SystemClock()
        telling = asyncio.ensure_future(measure_loop_delay(clock, _PROCESS))
        try:
            async with asyncio.timeout(60):
                while not shared_counters.max_loop_delay():
                    shared_counters.mark_background_work(clock.monotonic())
                    time.sleep(0.02)  # noqa: ASYNC251  it is what is measured
                    await asyncio.sleep(0)
        finally:
            telling.cancel()
        return shared_counters.max_loop_delay()

    assert asyncio.run(stand()) > TARGET_DELAY
    assert told == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_thread_gives_way_unless_the_system_refuses(refused: bool) -> None:
    if refused:
        failpoints.configure(f"{NICE_FAILPOINT}=error")
    try:
        with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
            mine, its = os.nice(0), pool.submit(os.nice, 0).result(60)
    finally:
        failpoints.configure("")
    assert its == (mine if refused else min(mine + 10, 19))
