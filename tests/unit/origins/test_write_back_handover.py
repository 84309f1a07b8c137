"""Who decides by a newer map waits until the node that decided before is done with a name at its origin."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.origins.write_back import HandoverBarrier, OriginWriter
from meshd.rpc.peer_client import PeerUnreachableError, StaleMapError
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.store.records import INTERNAL_WRITE
from meshd.util.clock import SystemClock
from meshwire.cluster import Node
from tests.support.reference_store import MemoryStore
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.origins.client.origin_api import ObjectFacts
    from meshd.origins.write_back import HandoverQuery
    from meshd.store.records import Record

BUCKET: Any = SimpleNamespace(name="b")


@dataclass
class World:
    """Node `a` and its map; `told` has what other nodes answer in turn: quiet or not, or an error. A number
    among them is the version of the map that comes with it."""

    told: dict[str, list[Any]] = field(default_factory=dict)
    nodes: tuple[Node, ...] = tuple(Node(name, f"http://{name}") for name in "abc")
    version: int = 7
    decides: bool = True
    now: float = 0.0
    asked: list[str] = field(default_factory=list)
    node_id = "a"
    single_node = False
    lease_valid: bool = True

    def current_map(self) -> Any:
        return SimpleNamespace(version=self.version, nodes=self.nodes)

    def is_primary(self, *_: str) -> bool:
        return self.decides

    async def wait_for_newer_map(self, version: int, patience: float) -> bool:
        if self.version <= version:
            self.now += patience
        return self.version > version

    async def report_suspect(self, node_id: str, version: int) -> None:
        return None

    def monotonic(self) -> float:
        return self.now

    async def call_typed(self, node: Node, _: object, asked: HandoverQuery) -> bool:
        assert asked.key == "k"
        self.asked.append(node.node_id)
        answers = self.told.get(node.node_id, [])
        answer = answers.pop(0) if answers else True
        if not isinstance(answer, bool | Exception):
            self.version, answer = answer, True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def succession(self) -> HandoverBarrier:
        found: Any = HandoverBarrier
        return found(self, self, self)  # type: ignore[no-any-return]


def settle(world: World) -> list[str]:
    asyncio.run(world.succession().wait_until_exclusive("b", "k"))
    return world.asked


def test_every_other_node_that_answers_is_asked_until_it_is_done() -> None:
    assert sorted(settle(World())) == ["b", "c"]
    assert settle(World({"b": [False, False, True]})).count("b") == 3
    away = tuple(Node(name, "http://x", state="away" if name == "c" else "up") for name in "abc")
    assert settle(World(nodes=away)) == ["b"]


def test_a_node_that_may_have_been_taken_out_asks_first_whether_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, why = World(lease_valid=False), "does not reach the control store"
    succession = world.succession()

    async def dispel(*_: str) -> str:
        assert world.asked == []
        return why

    monkeypatch.setattr(succession, "_read_barrier", SimpleNamespace(wait_until_current=dispel))
    with pytest.raises(NotReplicatedError, match=why):
        asyncio.run(succession.wait_until_exclusive("b", "k"))
    why = ""
    asyncio.run(succession.wait_until_exclusive("b", "k"))
    assert sorted(world.asked) == ["b", "c"]


def test_a_newer_map_begins_it_anew() -> None:
    assert sorted(settle(World({"b": [8]}))) == ["b", "b", "c"]
    assert sorted(settle(World({"b": [StaleMapError(8), 8]}))) == ["b", "b", "b", "c"]


def test_a_node_that_is_silent_ends_it() -> None:
    world = World({"c": [PeerUnreachableError("silent")] * 1000})
    with pytest.raises(NotReplicatedError, match="node c"):
        settle(world)
    assert 15 <= world.now < 16


def test_nobody_is_asked_long_after_a_map_has_come() -> None:
    async def run() -> None:
        world = World()
        succession = world.succession()
        await succession.wait_until_exclusive("b", "k")
        world.now += 599
        await succession.wait_until_exclusive("b", "k")
        assert len(world.asked) == 4
        world.now += 2
        await succession.wait_until_exclusive("b", "k")
        assert len(world.asked) == 4
        world.version = 8
        await succession.wait_until_exclusive("b", "k")
        assert len(world.asked) == 6

    asyncio.run(run())


class Origin:
    """One that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def delete(self, keys: list[str]) -> None:
        self.asked.set()
        await self.go.wait()


def test_it_is_quiet_when_what_was_begun_by_an_older_map_is_over() -> None:
    async def run() -> None:
        world, origin, gone = World(), Origin(), list[str]()

        async def nothing(*_: Any, **__: Any) -> None:
            gone.append("forgotten")

        made: Any = OriginWriter
        there = SimpleNamespace(forget_object=nothing, delete=nothing)
        writer = made(
            SimpleNamespace(origin_for=lambda _: origin), None, there, world, there, world.succession()
        )
        assert await writer.is_finished(BUCKET, "k", 7)
        assert not await writer.is_finished(BUCKET, "k", 8)  # it goes by an older map
        removing = asyncio.ensure_future(writer.delete_at_origin(BUCKET, "k", INTERNAL_WRITE))
        await origin.asked.wait()
        world.version, world.decides = 8, False
        quiet = asyncio.ensure_future(writer.is_finished(BUCKET, "k", 8))
        assert await writer.is_finished(BUCKET, "other", 8)
        assert not quiet.done()
        origin.go.set()
        await removing
        assert await quiet
        with pytest.raises(NotPrimaryError):
            await writer.delete_at_origin(BUCKET, "k", INTERNAL_WRITE)

    asyncio.run(run())


class DurableStore(MemoryStore):
    """Has no cached objects of an origin."""

    def get_stored(self, bucket: str, key: str) -> Record | None:
        return self.get(bucket, key)


def test_a_write_of_the_same_bytes_during_a_write_back_keeps_its_metadata() -> None:
    """It comes after the stamp was compared, and before the object is removed from the store."""

    async def run() -> None:
        world, store, pushed = World(), DurableStore(SystemClock()), list[dict[str, str]]()

        async def push(_: str, body: AsyncIterator[bytes], facts: ObjectFacts) -> str:
            assert [piece async for piece in body] == [b"same"]
            pushed.append(dict(facts.metadata))
            return "etag"

        async def delete_version(*what: str, **how: Any) -> Any:
            if len(pushed) == 1:
                await put_object(store, "k", b"same", metadata={"n": "2"})
            return await store.delete_version(*what, **how)

        async def forget(*_: Any) -> None:
            return None

        await put_object(store, "k", b"same", metadata={"n": "1"})
        made: Any = OriginWriter
        writer = made(
            SimpleNamespace(origin_for=lambda _: SimpleNamespace(put=push)),
            store,
            SimpleNamespace(delete_version=delete_version),
            world,
            SimpleNamespace(forget_object=forget),
            world.succession(),
        )
        assert await writer.write_back(BUCKET, "k") == "etag"
        assert pushed == [{"n": "1"}, {"n": "2"}]
        assert store.get("b", "k") is None

    asyncio.run(run())
