"""Jobs that another node has just ended, paused or started: a node whose copy of the control store is behind
decides and answers by what is recorded."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from meshd.auth.identity import Caller
from meshd.control.control_api import ControlError
from meshd.control.jobs import JobTable
from meshd.jobs.job_service import JobService
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.jobs import State

DOCUMENT = json.dumps({"kind": "shard", "source": "s3://photos/a", "target": "s3://made/b", "count": 1})
ROOT: Any = SimpleNamespace(user_id="root", access_key="root", session=None, root=True, bounds=())


class Node:
    """A node that has started a job and then hears nothing more of the control store."""

    def __init__(self) -> None:
        self.control = LaggingControl(ManualClock())
        table = JobTable(self.control)
        self.elsewhere = JobTable(self.control.engine)
        buckets: Any = SimpleNamespace(get=lambda name: None)
        access: Any = SimpleNamespace(require_action=lambda *what: None)
        mesh: Any = SimpleNamespace(node_id="n1")
        self.service = JobService(table, self.control, buckets, access, ManualClock(), mesh)
        self.caller = Caller(ROOT)

    async def start(self) -> dict[str, Any]:
        return await self.service.start(self.caller, DOCUMENT.encode())

    async def becomes(self, job_id: str, state: State, run: int = 1) -> None:
        """Another node has recorded this."""
        await self.elsewhere.update_job(
            job_id, lambda job: job and msgspec.structs.replace(job, state=state, run=run)
        )


async def _told_later(node: Node, asked: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer to a request that comes before the node has heard of the latest."""
    answer = asyncio.ensure_future(asked)
    for _ in range(10):
        await asyncio.sleep(0)
    node.control.catch_up()
    return await answer


def test_what_is_started_again_is_no_part_of_a_run_that_has_ended() -> None:
    async def check() -> None:
        node = Node()
        job_id = (await node.start())["id"]
        await node.becomes(job_id, "paused")
        again = await _told_later(node, node.start())
        assert (again["state"], again["run"]) == ("queued", 2)

    asyncio.run(check())


def test_a_run_that_another_node_has_begun_is_cancelled() -> None:
    async def check() -> None:
        node = Node()
        job_id = (await node.start())["id"]
        await node.becomes(job_id, "done")
        node.control.catch_up()
        await node.becomes(job_id, "running", run=2)
        told = await _told_later(node, node.service.cancel(node.caller, job_id))
        assert (told["state"], told["run"]) == ("cancelling", 2)

    asyncio.run(check())


def _describe(node: Node, job_id: str) -> Awaitable[dict[str, Any]]:
    return node.service.describe(node.caller, job_id)


def _wait(node: Node, job_id: str) -> Awaitable[dict[str, Any]]:
    return node.service.wait(node.caller, job_id, 30)


@pytest.mark.parametrize("ask", [_describe, _wait])
def test_it_is_shown_as_it_was_recorded(ask: Callable[[Node, str], Awaitable[dict[str, Any]]]) -> None:
    async def check() -> None:
        node = Node()
        job_id = (await node.start())["id"]
        await node.becomes(job_id, "done")
        assert (await _told_later(node, ask(node, job_id)))["state"] == "done"

    asyncio.run(check())


def test_without_a_control_store_it_is_shown_as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(key: str) -> int:
        raise ControlError(f"no answer about {key}")

    async def check() -> None:
        node = Node()
        job_id = (await node.start())["id"]
        monkeypatch.setattr(node.control, "get_version", lost)
        assert (await node.service.describe(node.caller, job_id))["state"] == "queued"
        with pytest.raises(ControlError):
            await node.start()

    asyncio.run(check())
