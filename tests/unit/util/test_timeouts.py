"""Timeouts of blocks, after a TaskGroup of the same task has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from meshd.util.timeouts import CorrectedTimeout, timeout, timeout_at


def corrected(seconds: float) -> CorrectedTimeout:
    return CorrectedTimeout(asyncio.get_running_loop().time() + seconds)


def at(seconds: float) -> asyncio.Timeout:
    return timeout_at(asyncio.get_running_loop().time() + seconds)


both = pytest.mark.parametrize("limit", [timeout, at, corrected])
Limit = Callable[[float], asyncio.Timeout | CorrectedTimeout]


async def fail_in_a_group() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def run_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(60))

    with pytest.raises(ExceptionGroup):
        await run_group()


@both
def test_it_expires_after_a_group_has_failed(limit: Limit) -> None:
    async def run() -> None:
        await fail_in_a_group()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with limit(0.001):
                    await asyncio.sleep(60)

    asyncio.run(run())


@both
def test_a_cancelled_task_is_cancelled(limit: Limit) -> None:
    async def body(begun: asyncio.Event) -> None:
        await fail_in_a_group()
        async with limit(60):
            begun.set()
            await asyncio.sleep(60)

    async def run() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(body(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@both
def test_a_cancel_in_the_turn_in_which_it_expires_wins(limit: Limit) -> None:
    async def body() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        async with limit(60) as patience:
            loop.call_soon(patience.reschedule, loop.time())  # expires in the turn after
            loop.call_soon(lambda: loop.call_soon(task.cancel))
            await asyncio.sleep(60)

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(body())

    asyncio.run(run())


@both
def test_errors_and_results_pass(limit: Limit) -> None:
    async def run() -> None:
        async with limit(60) as patience:
            patience.reschedule(None)
            assert patience.when() is None
        assert not patience.expired()
        with pytest.raises(KeyError):
            async with limit(60):
                raise KeyError

    asyncio.run(run())
