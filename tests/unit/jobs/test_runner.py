"""The coordinator's jobs: in whatever order its looks come, each job ends and each run frees its place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from meshd.control.jobs import Job, JobTable, Principal
from meshd.jobs.runner import AT_A_TIME, JobRunner
from meshd.util.clock import ManualClock
from tests.support.reference_control import MemoryControl


class Shelf:
    """Nothing is kept."""

    def job_ids(self) -> set[str]:
        return set()

    async def delete_job_scratch(self, job_id: str) -> None:
        """There is nothing."""


async def until_ended(table: JobTable, *job_ids: str) -> list[str]:
    async with asyncio.timeout(60):
        while True:
            jobs = [table.get(job_id) for job_id in job_ids]
            if all(job is not None and job.ended for job in jobs):
                return [job.state for job in jobs if job is not None]
            await asyncio.sleep(0.01)


def test_a_run_cancelled_before_its_first_step_ends_and_leaves_its_place() -> None:
    async def check() -> None:
        clock = ManualClock()
        control = MemoryControl(clock)
        table = JobTable(control)
        lonely: Any = SimpleNamespace(single_node=True, node_id="n1")
        nobody: Any = SimpleNamespace()
        shelf: Any = Shelf()
        runner = JobRunner(table, control, nobody, nobody, {}, shelf, clock, lonely)
        following = asyncio.ensure_future(runner.run())
        await asyncio.sleep(0)  # it has looked once
        many = [f"{number:016x}" for number in range(2 * AT_A_TIME)]
        for job_id in many:
            job = Job(job_id, "shard", "{}", Principal("root", "root"), clock.now_ms())
            await table.update_job(job_id, lambda _, job=job: job)  # type: ignore[misc]
        await runner._reconcile()  # begins the first of them
        for job_id in many:
            await table.update_job(job_id, lambda job: job and msgspec.structs.replace(job, cancel=True))
        await runner._reconcile()  # before a step of theirs
        assert await until_ended(table, *many) == ["cancelled"] * len(many)
        later = Job("f" * 16, "shard", "{}", Principal("root", "root"), clock.now_ms())
        await table.update_job(later.job_id, lambda _: later)
        assert await until_ended(table, later.job_id) == ["failed"]  # it came to its turn; it is no job
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())
