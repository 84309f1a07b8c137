"""Who brings a write to its origin while the node that decides about the name changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshd.cluster.cluster_view import ClusterView
from meshd.origins.client.origin_api import OriginDownError, OriginRefusedError
from meshd.origins.worker_shards import encode_error
from meshd.origins.write_back_routing import (
    WriteBackRequest,
    WriteBackResult,
    WriteBackRouter,
)
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.store.records import INTERNAL_WRITE, WriteContext
from meshwire.cluster import Node

BUCKET: Any = SimpleNamespace(name="b")


@dataclass
class World:
    """A mesh, its nodes, the clock and the crew of node `a`. `here`: what comes of each push in turn;
    `there`: answers of whoever else decides. An answer with a node's name makes that the decider first."""

    decider: str = "a"
    here: list[Any] = field(default_factory=list)
    there: list[Any] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    now: float = 0.0
    left: int = 0
    node_id = "a"
    single_node = False

    # the mesh

    def last_absence_version(self, node_id: str) -> int:
        return self.left if node_id == "a" else 0

    def reject_if_abandoned(self, context: WriteContext) -> None:
        ClusterView.reject_if_abandoned(cast("ClusterView", self), context)

    def other_primary(self, bucket: str, key: str) -> Node | None:
        return ClusterView.other_primary(cast("ClusterView", self), bucket, key)

    def current_map(self) -> Any:
        return SimpleNamespace(version=1)

    def is_primary(self, *_: str) -> bool:
        return self.decider == "a"

    def route_for(self, *_: str) -> Any:
        return SimpleNamespace(primary=Node(self.decider, "http://x") if self.decider else None)

    async def wait_for_newer_map(self, version: int, patience: float) -> bool:
        self.now += patience
        return False

    async def report_suspect(self, node_id: str, version: int) -> None:
        self.suspected.append(node_id)

    # its clock

    def monotonic(self) -> float:
        return self.now

    # its crew, and who is in it

    def worker_for(self, *_: str) -> Any:
        return self

    async def write_back(self, *_: Any) -> str:
        return str(self._next(self.here, "a"))

    async def delete_at_origin(self, *_: Any) -> None:
        self._next(self.here, "a:remove")

    # its peers

    async def call_typed(self, node: Node, _: object, asked: WriteBackRequest, **__: Any) -> Any:
        return self._next(self.there, f"{node.node_id}:{asked.what}")

    def _next(self, answers: list[Any], who: str) -> Any:
        self.asked.append(who)
        answer = answers.pop(0) if answers else ""
        if isinstance(answer, tuple):
            self.decider, answer = answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def bringer(self) -> WriteBackRouter:
        found: Any = WriteBackRouter
        shelf = SimpleNamespace(backed_bucket=lambda name: BUCKET if name == "b" else None)
        return found(self, shelf, self, self, self)  # type: ignore[no-any-return]


def push(world: World) -> list[str]:
    asyncio.run(world.bringer().write_back(BUCKET, "k"))
    return world.asked


NOT_MINE = NotPrimaryError("not mine")


def test_here_while_this_node_decides() -> None:
    assert push(World()) == ["a"]


def test_by_the_new_decider_from_then_on() -> None:
    assert push(World(here=[("c", NOT_MINE)], there=[WriteBackResult()])) == ["a", "c:push"]
    world = World("c", there=[("d", StaleMapError(2)), ("a", StaleMapError(3))])
    assert push(world) == ["c:push", "d:push", "a"]
    removing = World("c", there=[WriteBackResult()])
    asyncio.run(removing.bringer().delete_at_origin(BUCKET, "k", INTERNAL_WRITE))
    assert removing.asked == ["c:remove"]


def test_nothing_is_removed_for_a_caller_that_was_given_up() -> None:
    def removed(world: World) -> list[str]:
        async def run() -> None:
            await world.bringer().delete_at_origin(BUCKET, "k", WriteContext("c", 5))

        asyncio.run(run())
        return world.asked

    assert removed(World(left=5)) == ["a:remove"]
    for decider in ("a", "c"):
        world = World(decider, left=6)
        with pytest.raises(NotReplicatedError, match="marked away"):
            removed(world)
        assert world.asked == []


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    world = World("c", there=[PeerUnreachableError("gone", begun=True), ("d", WriteBackResult())])
    assert push(world) == ["c:push", "c:push"]
    assert world.suspected == ["c"]


def test_a_long_upload_is_waited_for() -> None:
    going = [WriteBackResult(going=True)] * 9
    world = World("c", there=[*going, WriteBackResult()])
    assert len(push(world)) == 10


@pytest.mark.parametrize("kind", [OriginRefusedError, OriginDownError, NotReplicatedError])
def test_what_was_wrong_there_is_told_here(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="so it was"):
        push(World("c", there=[WriteBackResult(encode_error(kind("so it was")))]))


def test_nobody_who_decides_ends_it() -> None:
    with pytest.raises(NotReplicatedError, match="away"):
        push(World(""))
    world = World("c", there=[StaleMapError(1)] * 1000)
    with pytest.raises(NotReplicatedError, match="try again"):
        push(world)
    assert 15 <= world.now < 16
    with pytest.raises(NotReplicatedError, match="failed as the primary"):
        push(World("c", there=[PeerRefusedError(500, "InternalError", "broken")]))


def test_who_is_asked_asks_nobody() -> None:
    async def carried_out(world: World, bucket: str = "b") -> WriteBackResult:
        return await world.bringer().execute(WriteBackRequest("push", bucket, "k"), INTERNAL_WRITE)

    assert asyncio.run(carried_out(World())) == WriteBackResult()
    world = World(here=[("c", NOT_MINE)])
    with pytest.raises(NotPrimaryError):
        asyncio.run(carried_out(world))
    assert world.asked == ["a"]
    told = asyncio.run(carried_out(World(here=[OriginDownError("away")]))).failed
    assert told is not None
    assert (told.kind, told.message) == ("OriginDownError", "away")
    assert asyncio.run(carried_out(World(), "gone")).failed is not None
