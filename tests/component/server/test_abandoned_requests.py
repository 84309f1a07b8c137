"""Requests whose client has closed the connection before the answer: their work ends after the grace."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from meshd.config import HttpSettings
from meshd.server.abandoned_requests import cancel_when_abandoned
from meshd.server.response import Reply
from tests.component.server.test_connection_endings import ASK, serving
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.server.request import MeshRequest

HOURS = 10_000.0


class Work:
    """Answers requests with `done` once it is told to; `seconds`: the grace."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.outcome = ""

    async def answer(self, request: MeshRequest) -> Reply:
        try:
            with cancel_when_abandoned(request.connection, self.seconds):
                self.begun.set()
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    self.outcome = "cancelled"
                    raise
            self.outcome = "done"
        except ConnectionResetError:
            self.outcome += ", then reset"
            raise
        finally:
            self.ended.set()
        return Reply(200, [("Content-Length", "4")], b"done", 0)


def run(seconds: float, leave: Callable[[asyncio.StreamWriter], None]) -> str:
    """What becomes of the work for a client that leaves in this way once it has begun."""

    async def doing() -> str:
        work = Work(seconds)
        async with serving(HttpSettings(), work.answer) as (_, port), asyncio.timeout(WAIT_TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            await work.begun.wait()
            leave(writer)
            if seconds == HOURS:
                await asyncio.sleep(0.05)
                assert not work.ended.is_set()
                work.may_end.set()
            await work.ended.wait()
            with suppress(ConnectionError):
                answer = await reader.read()
                work.outcome += answer.decode().rpartition("\r\n")[2]
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            return work.outcome

    return asyncio.run(doing())


@pytest.mark.parametrize("way", ["close", "write_eof", "abort"])
def test_the_work_for_a_client_that_left_is_cancelled(way: str) -> None:
    """A killed client's kernel says no more than that nothing else will come, as `write_eof` does."""
    assert run(0.01, lambda writer: getattr(writer.transport, way)()) == "cancelled, then reset"


def test_within_the_grace_the_work_goes_on_and_is_answered() -> None:
    assert run(HOURS, lambda writer: writer.write_eof()) == "donedone"
