"""Bytes over time, whoever brings them."""

from __future__ import annotations

import asyncio

from meshd.util.byte_rate import RateLimiter


def test_bytes_over_time_are_the_rate_after_what_was_first() -> None:
    async def run() -> float:
        budget, loop = RateLimiter(lambda: 100_000), asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*[budget.acquire_bytes(10_000) for _ in range(4)])
        return loop.time() - began

    assert asyncio.run(run()) > 0.29


def test_what_was_not_brought_is_given_back_and_a_limit_may_go() -> None:
    async def run() -> None:
        rates = [1.0]
        budget = RateLimiter(lambda: rates[0])
        async with asyncio.timeout(60):
            await budget.acquire_bytes(1 << 40)
            waiting = asyncio.ensure_future(budget.acquire_bytes(1 << 40))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            budget.refund_bytes(1 << 40)
            await waiting
            rates[0] = 0.0
            budget.refund_bytes(0)  # or within a second, by itself
            await budget.acquire_bytes(1)

    asyncio.run(run())
