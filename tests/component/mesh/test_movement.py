"""Rebalancers of several nodes over real connections: joins, returns, drains, deaths, repair."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import uvloop

from meshd.cluster.rebalance.cleanup import Cleanup
from meshd.cluster.rebalance.progress import Progress
from meshd.cluster.rebalance.sync_plan import INTERNAL_BUCKET, scope_of
from meshd.cluster.rebalance.sync_source import InventoryRequest, SyncPeerLostError, SyncSource
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.process.wiring.cluster import rebalancer
from meshd.store.engine.compaction_mutations import PruneTombstones
from meshd.store.errors import StaleEpochError
from meshd.store.records import Meta, Upload, WriteContext
from meshwire.cluster import routes, transitions
from tests.support.mesh_nodes import running_nodes
from tests.support.store_calls import put_object, put_part

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from meshd.cluster.rebalance.rebalancer import Rebalancer
    from meshd.cluster.rebalance.sync_plan import Scope
    from meshd.store.replica.inventory import HeldName
    from meshd.store.store import Store
    from meshwire.cluster import ClusterMap
    from tests.support.mesh_nodes import Running

NAMES = 60


class World:
    """Nodes, their rebalancers, and the map they share."""

    def __init__(self, nodes: list[Running]) -> None:
        self.nodes = {one.node.settings.node_id: one for one in nodes}
        self.rebalancers: dict[str, Rebalancer] = {
            name: rebalancer(one.node) for name, one in self.nodes.items()
        }
        self.maps = ClusterMapStore(nodes[0].node.control)

    def store(self, node_id: str) -> Store:
        return self.nodes[node_id].node.store

    def map(self) -> ClusterMap:
        cluster = self.maps.current()
        assert cluster is not None
        return cluster

    async def change(self, how: Callable[..., ClusterMap], *about: Any) -> None:
        def changed(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            return how(present, *about)

        await self.maps.update_map(changed)

    async def write(self, key: str, data: bytes, **about: Any) -> None:
        """As the decider does, and nobody else yet."""
        decider = routes(self.map(), 2).route_of_key("b", key).primary
        assert decider is not None
        await put_object(self.store(decider.node_id), key, data, **about)

    async def move(self, rounds: int = 8, without: tuple[str, ...] = ()) -> None:
        """Every rebalancer in turn, until nobody owes anything."""
        for _ in range(rounds):
            for name, one in self.rebalancers.items():
                if name not in without:
                    await one.run_once()

    async def held(self, node_id: str) -> dict[bytes, HeldName]:
        """What a node holds that is not only a memory of removals."""
        cluster, own = self.map(), SyncSource(self.store(node_id), lambda bucket: 2)
        every = scope_of({2: np.ones(cluster.slots, np.bool_)}, cluster.slots)
        page = await own.read_inventory(InventoryRequest(every, limit=100_000))
        return {held.name: held for held in page.names if held.versions or held.uploads}

    async def check(self, names: int) -> None:
        """Every name is at its two owners and nowhere else, and they agree."""
        cluster, table = self.map(), routes(self.map(), 2)
        assert not cluster.is_rebalancing
        holding = {name: await self.held(name) for name in self.nodes}
        every = {name for held in holding.values() for name in held}
        assert len(every) == names
        for name in every:
            route = table.route_of_key(*name.decode().split("\0"))
            owners = {node.node_id for node in route.write_set}
            assert {node for node, held in holding.items() if name in held} == owners
            assert len({msgspec.json.encode(holding[node][name]) for node in owners}) == 1


@asynccontextmanager
async def world(number: int) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    async with running_nodes(loop, number, copies=2) as nodes:
        found = World(nodes)
        yield found


def run(doing: Callable[[World], Coroutine[Any, Any, None]], number: int = 3) -> None:
    async def main() -> None:
        async with world(number) as found:
            for each in range(NAMES):
                await found.write(f"k{each}", bytes([each]) * (each * 50))
            for one in found.rebalancers.values():
                await one.run_repair_round()
            await found.check(NAMES)
            await doing(found)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_what_replicas_missed_is_repaired() -> None:
    async def doing(found: World) -> None:
        await found.write("k1", b"again")
        await found.write("versioned", b"v", versioning="Enabled")
        decider = routes(found.map(), 2).route_of_key("b", "up").primary
        assert decider is not None
        upload = await found.store(decider.node_id).create_upload(Upload("", "b", "up"))
        await put_part(found.store(decider.node_id), upload, 3, b"part" * 1000)
        for one in found.rebalancers.values():
            await one.run_repair_round()
        await found.check(NAMES + 2)

    run(doing)


async def _cut_off(found: World, number: int) -> None:
    """Writes of every kind that their primaries commit and send to nobody."""

    def primary_of(key: str) -> Store:
        node = routes(found.map(), 2).route_of_key("b", key).primary
        assert node is not None
        return found.store(node.node_id)

    begun = {}
    for key in ("ended", "whole", "parts"):
        begun[key] = await primary_of(f"{key}{number}").create_upload(Upload("", "b", f"{key}{number}"))
        await put_part(primary_of(f"{key}{number}"), begun[key], 1, b"part" * 1000)
    old = await put_object(primary_of(f"v{number}"), f"v{number}", b"old", versioning="Enabled")
    for one in found.rebalancers.values():
        await one.run_repair_round()
    await found.write(f"k{number}", b"replaced")
    await primary_of("k1").delete("b", "k1")
    await primary_of("k2").amend("b", "k2", None, tags={"a": str(number)})
    await found.write(f"v{number}", b"new", versioning="Enabled")
    await primary_of(f"v{number}").delete_version("b", f"v{number}", old.version)
    await primary_of("k3").delete("b", "k3", versioning="Enabled")
    await primary_of(f"ended{number}").abort_upload(begun["ended"])
    await primary_of(f"whole{number}").complete_upload(begun["whole"], (1,), Meta("whole-1"))
    await put_part(primary_of(f"parts{number}"), begun["parts"], 2, b"more" * 1000)
    await primary_of(f"begun{number}").create_upload(Upload("", "b", f"begun{number}"))


def test_what_a_start_has_cut_off_is_at_all_owners() -> None:
    """A node that is back before its lease was missed has committed what nobody else has, and the map says
    nothing of it."""

    async def doing(found: World) -> None:
        control, rounds = found.nodes["n1"].node.control, list[tuple[str, set[str] | None]]()
        for name, one in found.rebalancers.items():
            one.run_repair_round = _noted(name, one, rounds)  # type: ignore[method-assign]
        for number, started in enumerate(((), ("n1",), ("n2", "n3"), ("n1", "n2", "n3")), 4):
            await _cut_off(found, number)
            rounds.clear()
            for name in started:
                entry = {"directory": name, "count": number, "started": number}
                await control.put(f"directories/{name}", msgspec.json.encode(entry))
            if not started:  # every node is new, and has compared with none
                found.rebalancers |= {name: rebalancer(one.node) for name, one in found.nodes.items()}
                for name, one in found.rebalancers.items():
                    one.run_repair_round = _noted(name, one, rounds)  # type: ignore[method-assign]
            for _ in range(2):  # the second time there is nothing to compare
                for one in found.rebalancers.values():
                    await one.run_once()
            everybody = set(found.nodes)
            asked = set(started) or everybody
            assert sorted(rounds) == sorted((name, asked - {name}) for name in found.nodes if asked - {name})
            holding = {name: await found.held(name) for name in found.nodes}
            table = routes(found.map(), 2)
            for held in {held for names in holding.values() for held in names}:
                route = table.route_of_key(*held.decode().split("\0"))
                if route.primary is not None and route.primary.node_id in asked:
                    owners = {node.node_id for node in route.write_set}
                    assert len({msgspec.json.encode(holding[each].get(held)) for each in owners}) == 1

    run(doing)


def _noted(name: str, one: Rebalancer, rounds: list[tuple[str, set[str] | None]]) -> Callable[..., Any]:
    actual = one.run_repair_round

    async def noted(only: set[str] | None = None) -> Any:
        rounds.append((name, only))
        return await actual(only)

    return noted


def test_a_large_object_and_its_parts_come_over() -> None:
    async def doing(found: World) -> None:
        decider = routes(found.map(), 2).route_of_key("b", "big").primary
        assert decider is not None
        store = found.store(decider.node_id)
        upload = await store.create_upload(Upload("", "b", "big"))
        for number in (1, 2):
            await put_part(store, upload, number, bytes([number]) * (5 << 20))
        record = await store.complete_upload(upload, [1, 2], Meta("whole"))
        for one in found.rebalancers.values():
            await one.run_repair_round()
        for name in await owners(found, "big"):
            copy = found.store(name).get("b", "big")
            assert copy is not None
            assert (copy.stamp, copy.etag, copy.parts) == (record.stamp, "whole", record.parts)
            assert found.store(name).read_range(copy, (5 << 20) - 1, 2) == b"\x01\x02"

    run(doing)


async def owners(found: World, key: str) -> list[str]:
    return [node.node_id for node in routes(found.map(), 2).route_of_key("b", key).write_set]


def test_a_dead_nodes_copies_are_made_again() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n3")
        await found.change(transitions.mark_node_down, "n3")
        assert found.map().is_rebalancing
        await found.move(without=("n3",))
        one, other = await found.held("n1"), await found.held("n2")
        assert one == other
        assert len(one) == NAMES
        assert not found.map().is_rebalancing

    run(doing)


def test_a_drained_node_is_empty() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.drain_node, "n1")
        await found.move()
        assert await found.held("n1") == {}
        await found.check(NAMES)
        await found.change(transitions.remove_node, "n1")

    run(doing, 4)


def test_a_node_that_returns_learns_what_it_missed() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n2")
        for each in range(0, NAMES, 2):
            await found.write(f"k{each}", b"newer")
        for each in range(1, NAMES, 3):
            key = f"k{each}"
            decider = routes(found.map(), 2).route_of_key("b", key).primary
            assert decider is not None
            await found.store(decider.node_id).delete("b", key)
        for name in ("n1", "n3"):
            await found.rebalancers[name].run_repair_round()
        back = found.nodes["n2"].member
        await found.change(transitions.join_node, back)
        assert found.map().node("n2").state == "returning"  # type: ignore[union-attr]  # it is there
        await found.rebalancers["n2"].run_once()
        assert found.map().node("n2").state == "up"  # type: ignore[union-attr]  # it is there
        await found.check(NAMES - len(range(1, NAMES, 3)))

    run(doing)


def test_a_node_joins_empty_after_it_was_given_up() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n2")
        await found.change(transitions.mark_node_down, "n2")
        await found.move(without=("n2",))
        await found.store("n2").inventory.drop_unowned(list((await found.held("n2")).values()))
        await found.change(transitions.join_node, found.nodes["n2"].member)
        await found.write("while joining", b"x")
        await found.move()
        await found.check(NAMES + 1)
        progress = [
            msgspec.json.decode(entry.value, type=Progress)
            for entry in found.nodes["n1"].node.control.cached_entries("moves").values()
        ]
        assert {each.doing for each in progress} == {"idle"}
        assert sum(each.bytes for each in progress) > 0

    run(doing)


def test_a_node_that_joins_keeps_what_it_fetched_before_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n2")
        await found.change(transitions.mark_node_down, "n2")
        await found.move(without=("n2",))
        joining, inventory = found.rebalancers["n2"], found.store("n2").inventory
        forgotten = found.nodes["n2"].node.clock.now_ms() * 10**6
        monkeypatch.setattr(type(inventory), "tombstones_complete_since", lambda _: forgotten)
        await found.change(transitions.join_node, found.nodes["n2"].member)

        async def interrupted(*about: object) -> None:
            raise SyncPeerLostError("gone")

        drop, drops = Cleanup.drop_stale, list[int]()

        async def counted(self: Cleanup, scope: Scope, now: int) -> int:
            drops.append(now)
            return await drop(self, scope, now)

        monkeypatch.setattr(Cleanup, "drop_stale", counted)
        with monkeypatch.context() as patches:
            patches.setattr(joining.reporter, "mark_complete", interrupted)
            for _ in range(3):
                with pytest.raises(SyncPeerLostError):
                    await joining.run_once()
        assert len(drops) == 1  # what it had before it was given up
        await found.move()
        await found.check(NAMES)

    run(doing)


def test_who_has_all_while_another_joins_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin anew is to forget first, and the map may call it up meanwhile: it would be read without what
    it had said it has."""

    async def doing(found: World) -> None:
        for gone in (("n2",), ("n2", "n3")):
            await found.change(transitions.mark_node_away, gone[-1])
            await found.change(transitions.mark_node_down, gone[-1])
            await found.move(without=gone)
        for node_id in ("n2", "n3"):
            await found.change(transitions.join_node, found.nodes[node_id].member)
        before = found.map()
        await found.rebalancers["n2"].run_once()
        me = found.map().node("n2")
        assert me is not None
        assert (me.state, me.complete >= found.map().goal) == ("joining", True)

        async def anew(*about: object) -> None:
            raise AssertionError("it begins anew")

        with monkeypatch.context() as patches:
            patches.setattr(found.rebalancers["n2"], "_sync_until_complete", anew)
            await found.rebalancers["n2"].run_once()
            patches.setattr(found.nodes["n2"].node.mesh, "current_map", lambda: before)  # not here yet
            await found.rebalancers["n2"].run_once()
        await found.move()
        await found.check(NAMES)

    run(doing, 4)


def test_an_owner_that_cannot_be_asked_is_waited_for() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n2")
        await found.change(transitions.join_node, found.nodes["n2"].member)
        unreachable = replace(found.map().node("n1"), endpoint="http://127.0.0.1:9")  # type: ignore[type-var]
        await found.change(transitions.join_node, unreachable)
        with pytest.raises(SyncPeerLostError):
            await found.rebalancers["n2"].run_once()
        assert found.map().node("n2").state == "returning"  # type: ignore[union-attr]  # it is there
        await found.change(transitions.join_node, found.nodes["n1"].member)
        await found.rebalancers["n2"].run_once()
        assert found.map().node("n2").state == "up"  # type: ignore[union-attr]  # it is there

    run(doing, 2)


def test_a_comparison_that_was_asked_for_waits_for_an_owner_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def doing(found: World) -> None:
        node = found.rebalancers["n2"]
        await node.run_once()
        waiting = asyncio.ensure_future(node.wait_until_compared())
        await asyncio.sleep(0)

        async def unanswered(*about: object) -> None:
            raise SyncPeerLostError("n1 does not answer")

        with monkeypatch.context() as patches:
            patches.setattr(node, "_compare", unanswered)
            with pytest.raises(SyncPeerLostError):
                await node.run_once()
        await asyncio.sleep(0)
        assert not waiting.done()
        await node.run_once()
        await asyncio.wait_for(waiting, 60)

    run(doing, 2)


def test_what_came_over_is_durable_before_the_map_says_that_it_is_here() -> None:
    """Others drop what the map says is here. `durability: relaxed` syncs later, and the control store at
    once."""

    async def doing(found: World) -> None:
        store, at_checkpoints = found.store("n1"), list[tuple[int, bool]]()

        class Relaxed:
            """The store, as if it needed checkpoints."""

            def __init__(self) -> None:
                self.checkpointer, self.needed = self, True

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def take(self) -> None:
                at_checkpoints.append((store.stats().objects, found.map().is_rebalancing))

        found.rebalancers["n1"]._store = Relaxed()  # type: ignore[assignment]
        await found.change(transitions.mark_node_away, "n3")
        await found.change(transitions.mark_node_down, "n3")
        await found.move(without=("n3",))
        assert at_checkpoints == [(NAMES, True)]
        assert not found.map().is_rebalancing

    run(doing)


async def _forget(found: World, node_ids: tuple[str, ...]) -> None:
    """Removals are remembered for so long, and no longer."""
    for node_id in node_ids:
        store = found.store(node_id)
        await store._submit(PruneTombstones(found.nodes[node_id].node.clock.now_ms() * 10**6, b""))


@pytest.mark.parametrize("given_up", [False, True])
def test_a_node_that_was_away_for_too_long_brings_nothing_back(
    given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.cluster.rebalance.worker.SKEW", 0)
    monkeypatch.setattr("meshd.cluster.rebalance.cleanup.SKEW", 0)

    async def doing(found: World) -> None:
        await found.store("n2").inventory.record_synced_stamp(found.nodes["n2"].node.clock.now_ms() * 10**6)
        await found.change(transitions.mark_node_away, "n2")
        if given_up:
            await found.change(transitions.mark_node_down, "n2")
            await found.move(without=("n2",))
        gone = range(0, NAMES, 3)
        for each in gone:
            for node_id in ("n1", "n3"):
                await found.store(node_id).delete("b", f"k{each}")
        await _forget(found, ("n1", "n3"))
        await found.change(transitions.join_node, found.nodes["n2"].member)
        await found.move()
        assert found.map().node("n2").state == "up"  # type: ignore[union-attr]  # it is there
        await found.check(NAMES - len(gone))

    run(doing)


def test_a_write_that_its_deciders_death_cut_short_is_everywhere_once_that_is_back() -> None:
    async def doing(found: World) -> None:
        for one in found.rebalancers.values():
            await one.run_once()
        for each in range(NAMES):
            decider = routes(found.map(), 2).route_of_key("b", f"k{each}").primary
            assert decider is not None
            if decider.node_id == "n2":
                await put_object(found.store("n2"), f"k{each}", b"told nobody")
        await found.change(transitions.mark_node_away, "n2")
        await found.rebalancers["n1"].run_once()
        await found.change(transitions.join_node, found.nodes["n2"].member)
        await found.rebalancers["n2"].run_once()
        assert found.map().node("n2").state == "up"  # type: ignore[union-attr]  # it is there
        for name in ("n1", "n3"):
            await found.rebalancers[name].run_once()
        await found.check(NAMES)

    run(doing)


def test_what_nodes_keep_for_themselves_is_nobodys_but_shared_documents_are_everybodys() -> None:
    assert INTERNAL_BUCKET.decode() == RESERVED_BUCKET

    async def doing(found: World) -> None:
        catalogs = {name: DocumentStore(found.store(name)) for name in found.nodes}
        await catalogs["n1"].write_document("results/one", b"mine")
        await catalogs["n1"].write_document("plans/abc", b"a plan")
        await catalogs["n3"].write_document("snapshots/def", b"a snapshot")
        asked: list[str] = []

        async def keep(names: Sequence[str]) -> None:
            asked.extend(names)

        one = found.rebalancers["n2"]
        assert one._deps.shared_documents is not None
        one._deps = replace(one._deps, shared_documents=(one._deps.shared_documents[0], keep))
        await found.change(transitions.mark_node_away, "n2")
        await found.change(transitions.join_node, found.nodes["n2"].member)
        await found.move()
        assert sorted(asked) == ["plans/abc", "snapshots/def"]
        assert catalogs["n2"].read_document("results/one") is None
        assert catalogs["n1"].read_document("results/one") == b"mine"
        assert all(each.reporter.progress.kept == 0 for each in found.rebalancers.values())

    run(doing)


def test_what_owners_have_not_got_stays() -> None:
    async def doing(found: World) -> None:
        table = routes(found.map(), 2)
        owners = {node.node_id for node in table.route_of_key("b", "odd").write_set}
        [other] = set(found.nodes) - owners
        record = await put_object(found.store(other), "odd", b"only here")
        one = found.rebalancers[other]
        await one.run_once()
        assert b"b\0odd" in await found.held(other)
        assert (one.reporter.progress.kept, one.reporter.progress.clear) == (1, 0)
        for node_id in owners:
            writer = found.store(node_id).replica_writer("b", "odd", size=9)
            await writer.write(b"only here")
            await writer.commit_at_stamp(record)
        one._retry_cleanup_at = 0.0
        await one.run_once()
        assert b"b\0odd" not in await found.held(other)
        assert (one.reporter.progress.kept, one.reporter.progress.clear) == (0, found.map().version)

    run(doing)


def test_nothing_goes_while_a_process_of_the_node_answers_by_an_earlier_map() -> None:
    async def doing(found: World) -> None:
        cluster, known = found.map(), [0]
        sources = replace(found.rebalancers["n1"]._deps, adopted_version=lambda: known[0])
        found.rebalancers["n1"]._deps = sources
        await found.change(transitions.drain_node, "n1")
        await found.move()
        assert not found.map().is_rebalancing
        assert await found.held("n1")
        known[0] = cluster.version
        await found.rebalancers["n1"].run_once()
        assert await found.held("n1")
        known[0] = found.map().version
        await found.rebalancers["n1"].run_once()
        assert await found.held("n1") == {}

    run(doing)


def test_whoever_was_compared_with_decides_by_no_earlier_map() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.set_node_weight, "n1", 2)
        version = found.map().version
        await found.rebalancers["n2"].run_repair_round()
        with pytest.raises(StaleEpochError):
            await put_object(found.store("n1"), "late", b"x", context=WriteContext(epoch=version - 1))
        await put_object(found.store("n1"), "in time", b"x", context=WriteContext(epoch=version))

    run(doing, 2)


def test_a_rebalancer_that_is_broken_off_goes_on_where_it_was() -> None:
    async def doing(found: World) -> None:
        await found.change(transitions.mark_node_away, "n2")
        await found.change(transitions.mark_node_down, "n2")
        await found.move(without=("n2",))
        await found.store("n2").inventory.drop_unowned(list((await found.held("n2")).values()))
        await found.change(transitions.join_node, found.nodes["n2"].member)
        one, seen = found.rebalancers["n2"], 0

        async def break_off(size: int) -> None:
            nonlocal seen
            seen += bool(size)
            if seen > 10:
                raise ConnectionAbortedError

        one._deps = replace(one._deps, throttle=break_off)
        with pytest.raises(ConnectionAbortedError):
            await one.run_once()
        assert await found.held("n2")
        found.rebalancers["n2"] = rebalancer(found.nodes["n2"].node)
        await found.move()
        await found.check(NAMES)

    run(doing)
