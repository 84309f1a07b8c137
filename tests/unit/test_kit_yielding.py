"""Background work pauses as long as event loops that answer clients are kept waiting, and no longer."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from meshd.kit import failpoints, pulse
from meshd.kit.clock import ManualClock, SystemClock
from meshd.kit.pulse import PIECE
from meshd.kit.yielding import BEARABLE, GIVING_WAY, LONGEST, SHORTEST, Yielding, give_way, tell_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROCESS = 7


@pytest.fixture
def told() -> Iterator[list[float]]:
    yield []
    pulse.waited(_PROCESS, 0.0)
    pulse.heard(0.0)
    pulse.works(0.0)


def test_pauses_grow_while_loops_wait_and_go_when_they_do_not(told: list[float]) -> None:
    clock = ManualClock(5_000_000)
    yielding = Yielding(clock, told.append)

    async def work(times: int) -> None:
        for _ in range(times):
            clock.advance(0.2)
            pulse.heard(clock.monotonic())
            await yielding.rest(PIECE)

    pulse.waited(_PROCESS, BEARABLE)
    asyncio.run(work(2))
    assert told == []
    pulse.waited(_PROCESS, 2 * BEARABLE)
    asyncio.run(work(6))
    assert told == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST, LONGEST]
    pulse.waited(_PROCESS, 0.0)
    asyncio.run(work(5))
    assert told[4:] == [4 * SHORTEST, 2 * SHORTEST, SHORTEST, 0.0]


def test_nobody_is_given_way_to_where_there_are_no_clients(told: list[float]) -> None:
    clock = ManualClock(5_000_000)
    yielding = Yielding(clock, told.append)
    pulse.waited(_PROCESS, 1.0)
    pulse.heard(clock.monotonic())
    asyncio.run(yielding.rest(PIECE))
    clock.advance(1.0)
    asyncio.run(yielding.rest(PIECE))
    assert told == [SHORTEST, 0.0]


def test_a_loop_that_stands_still_is_told_while_somebody_works(told: list[float]) -> None:
    async def stand() -> float:
        clock = SystemClock()
        telling = asyncio.ensure_future(tell_waits(clock, _PROCESS))
        try:
            async with asyncio.timeout(60):
                while not pulse.longest_wait():
                    pulse.works(clock.monotonic())
                    time.sleep(0.02)  # noqa: ASYNC251  it is what is measured
                    await asyncio.sleep(0)
        finally:
            telling.cancel()
        return pulse.longest_wait()

    assert asyncio.run(stand()) > BEARABLE
    assert told == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_thread_gives_way_unless_the_system_refuses(refused: bool) -> None:
    if refused:
        failpoints.configure(f"{GIVING_WAY}=error")
    try:
        with ThreadPoolExecutor(1, initializer=give_way) as pool:
            mine, its = os.nice(0), pool.submit(os.nice, 0).result(60)
    finally:
        failpoints.configure("")
    assert its == (mine if refused else min(mine + 10, 19))
