"""Fetches under way: a silent origin takes nobody else's turn."""

from __future__ import annotations

import asyncio

from meshd.origins.cache.fetcher import FetchLimits


def test_a_bucket_waits_for_itself_alone() -> None:
    async def run() -> None:
        slots, silent, begun = FetchLimits(total=5, each=3), asyncio.Event(), list[str]()

        async def fetch(bucket: str, until: asyncio.Event | None) -> None:
            async with slots.acquire_slot(bucket):
                begun.append(bucket)
                if until is not None:
                    await until.wait()

        stuck = [asyncio.ensure_future(fetch("silent", silent)) for _ in range(10)]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            for _ in range(20):
                await fetch("quick", None)
        assert begun == ["silent"] * 3 + ["quick"] * 20
        silent.set()
        await asyncio.gather(*stuck)
        assert begun.count("silent") == 10
        assert repr(slots) == "<FetchLimits of 0 buckets>"

    asyncio.run(run())
