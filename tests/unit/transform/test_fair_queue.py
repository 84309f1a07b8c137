"""The fair queue: time shared between accounts and jobs, order within a job, nothing lost to a cancelled
waiter."""

from __future__ import annotations

import asyncio

import pytest

from meshd.transform.pool import EARLY_SECONDS
from meshd.transform.render_queue import EXPECTED, FairQueue, QueuePosition


def test_jobs_take_turns() -> None:
    async def run() -> list[tuple[str, int]]:
        queue: FairQueue[int] = FairQueue()
        for number in range(4):
            queue.put("ann", "greedy", number)
        queue.put("ann", "modest", 0)
        queue.put("ann", "modest", 1)
        return [(ticket.job, ticket.item) for ticket in [await queue.get() for _ in range(6)]]

    assert asyncio.run(run()) == [
        ("greedy", 0), ("modest", 0), ("greedy", 1), ("modest", 1), ("greedy", 2), ("greedy", 3),
    ]  # fmt: skip


def test_many_jobs_of_one_account_do_not_outweigh_one_of_another() -> None:
    async def run() -> list[str]:
        queue: FairQueue[int] = FairQueue()
        for number in range(100):
            queue.put("ann", f"job-{number}", number)
        for number in range(5):
            queue.put("ben", "job", number)
        return [(await queue.get()).account for _ in range(12)]

    assert asyncio.run(run()) == ["ann", "ben"] * 5 + ["ann", "ann"]


def test_background_work_waits_for_all_other_and_is_shared_as_well() -> None:
    async def run() -> list[tuple[str, int]]:
        queue: FairQueue[int] = FairQueue()
        for number in range(2):
            queue.put("ann", "warm-up", number, background=True)
            queue.put("ben", "warm-up", number, background=True)
        queue.put("ann", "training", 10)
        found = []
        for _ in range(3):
            ticket = await queue.get()
            queue.finish_ticket(ticket, 9.0)  # background time does not count against an account's other work
            found.append((ticket.account, ticket.item))
        queue.put("ben", "training", 11)
        queue.put("ann", "training", 12)
        for _ in range(4):
            ticket = await queue.get()
            queue.finish_ticket(ticket, 0.1)
            found.append((ticket.account, ticket.item))
        return found

    assert asyncio.run(run()) == [
        ("ann", 10), ("ann", 0), ("ben", 0), ("ben", 11), ("ann", 12), ("ann", 1), ("ben", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("slow", [0.001, 0.4, 7.0])
def test_time_is_shared_evenly_whatever_a_slice_takes(slow: float) -> None:
    async def run() -> dict[str, float]:
        queue: FairQueue[None] = FairQueue()
        cost, spent = {"ann": slow, "ben": 0.02}, {"ann": 0.0, "ben": 0.0}
        for account in cost:
            for _ in range(20_000):
                queue.put(account, "job", None)
        while min(spent.values()) < 8:
            ticket = await queue.get()
            queue.finish_ticket(ticket, cost[ticket.account])
            spent[ticket.account] += cost[ticket.account]
        return spent

    spent = asyncio.run(run())
    assert abs(spent["ann"] - spent["ben"]) <= max(slow, EXPECTED) + EXPECTED


def test_a_newcomer_does_not_pay_for_the_past_nor_is_it_paid() -> None:
    async def run() -> list[str]:
        queue: FairQueue[int] = FairQueue()
        for number in range(50):
            queue.put("ann", "job", number)
        for _ in range(20):
            queue.finish_ticket(await queue.get(), 1.0)
        for number in range(10):
            queue.put("ben", "job", number)
        order = []
        for _ in range(10):
            ticket = await queue.get()
            queue.finish_ticket(ticket, 1.0)
            order.append(ticket.account)
        return order

    order = asyncio.run(run())
    assert 4 <= order.count("ann") <= 6


def test_what_was_not_begun_costs_nothing() -> None:
    async def run() -> list[str]:
        queue: FairQueue[int] = FairQueue()
        for number in range(4):
            queue.put("ann", "job", number)
            queue.put("ben", "job", number)
        ticket = await queue.get()
        queue.finish_ticket(ticket)
        queue.put(ticket.account, ticket.job, ticket.item, first=True)
        return [(await queue.get()).account for _ in range(8)]

    assert asyncio.run(run()) == ["ann", "ben"] * 4


def test_nothing_is_kept_of_what_is_over() -> None:
    async def run() -> str:
        queue: FairQueue[int] = FairQueue()
        for number in range(1000):
            queue.put(f"key-{number % 30}", f"job-{number}", number)
        tickets = [await queue.get() for _ in range(1000)]
        for ticket in tickets:
            queue.finish_ticket(ticket, 0.5)
        return repr(queue)

    assert asyncio.run(run()) == "<FairQueue of 0, 0 accounts>"


def places(*, later: float) -> list[int]:
    """The order of four frames of a job; the epoch's first is asked for last, so many seconds later."""

    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        for position in (256, 512, 768):
            queue.put("ann", "job", position, place=QueuePosition(10.0, 3, position))
        queue.put("ann", "job", 0, place=QueuePosition(10.0 + later, 3, 0))
        return [(await queue.get()).item for _ in range(4)]

    return asyncio.run(run())


def test_of_what_is_asked_for_together_the_epochs_first_comes_first() -> None:
    assert places(later=0.1) == [0, 256, 512, 768]


def test_nobody_is_overtaken_for_long() -> None:
    assert places(later=0.3) == [256, 512, 768, 0]


def test_work_before_its_request_is_overtaken_by_earlier_positions_alone() -> None:
    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        queue.put("ann", "job", 512, place=QueuePosition(10.0 + EARLY_SECONDS, 3, 512))
        queue.put("ann", "job", 256, place=QueuePosition(18.0, 3, 256))
        queue.put("ann", "job", 768, place=QueuePosition(18.0, 3, 768))
        return [(await queue.get()).item for _ in range(3)]

    assert asyncio.run(run()) == [256, 512, 768]


def test_work_before_its_request_does_not_wait_for_ever_behind_a_reader_of_earlier_positions() -> None:
    """Two readers of one plan: one, ahead of the other, has requested in the meantime what was begun."""

    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        queue.put("ann", "job", 5120, place=QueuePosition(10.0 + EARLY_SECONDS, 3, 5120))
        served, position = list[int](), 0
        for second in range(11, 41):  # the processes are busy with the other one
            while len(queue) < 5:
                queue.put("ann", "job", position, place=QueuePosition(float(second), 3, position))
                position += 10
            served.append((await queue.get()).item)
        return served

    assert 5120 in asyncio.run(run())


def test_an_epoch_comes_before_the_next_and_other_jobs_are_not_concerned() -> None:
    async def run() -> list[str]:
        queue: FairQueue[str] = FairQueue()
        queue.put("ann", "other", "o", place=QueuePosition(1.0, 9, 9))
        queue.put("ann", "job", "next epoch", place=QueuePosition(1.0, 4, 0))
        queue.put("ann", "job", "this epoch", place=QueuePosition(1.1, 3, 500))
        queue.put("ann", "job", "again", first=True, place=QueuePosition(0.9, 3, 900))
        queue.put("ann", "job", "unplaced")
        return [(await queue.get()).item for _ in range(5)]

    assert asyncio.run(run()) == ["o", "again", "this epoch", "next epoch", "unplaced"]


def test_what_is_retried_goes_first() -> None:
    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        queue.put("ann", "job", 1)
        queue.put("ann", "job", 0, first=True)
        return [(await queue.get()).item for _ in range(2)]

    assert asyncio.run(run()) == [0, 1]


def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    async def run() -> int:
        queue: FairQueue[int] = FairQueue()
        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put("ann", "job", 5)  # wakes the first
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return (await second).item

    assert asyncio.run(run()) == 5
