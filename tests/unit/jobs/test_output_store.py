"""Outputs that another node writes: a cancelled job does not end while that node may still commit one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.jobs.output_store import ClusterOutputStore, OutputMetadata, OutputTarget
from meshwire.cluster import Node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

FACTS = OutputMetadata("etag", {}, {}, {}, "root")
TARGET = OutputTarget("b", "k", None)


class Other:
    """The node that every name belongs to: it takes a body, and acts when the test says."""

    single_node, node_id = False, "n1"

    def __init__(self) -> None:
        self.received, self.acted = b"", False
        self.reading, self.begun, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def other_primary(self, bucket: str, key: str) -> Node:
        return Node("n2", "http://n2")

    async def send(
        self, node: Node, call: Any, request: Any, context: Any, body: Any = None, **how: Any
    ) -> None:
        if body is not None:
            async for piece in body:
                self.received += piece
                self.reading.set()
        self.begun.set()
        await self.go_on.wait()
        self.acted = True


def outputs(other: Other) -> ClusterOutputStore:
    nothing: Any = SimpleNamespace()
    return ClusterOutputStore(nothing, nothing, cast("Any", other), cast("Any", other))


async def pieces(closed: list[bool], more: asyncio.Event | None = None) -> AsyncGenerator[bytes, None]:
    try:
        yield b"first"
        if more is not None:
            await more.wait()
        yield b"second"
    finally:
        closed.append(True)


@pytest.mark.parametrize("work", ["write", "remove"])
def test_a_cancelled_job_waits_for_the_node_that_acts(work: str) -> None:
    async def check() -> None:
        other = Other()
        store = outputs(other)
        written = store.write_output(TARGET, pieces([]), lambda: FACTS)
        removed = store.remove_outputs("b", ["k"])
        doing, idle = (written, removed) if work == "write" else (removed, written)
        idle.close()
        caller = asyncio.ensure_future(doing)
        async with asyncio.timeout(60):
            await other.begun.wait()
            caller.cancel()
            await asyncio.wait([caller], timeout=0.05)
            assert not caller.done()
            other.go_on.set()
            await asyncio.wait([caller])
        assert (caller.cancelled(), other.acted) == (True, True)

    asyncio.run(check())


def test_an_output_of_which_a_part_is_missing_is_not_sent_to_its_end() -> None:
    async def check() -> None:
        other, closed = Other(), list[bool]()
        body = pieces(closed, asyncio.Event())
        caller = asyncio.ensure_future(outputs(other).write_output(TARGET, body, lambda: FACTS))
        async with asyncio.timeout(60):
            await other.reading.wait()
            caller.cancel()
            await asyncio.wait([caller])
        assert (caller.cancelled(), other.received, closed) == (True, b"first", [True])

    asyncio.run(check())
