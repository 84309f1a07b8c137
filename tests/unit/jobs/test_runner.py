"""The coordinator's jobs: in whatever order its looks come, each job ends, which is told after its last
commit, and each run frees its place."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from meshd.control.buckets import BucketTable
from meshd.control.control_api import ControlError
from meshd.control.identities import Account, IdentityTable, Key, User
from meshd.control.jobs import Job, JobTable, Principal
from meshd.jobs import runner as runner_module
from meshd.jobs.runner import AT_A_TIME, JobRunner
from meshd.util.async_tasks import finish_before_cancel
from meshwire.cluster import Node
from meshwire.cluster.transitions import bootstrap_map
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.jobs.job_kind import JobRun


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


class SlowCommits:
    """A kind of job whose one output is committed when the test says."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.committed = asyncio.Event(), asyncio.Event(), False
        self.runs = 0

    async def run_job(self, running: JobRun) -> None:
        self.runs += 1

        async def commit() -> None:
            self.begun.set()
            await self.go_on.wait()
            self.committed = True

        async with asyncio.TaskGroup() as group:
            group.create_task(finish_before_cancel(commit(), 60))


class LosableControl(MemoryControl):
    """A control store that cannot be used while it is `lost`."""

    lost = False

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        if self.lost:
            raise ControlError("the control store is unreachable")
        return await super().put(key, value, expect=expect)


@asynccontextmanager
async def running_job(
    kind: SlowCommits, control: LosableControl | None = None, mesh: Any = None
) -> AsyncIterator[tuple[JobRunner, JobTable, str]]:
    """A job whose commit is in progress."""
    clock = ManualClock()
    control = control or LosableControl(clock)
    table = JobTable(control)
    lonely: Any = mesh or SimpleNamespace(single_node=True, node_id="n1")
    identities, buckets = IdentityTable(control), BucketTable(control)
    account = Account(
        User(user_id="root", display_name="root", root=True, origin="root"),
        Key(access_key="root", user_id="root", secret_key="root-secret", origin="root"),
    )
    await identities.replace_accounts(frozenset({"root"}), [account], clock.now_ms())
    shelf: Any = Shelf()
    kinds: Any = {"shard": kind}
    runner = JobRunner(table, control, identities, buckets, kinds, shelf, clock, lonely)
    following = asyncio.ensure_future(runner.run())
    spec = '{"kind": "shard", "source": "s3://photos/a", "target": "s3://made/b", "count": 1}'
    job = Job("a" * 16, "shard", spec, Principal("root", "root"), clock.now_ms())
    await table.update_job(job.job_id, lambda _: job)
    async with asyncio.timeout(60):
        await kind.begun.wait()
    try:
        yield runner, table, job.job_id
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def ask_to_end(table: JobTable, job_id: str, *, pause: bool = False) -> None:
    await table.update_job(job_id, lambda job: job and msgspec.structs.replace(job, cancel=True, pause=pause))


@pytest.mark.parametrize(("pause", "told"), [(False, "cancelled"), (True, "paused")])
def test_the_end_is_told_after_the_last_commit(pause: bool, told: str) -> None:
    async def check() -> None:
        kind = SlowCommits()
        async with running_job(kind) as (runner, table, job_id):
            await ask_to_end(table, job_id, pause=pause)
            for _ in range(3):  # each look finds a run that is to end
                await runner._reconcile()
                await asyncio.sleep(0.01)
                job = table.get(job_id)
                assert (job and job.state, kind.committed) == ("running", False)
            kind.go_on.set()
            assert await until_ended(table, job_id) == [told]
            assert kind.committed

    asyncio.run(check())


def test_a_node_that_stops_tells_no_end_of_what_may_still_be_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "_STOP_SECONDS", 0.05)

    async def check() -> None:
        kind = SlowCommits()
        async with running_job(kind) as (runner, table, job_id):
            await ask_to_end(table, job_id)
            await runner._reconcile()
            asyncio.get_running_loop().call_later(0.3, kind.go_on.set)  # when the node waits no longer
        job = table.get(job_id)
        assert (job and job.state, job and job.cancel) == ("running", True)  # the next start ends it

    asyncio.run(check())


@pytest.mark.parametrize(("pause", "told"), [(None, "done"), (False, "cancelled"), (True, "paused")])
def test_the_end_is_recorded_when_the_control_store_is_back(
    pause: bool | None, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is at its end while the store is lost is not run once more."""
    monkeypatch.setattr(runner_module, "_LOOK_EVERY", 0.02)

    async def check() -> None:
        kind, control = SlowCommits(), LosableControl(ManualClock())
        async with running_job(kind, control) as (runner, table, job_id):
            if pause is not None:
                await ask_to_end(table, job_id, pause=pause)
            control.lost = True
            await runner._reconcile()
            kind.go_on.set()
            await asyncio.sleep(0.2)
            job = table.get(job_id)
            assert (job and job.state, kind.committed) == ("running", True)
            control.lost = False
            assert await until_ended(table, job_id) == [told]
            assert kind.runs == 1

    asyncio.run(check())
    assert [each.message for each in caplog.records if each.levelname != "DEBUG"] == [
        "a job waits: the control store cannot be used"
    ]


def test_the_runner_survives_a_control_store_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of a node that is gone is taken over, and a queued one cancelled, once it is back."""
    monkeypatch.setattr(runner_module, "_LOOK_EVERY", 0.02)
    us = Node("n1", "http://10.0.0.1:9000")
    mesh = SimpleNamespace(single_node=False, node_id="n1", current_map=lambda: bootstrap_map(us))

    async def check() -> None:
        kind, control = SlowCommits(), LosableControl(ManualClock())
        kind.go_on.set()
        async with running_job(kind, control, mesh) as (_, table, job_id):
            assert await until_ended(table, job_id) == ["done"]
            job = table.get(job_id)
            assert job is not None
            orphan = msgspec.structs.replace(job, job_id="b" * 16, state="queued", node="gone")
            doomed = msgspec.structs.replace(job, job_id="c" * 16, state="queued", node="gone", cancel=True)
            for each in (orphan, doomed):
                await control.put(f"jobs/{each.job_id}", msgspec.json.encode(each))
            control.lost = True
            await asyncio.sleep(0.2)
            known = table.list_all()
            assert [known[name * 16].node for name in "bc"] == ["gone", "gone"]
            control.lost = False
            assert await until_ended(table, orphan.job_id, doomed.job_id) == ["done", "cancelled"]

    asyncio.run(check())
    assert "jobs wait: the control store cannot be used" in [each.message for each in caplog.records]
