"""Single flight, budgets, task groups, and work that ends before its caller."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest

from meshd.util.async_tasks import BackgroundTasks, SingleFlight, finish_before_cancel
from meshd.util.tenant_limits import ByteSemaphore

if TYPE_CHECKING:
    from collections.abc import Coroutine


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(bounded())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Work:
    """A computation that ends when told."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return self.runs


def test_those_who_ask_together_share_one_computation() -> None:
    async def check() -> None:
        flights, work = SingleFlight[str, int](), Work()
        asking = [asyncio.ensure_future(flights.run("a", work)) for _ in range(3)]
        await turns()
        assert "a" in flights
        work.gate.set()
        assert sorted(await asyncio.gather(*asking)) == [(1, False), (1, True), (1, True)]
        assert await flights.run("a", work) == (2, False)  # nothing is kept
        assert len(flights) == 0

    run(check())


def test_different_keys_do_not_share() -> None:
    async def check() -> None:
        flights, work = SingleFlight[str, int](), Work()
        work.gate.set()
        await asyncio.gather(flights.run("a", work), flights.run("b", work))
        assert work.runs == 2

    run(check())


def test_a_caller_that_leaves_does_not_hurt_the_others() -> None:
    async def check() -> None:
        flights, work = SingleFlight[str, int](), Work()
        first, second = (asyncio.ensure_future(flights.run("a", work)) for _ in range(2))
        await turns()
        first.cancel()
        await turns()
        work.gate.set()
        assert (await second)[0] == 1
        assert work.cancelled == 0

    run(check())


def test_the_last_caller_to_leave_ends_the_work_and_a_newcomer_starts_anew() -> None:
    async def check() -> None:
        flights, work = SingleFlight[str, int](), Work()
        only = asyncio.ensure_future(flights.run("a", work))
        await turns()
        only.cancel()
        await asyncio.sleep(0)
        newcomer = asyncio.ensure_future(flights.run("a", work))
        await turns()
        assert (work.runs, work.cancelled) == (2, 1)
        work.gate.set()
        assert await newcomer == (2, False)

    run(check())


def test_work_that_has_just_ended_is_not_joined() -> None:
    """Who asks in the very turn in which it ends has it done again. Told at once, and for ever, what it
    was, a caller that asks until it did not join would never let anybody else run."""

    async def scenario() -> None:
        flights: SingleFlight[str, int] = SingleFlight()

        async def once() -> int:
            return 1

        async def again() -> int:
            return 2

        ended = asyncio.ensure_future(once())
        await turns()
        flights._start("k", lambda: ended)  # done, and its callbacks have not run yet
        assert "k" in flights
        assert await flights.run("k", again) == (2, False)

    run(scenario())


def test_a_failure_reaches_everyone_and_is_forgotten() -> None:
    async def check() -> None:
        flights, work = SingleFlight[str, int](), Work()
        work.error = ValueError("no")
        work.gate.set()
        results = await asyncio.gather(flights.run("a", work), flights.run("a", work), return_exceptions=True)
        assert all(isinstance(result, ValueError) for result in results)
        work.error = None
        assert (await flights.run("a", work))[0] == 2

    run(check())


def test_a_budget_is_never_exceeded_and_served_in_order() -> None:
    async def check() -> None:
        budget, order = ByteSemaphore(10), []

        async def use(name: str, units: int) -> None:
            async with budget.hold(units):
                order.append(name)
                assert budget.in_use <= 10
                await turns()

        await asyncio.gather(use("a", 6), use("b", 8), use("c", 2), use("d", 4))
        assert order == ["a", "b", "c", "d"]  # c would fit beside a, but b is first
        assert (budget.in_use, len(budget._waiting)) == (0, 0)

    run(check())


def test_more_than_the_whole_budget_is_granted_alone() -> None:
    async def check() -> None:
        budget = ByteSemaphore(10)
        await budget.acquire(3)
        large = asyncio.ensure_future(budget.acquire(50))
        await turns()
        assert not large.done()
        assert not budget.try_acquire(1)
        budget.release(3)
        await large
        assert budget.in_use == 50

    run(check())


def test_giving_up_waiting_takes_nothing_and_lets_the_next_go() -> None:
    async def check() -> None:
        budget = ByteSemaphore(10)
        await budget.acquire(8)
        large, small = (asyncio.ensure_future(budget.acquire(units)) for units in (9, 1))
        await turns()
        large.cancel()
        await turns()
        assert small.done()
        assert budget.in_use == 9
        granted = asyncio.ensure_future(budget.acquire(5))
        await turns()
        budget.release(9)
        granted.cancel()  # in the same moment as it is granted
        await asyncio.gather(granted, return_exceptions=True)
        assert budget.in_use == 0

    run(check())


def test_giving_up_in_the_moment_in_which_it_is_granted_takes_nothing() -> None:
    async def check() -> None:
        budget = ByteSemaphore(10)
        await budget.acquire(10)
        cancelled, next_one = (asyncio.ensure_future(budget.acquire(units)) for units in (4, 9))
        await turns()
        cancelled.cancel()
        budget.release(10)  # before the cancelled call goes on
        await asyncio.gather(cancelled, return_exceptions=True)
        assert next_one.done()
        assert budget.in_use == 9
        budget.release(9)
        assert (budget.in_use, len(budget._waiting)) == (0, 0)

    run(check())


def test_more_given_back_than_taken_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="only 0 are in use"):
        ByteSemaphore(1).release(1)
    with pytest.raises(ValueError, match="must be at least 1"):
        ByteSemaphore(0)


def test_failed_tasks_are_logged_and_the_rest_ends_with_the_group(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        tasks = BackgroundTasks("unit")

        async def fail() -> None:
            raise ValueError("broken")

        tasks.spawn(fail(), "failing")
        waiting = tasks.spawn(asyncio.Event().wait(), "waiting")
        await turns()
        assert len(tasks) == 1
        await tasks.aclose()
        assert waiting.cancelled()
        assert len(tasks) == 0

    with caplog.at_level(logging.ERROR):
        run(check())
    (record,) = caplog.records
    assert record.__dict__["task"] == "unit:failing"


# --- work that ends before its caller ---


async def cancelled(caller: asyncio.Future[int]) -> bool:
    """Whether it has ended, as what was cancelled."""
    await turns(10)
    return caller.done() and caller.cancelled()


def test_a_cancelled_caller_ends_after_work_that_has_begun() -> None:
    async def check() -> None:
        work = Work()
        caller = asyncio.ensure_future(finish_before_cancel(work(), 60))
        await turns()
        caller.cancel()
        assert not await cancelled(caller)
        work.gate.set()
        assert await cancelled(caller)
        assert (work.runs, work.cancelled) == (1, 0)

    run(check())


def test_work_that_fails_after_its_caller_was_cancelled_says_nothing() -> None:
    async def check() -> None:
        said = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        work = Work()
        work.error = OSError("full")
        caller = asyncio.ensure_future(finish_before_cancel(work(), 60))
        await turns()
        caller.cancel()
        work.gate.set()
        assert await cancelled(caller)
        gc.collect()
        assert said == []

    run(check())


def test_work_that_has_not_begun_is_cancelled_with_its_caller() -> None:
    async def check() -> None:
        work = Work()
        caller = asyncio.ensure_future(finish_before_cancel(work(), 60, lambda: False))
        await turns()
        caller.cancel()
        assert await cancelled(caller)
        assert work.cancelled == 1

    run(check())


def test_the_wait_ends_at_a_second_cancellation_or_after_a_time(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        work = Work()
        hurried = asyncio.ensure_future(finish_before_cancel(work(), 60))
        patient = asyncio.ensure_future(finish_before_cancel(work(), 0.01))
        await turns()
        hurried.cancel()
        patient.cancel()
        await turns()
        hurried.cancel()
        assert await cancelled(hurried)
        await asyncio.wait([patient])
        assert patient.cancelled()
        assert work.cancelled == 0
        work.gate.set()

    with caplog.at_level(logging.WARNING):
        run(check())
    assert "work continues after its caller has ended" in caplog.text


def test_what_work_returns_or_raises_is_its_callers() -> None:
    async def check() -> None:
        work = Work()
        work.gate.set()
        assert await finish_before_cancel(work(), 60) == 1
        work.error = OSError("full")
        with pytest.raises(OSError, match="full"):
            await finish_before_cancel(work(), 60)

    run(check())
