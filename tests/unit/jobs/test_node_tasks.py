"""Tasks of jobs on a node: the request that ends one is answered when it has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from meshd.core import node_tasks
from meshd.jobs.relayout.messages import RELAYOUT_HERE, RelayoutRequest, RelayoutStatus
from meshd.jobs.relayout.node_task import Relayouts
from meshd.util.async_tasks import finish_before_cancel

if TYPE_CHECKING:
    import pytest

ASKED = RelayoutRequest("job-1", "ann", "photos", "train/")
ENDING = RelayoutRequest("job-1", "ann", "photos", "train/", stop=True)


class Task:
    """Commits once, when the test says."""

    def __init__(self, request: RelayoutRequest) -> None:
        self.request, self.status, self.rate = request, RelayoutStatus(), 0
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.begun.set()
        await finish_before_cancel(self.go_on.wait(), 60)


def tasks(task: Any) -> Relayouts:
    return Relayouts(lambda request: task, RelayoutStatus(done=True), RELAYOUT_HERE)


def test_a_task_has_ended_when_the_request_that_ends_it_is_answered() -> None:
    async def check() -> None:
        task = Task(ASKED)
        here = tasks(task)
        asked = asyncio.ensure_future(here.answer(ASKED))
        async with asyncio.timeout(60):
            await task.begun.wait()
            ending = asyncio.ensure_future(here.answer(ENDING))
            await asyncio.sleep(0.05)
            assert not ending.done()  # its commit is in progress
            task.go_on.set()
            assert (await ending).done
            await asked
            assert (await here.answer(ENDING)).done  # nothing is left to end
        await here.aclose()

    asyncio.run(check())


def test_a_task_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tasks, "STOP_SECONDS", 0.01)

    async def check() -> None:
        task = Task(ASKED)
        here = tasks(task)
        asked = asyncio.ensure_future(here.answer(ASKED))
        async with asyncio.timeout(60):
            await task.begun.wait()
            assert (await here.answer(ENDING)).done
            task.go_on.set()
            await asked
        await here.aclose()

    asyncio.run(check())
