"""What a WriteForwarder makes of each answer of the owner of a name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.replication.primary_writes import WriteForwarder, WriteNotTakenError
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import BodyFramingError
from meshd.store.errors import DiskFullError, NotPrimaryError, NotReplicatedError
from meshd.store.records import INTERNAL_WRITE, WriteContext
from meshwire.cluster import Node

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

OWNER = Node("b", "http://b")


class World:
    """The map, the peers and the clock of node `a`. `answers`: what the owner says to each call in turn."""

    node_id, single_node = "a", False
    other_primary: Any = ClusterView.other_primary
    reject_if_abandoned: Any = ClusterView.reject_if_abandoned

    def __init__(self, *answers: Any, primary: str = "b", absent_since: int = 0) -> None:
        self.answers, self.primary, self.absent_since = list(answers), primary, absent_since
        self.now, self.sent, self.suspected = 0.0, 0, list[str]()

    def forwarder(self) -> WriteForwarder:
        made: Any = WriteForwarder
        return made(self, self, self)  # type: ignore[no-any-return]

    def current_map(self) -> Any:
        return self

    version = 7

    def route_for(self, *_: str) -> Any:
        return type("Route", (), {"primary": Node(self.primary, "http://x") if self.primary else None})

    def last_absence_version(self, node_id: str) -> int:
        return self.absent_since if node_id == "c" else 0

    async def wait_for_newer_map(self, version: int, patience: float) -> bool:
        self.now += patience
        return False

    async def report_suspect(self, node_id: str, version: int) -> None:
        self.suspected.append(node_id)

    def monotonic(self) -> float:
        return self.now

    async def call_typed(self, *_: Any, **__: Any) -> Any:
        self.sent += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def send(world: World, context: WriteContext = INTERNAL_WRITE, **options: Any) -> Any:
    call: Any = None
    return asyncio.run(world.forwarder().send(OWNER, call, None, context, **options))


BEGUN = PeerUnreachableError("silent", begun=True)


def test_a_node_that_did_not_act_may_be_asked_again() -> None:
    for answer in (StaleMapError(6), StaleMapError(8), PeerUnreachableError("refused")):
        with pytest.raises(WriteNotTakenError):
            send(World(answer))


def test_an_unknown_outcome_is_an_error_unless_the_write_is_repeatable() -> None:
    for answer in (BEGUN, BodyFramingError("cut")):
        with pytest.raises(NotReplicatedError, match="may or may not"):
            send(World(answer))
        with pytest.raises(WriteNotTakenError):
            send(World(answer), repeatable=True)
    world = World(BEGUN)
    with pytest.raises(NotReplicatedError):
        send(world)
    assert world.suspected == ["b"]


def test_a_refusal_is_mapped_by_the_caller_or_by_default() -> None:
    with pytest.raises(DiskFullError):
        send(World(PeerRefusedError(507, "InsufficientStorage", "full")))
    with pytest.raises(NotReplicatedError, match="broken"):
        send(World(PeerRefusedError(500, "InternalError", "broken")))
    with pytest.raises(KeyError):
        send(World(PeerRefusedError(404, "Gone", "")), refused=lambda _, error: KeyError(error.code))


def test_an_abandoned_write_is_not_sent() -> None:
    accepted = WriteContext("c", 5)
    assert send(World("done", absent_since=5), accepted) == "done"
    world = World("done", absent_since=6)
    with pytest.raises(NotReplicatedError, match="marked away"):
        send(world, accepted)
    assert world.sent == 0


def test_the_body_is_closed_whatever_comes() -> None:
    closed = []

    async def body() -> AsyncGenerator[bytes, None]:
        try:
            yield b"x"
        finally:
            closed.append(True)

    async def run() -> None:
        pieces = body()
        await anext(pieces)
        call: Any = None
        await World(BEGUN).forwarder().send(OWNER, call, None, INTERNAL_WRITE, pieces)

    with pytest.raises(NotReplicatedError):
        asyncio.run(run())
    assert closed


def test_the_write_goes_where_the_primary_is() -> None:
    async def run(world: World, *here: Any, context: WriteContext = INTERNAL_WRITE) -> Any:
        forwarder, answers, call = world.forwarder(), list(here), None

        async def local() -> Any:
            answer = answers.pop(0) if answers else NotPrimaryError("not mine")
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def there(node: Node) -> Any:
            known: Any = call
            return await forwarder.send(node, known, None, context)

        return await forwarder.run_on_primary("b", "k", local, there, context)

    assert asyncio.run(run(World(), "here")) == "here"
    assert asyncio.run(run(World("there"))) == "there"
    assert asyncio.run(run(World(StaleMapError(7), "there"))) == "there"
    assert asyncio.run(run(World(StaleMapError(7)), NotPrimaryError("no"), "here")) == "here"
    assert asyncio.run(run(World(primary="a"), NotPrimaryError("no"), "here")) == "here"
    with pytest.raises(NotReplicatedError, match="is away"):
        asyncio.run(run(World(primary="")))
    world = World("there")
    with pytest.raises(NotPrimaryError):
        asyncio.run(run(world, context=WriteContext(forwarded=True)))
    assert world.sent == 0
    world = World(*[StaleMapError(7)] * 1000)
    with pytest.raises(NotReplicatedError, match="15 s"):
        asyncio.run(run(world))
    assert 15 <= world.now < 16
