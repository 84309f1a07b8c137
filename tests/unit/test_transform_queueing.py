"""The fair queue: turns between jobs, order within one, nothing lost to a cancelled waiter."""

from __future__ import annotations

import asyncio

from meshd.transform.queueing import FairQueue


def test_jobs_take_turns() -> None:
    async def run() -> list[tuple[str, int]]:
        queue: FairQueue[int] = FairQueue()
        for number in range(4):
            queue.put("greedy", number)
        queue.put("modest", 0)
        queue.put("modest", 1)
        return [await queue.get() for _ in range(6)]

    assert asyncio.run(run()) == [
        ("greedy", 0), ("modest", 0), ("greedy", 1), ("modest", 1), ("greedy", 2), ("greedy", 3),
    ]  # fmt: skip


def test_what_is_retried_goes_first() -> None:
    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        queue.put("job", 1)
        queue.put("job", 0, first=True)
        return [(await queue.get())[1] for _ in range(2)]

    assert asyncio.run(run()) == [0, 1]


def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    async def run() -> int:
        queue: FairQueue[int] = FairQueue()
        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put("job", 5)  # wakes the first
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return (await second)[1]

    assert asyncio.run(run()) == 5
