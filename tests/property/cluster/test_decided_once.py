"""Names that pass from one primary to another while writes of them are in progress, at random moments.

Law: what is answered with success, or refused, has one order in which every answer is right. A node that is
cut off and marked away, and returns, belongs to it: its requests may still be in progress.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pytest

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncStats
from meshd.cluster.rebalance.sync_plan import scope_of
from meshd.cluster.rebalance.sync_source import SyncSource
from meshd.rpc.peer_client import PeerClient, PeerUnreachableError
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    InvalidPartError,
    NoSuchUploadError,
    NotReplicatedError,
    StoreError,
)
from meshd.store.records import Meta, Upload, WriteContext
from meshwire.cluster.transitions import join_node, mark_complete, mark_node_away
from meshwire.http_values.conditional_requests import Conditions
from tests.support.mesh_nodes import accept_map, change_map, decider_of, running_nodes, shared_store
from tests.support.store_calls import fake_etag, put_object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from meshd.rpc.peer_rpc import PeerCall
    from meshwire.cluster import Node
    from meshwire.s3.bucket_settings import Versioning
    from tests.support.mesh_nodes import Running

State = TypeVar("State", bound=Hashable)
SLOTS: Final = 16
ALL: Final = scope_of({3: np.ones(SLOTS, np.bool_)}, SLOTS)
BODIES: Final = (b"one", b"two", b"three")
OUTCOMES: Final[dict[type[StoreError], str]] = {
    NoSuchUploadError: "ended",
    InvalidPartError: "part",
    ConditionFailedError: "failed",
    ConditionMissingError: "failed",
    NotReplicatedError: "unknown",
}


@dataclass(slots=True)
class Asked:
    """One operation: what was asked, between which moments, and the answer. One of unknown outcome takes
    effect at any time after it was asked, or never."""

    kind: str
    body: bytes
    old: bytes | None
    begun: float
    over: float = inf
    answer: str = "unknown"


Step = Callable[[State, Asked], State | None]
"""The state after an operation; None if its answer is wrong in this state."""


def in_one_order(start: State, asked: Sequence[Asked], step: Step[State]) -> bool:
    """Returns whether some order of the operations explains every answer."""
    seen: set[tuple[int, State]] = set()

    def search(left: int, state: State) -> bool:
        if (left, state) in seen:
            return False
        seen.add((left, state))
        waiting = [number for number in range(len(asked)) if left >> number & 1]
        if all(asked[number].answer == "unknown" for number in waiting):
            return True
        first_over = min(asked[number].over for number in waiting)
        for number in waiting:
            if asked[number].begun <= first_over:
                after = step(state, asked[number])
                if after is not None and search(left & ~(1 << number), after):
                    return True
        return False

    return search((1 << len(asked)) - 1, start)


def upload_step(state: bytes, asked: Asked) -> bytes | None:
    """`state`: the body of part 1 while the upload is in progress; b"" when it has ended. A completion of
    unknown outcome may end it with the part that its primary had."""
    if asked.answer == "unknown" and asked.kind == "complete":
        return b""
    right = "ended" if state == b"" else "part" if asked.kind == "complete" and asked.body != state else "ok"
    if asked.answer not in (right, "unknown"):
        return None
    if right != "ok":
        return state
    return asked.body if asked.kind == "part" else b""


def name_step(state: bytes, asked: Asked) -> bytes | None:
    """`state`: the bytes of the object; b"" without one."""
    right = "ok" if asked.old in (None, state) else "failed"
    if asked.answer not in (right, "unknown"):
        return None
    return asked.body if right == "ok" else state


class Network:
    """The calls between the nodes: each waits for a random time, and none reaches or leaves a node that is
    cut off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = random.Random(0)
        self.cut: set[str] = set()
        self.pace = 0.0
        call_typed = PeerClient.call_typed

        async def slow(
            peers: PeerClient, node: Node, call: PeerCall[Any, Any], request: Any, **more: Any
        ) -> Any:
            await self.wait()
            self._check(peers.node_id, node.node_id)
            answer = await call_typed(peers, node, call, request, **more)
            await self.wait()
            self._check(peers.node_id, node.node_id)
            return answer

        monkeypatch.setattr(PeerClient, "call_typed", slow)

    def _check(self, *names: str) -> None:
        if not self.cut.isdisjoint(names):
            raise PeerUnreachableError("the test has cut this node off", begun=True)

    async def wait(self) -> None:
        await asyncio.sleep(self.draw.choice((0.0, 0.0, 0.1, 1.0, 4.0, 8.0)) * self.pace)


class Schedule:
    """One run on one name: writes at random moments, while the name passes on and back."""

    def __init__(self, nodes: list[Running], network: Network, key: str, draw: random.Random) -> None:
        self.nodes, self.network, self.key, self.draw = nodes, network, key, draw
        self.history: list[Asked] = []
        self.began = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    async def ask(
        self, kind: str, body: bytes, old: bytes | None, do: Callable[[Running, WriteContext], Awaitable[Any]]
    ) -> None:
        """Asks a random node at a random time."""
        await asyncio.sleep(self.draw.random() * 12 * self.network.pace)
        node = self.draw.choice(self.nodes)
        name = node.node.settings.node_id
        asked = Asked(kind, body, old, self.now)
        self.history.append(asked)
        answer = "ok"
        try:
            await do(node, WriteContext(name, node.node.mesh.current_map().version))
        except StoreError as error:
            answer = OUTCOMES[type(error)]
        if answer != "unknown":
            asked.answer, asked.over = answer, self.now

    async def pass_on(self, former: Running) -> None:
        """Takes the name from its primary and gives it back: with or without a cut."""
        name, pace = former.node.settings.node_id, self.network.pace
        await asyncio.sleep(self.draw.random() * 6 * pace)
        if self.draw.random() < 0.5:
            self.network.cut.add(name)
            await asyncio.sleep(self.draw.random() * 4 * pace)
        await change_map(self.nodes, lambda cluster: mark_node_away(cluster, name))
        await asyncio.sleep(self.draw.random() * 6 * pace)
        self.network.cut.discard(name)
        await change_map(self.nodes, lambda cluster: join_node(cluster, former.member))
        await asyncio.sleep(self.draw.random() * 3 * pace)
        await self.compare([former])
        await change_map(self.nodes, lambda cluster: mark_complete(cluster, name))

    async def compare(self, to: Sequence[Running]) -> None:
        """Lets these nodes fetch what they lack, as a node does that has returned."""
        version = self.nodes[0].node.mesh.current_map().version
        for one in to:
            for other in self.nodes:
                if other is not one:
                    await other.node.store.raise_fence(version)
                    mine, theirs = (SyncSource(each.node.store, lambda bucket: 3) for each in (one, other))
                    await AntiEntropySync(
                        one.node.store, mine, theirs, ALL, rest=_rest, tally=SyncStats()
                    ).run_sync()

    async def run(self, asking: Sequence[Awaitable[None]]) -> None:
        former = decider_of(self.nodes, "b", self.key)
        await asyncio.gather(self.pass_on(former), *asking)
        # what was forwarded, and whose answer was lost
        running = [each for node in self.nodes for each in shared_store(node).primary._running]
        await asyncio.gather(*running, return_exceptions=True)
        await self.compare(self.nodes)
        await self.compare(self.nodes)

    def bodies(self) -> set[bytes | None]:
        """Returns what the nodes have under the name."""
        found = set[bytes | None]()
        for each in self.nodes:
            record = each.node.store.get("b", self.key)
            found.add(None if record is None else each.node.store.read_range(record, 0, record.size))
        return found


async def _rest(size: int) -> None:
    await asyncio.sleep(0)


def _in_schedules(
    monkeypatch: pytest.MonkeyPatch, seeds: range, test: Callable[[Schedule], Awaitable[None]]
) -> None:
    async def run() -> None:
        network = Network(monkeypatch)
        async with running_nodes(asyncio.get_running_loop(), 3, copies=3) as nodes:
            accept_map(nodes)
            for node in nodes:
                shared_store(node).primary.replicator.timeout = 5.0
            for seed in seeds:
                network.pace, network.draw = 0.01, random.Random(seed)
                async with asyncio.timeout(60):
                    await test(Schedule(nodes, network, f"key-{seed}", random.Random(seed)))

    asyncio.run(run())


@pytest.mark.parametrize("first", range(0, 90, 15))
def test_an_upload_ends_once(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(schedule: Schedule) -> None:
        draw, key = schedule.draw, schedule.key
        versioning: Versioning = draw.choice(("", "Enabled"))
        store = decider_of(schedule.nodes, "b", key).node.replicated_store
        upload = await store.create_upload(Upload("", "b", key))
        await _put_part(store, upload, BODIES[0], WriteContext())

        def ask(kind: str) -> Awaitable[None]:
            body = draw.choice(BODIES)

            async def do(node: Running, context: WriteContext) -> None:
                store = node.node.replicated_store
                if kind == "part":
                    await _put_part(store, upload, body, context)
                elif kind == "complete":
                    meta, etags = Meta("whole"), (fake_etag(body),)
                    await store.complete_upload(
                        upload, (1,), meta, etags=etags, versioning=versioning, context=context
                    )
                else:
                    await store.abort_upload(upload, context=context)

            return schedule.ask(kind, body, None, do)

        kinds = ["complete", "abort", *(draw.choice(("complete", "abort", "part", "part")) for _ in range(3))]
        await schedule.run([ask(kind) for kind in kinds])
        history = schedule.history
        assert in_one_order(BODIES[0], history, upload_step), history
        (body,) = schedule.bodies()
        completed: set[bytes | None] = {
            asked.body for asked in history if (asked.kind, asked.answer) == ("complete", "ok")
        }
        unknown: set[bytes | None] = {
            asked.body for asked in history if (asked.kind, asked.answer) == ("complete", "unknown")
        }
        assert body in (completed or unknown | {None}), history
        ended = any(asked.kind != "part" and asked.answer == "ok" for asked in history)
        left = {node.node.store.get_upload("b", key, upload.upload_id) is not None for node in schedule.nodes}
        assert len(left) == 1
        assert not (ended and True in left)

    _in_schedules(monkeypatch, range(first, first + 15), test)


async def _put_part(store: Any, upload: Upload, body: bytes, context: WriteContext) -> None:
    writer = store.part_writer(upload, 1, len(body))
    await writer.write(body)
    await writer.commit(Meta(fake_etag(body)), context=context)


@pytest.mark.parametrize("first", range(0, 90, 15))
def test_a_condition_has_one_winner(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(schedule: Schedule) -> None:
        draw, key = schedule.draw, schedule.key
        start = b"start"
        await put_object(decider_of(schedule.nodes, "b", key).node.replicated_store, key, start)

        def ask(number: int) -> Awaitable[None]:
            deletes, old = draw.random() < 0.3, draw.choice((start, start, b"body 0", b"body 1", b"", None))
            body = b"" if deletes else b"body %d" % number
            if deletes and old == b"":
                old = None

            async def do(node: Running, context: WriteContext) -> None:
                conditions = None if old is None else Conditions(if_match=(fake_etag(old),))
                if old == b"":
                    conditions = Conditions(if_none_match=("*",))
                store = node.node.replicated_store
                if deletes:
                    await store.delete("b", key, conditions=conditions, context=context)
                else:
                    await put_object(store, key, body, conditions=conditions, context=context)

            return schedule.ask("delete" if deletes else "put", body, old, do)

        await schedule.run([ask(number) for number in range(6)])
        assert in_one_order(start, schedule.history, name_step), schedule.history
        assert len(schedule.bodies()) == 1, schedule.history

    _in_schedules(monkeypatch, range(first, first + 15), test)


def test_the_search_finds_what_no_order_explains() -> None:
    abort, complete = Asked("abort", b"", None, 0, 2, "ok"), Asked("complete", b"one", None, 1, 3, "ok")
    assert not in_one_order(b"one", [abort, complete], upload_step)
    complete.answer = "ended"
    assert in_one_order(b"one", [abort, complete], upload_step)
    complete.answer = "part"
    assert not in_one_order(b"one", [abort, complete], upload_step)
    part = Asked("part", b"two", None, 0, 1, "ok")
    assert in_one_order(b"one", [abort, complete, part], upload_step)
    part.begun, part.over = 4, 5
    assert not in_one_order(b"one", [abort, complete, part], upload_step)
    first, second = (Asked("put", body, b"", 0, 1, "ok") for body in BODIES[:2])
    assert not in_one_order(b"", [first, second], name_step)
    second.answer = "unknown"
    assert in_one_order(b"", [first, second], name_step)
