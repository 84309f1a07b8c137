"""Joins and completions of many nodes at once: few versions of the map, and the same nodes in it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest

from meshd.cluster import batched_map_changes
from meshd.cluster.batched_map_changes import enter_node, settle_node
from meshd.cluster.node_lease import node_lease_name
from meshd.cluster.rebalance.progress import Progress
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.embedded import EmbeddedControl
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node, transitions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OLD, NEW = 40, 24


class CountedControl(EmbeddedControl):
    """Counts what each node is sent: versions of the map, and their bytes."""

    maps, sent = 0, 0

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        version = await super().put(key, value, expect=expect)
        self.maps, self.sent = self.maps + (key == "cluster/map"), self.sent + len(value)
        return version


@pytest.fixture
def control(tmp_path: Path) -> Iterator[CountedControl]:
    with closing(CountedControl(tmp_path, SystemClock(), poll=0.01)) as made:
        yield made


def node(number: int) -> Node:
    return Node(f"n{number:03}", f"http://n{number:03}:9000", zone=f"z{number % 4}")


def joining(present: ClusterMap | None, new: Node) -> ClusterMap:
    assert present is not None
    return transitions.join_node(present, new)


async def fill(control: CountedControl, count: int) -> ClusterMap:
    cluster = ClusterMap(1, tuple(node(number) for number in range(count)), 256)
    await control.put("cluster/map", cluster.to_json())
    control.maps = control.sent = 0
    return cluster


async def enter(control: CountedControl, new: Node, *, alive: bool = True) -> None:
    if alive:
        await control.acquire_lease(node_lease_name(new.node_id), new.node_id, 60.0)
    await enter_node(control, ClusterMapStore(control), new, lambda present: joining(present, new))


async def settle(control: CountedControl, node_id: str, version: int) -> None:
    progress = msgspec.json.encode(Progress(complete=version))
    await control.put(f"moves/{node_id}", progress)
    await settle_node(control, ClusterMapStore(control), node_id, version)


class WaitForAll:
    """The wait for other nodes, which here ends when `announced` holds, too: 0.2 s, as with 40 nodes, are too
    short for them on a slow machine."""

    def __init__(self, announced: Callable[[], bool]) -> None:
        self._wait, self._announced = batched_map_changes._wait_for_others, announced
        self._held = False

    async def __call__(self, maps: ClusterMapStore) -> None:
        await self._wait(maps)
        while not self._held:  # the first one to change the map takes its announcement back
            self._held = self._announced()
            await asyncio.sleep(0.01)


def test_many_nodes_join_and_become_complete_in_few_versions(
    control: CountedControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for(topic: str, count: int) -> None:
        waits = WaitForAll(lambda: len(control.cached_entries(topic)) == count)
        monkeypatch.setattr(batched_map_changes, "_wait_for_others", waits)

    async def run() -> ClusterMap:
        await fill(control, OLD)
        wait_for("joins", NEW)
        async with asyncio.TaskGroup() as together:
            for number in range(OLD, OLD + NEW):
                together.create_task(enter(control, node(number)))
        joined = ClusterMapStore(control).current()
        assert joined is not None
        assert [each.state for each in joined.nodes] == ["up"] * OLD + ["joining"] * NEW
        assert control.maps <= 3  # one by one it is 24
        monkeypatch.undo()
        wait_for("moves", OLD + NEW)
        async with asyncio.TaskGroup() as together:
            for each in joined.nodes:
                together.create_task(settle(control, each.node_id, joined.version))
        found = ClusterMapStore(control).current()
        assert found is not None
        return found

    found = asyncio.run(run())
    assert control.maps <= 6  # one by one it is 88
    assert control.sent < 8 * len(found.to_json())
    assert {each.state for each in found.nodes} == {"up"}
    assert not found.is_rebalancing
    assert len(found.nodes) == OLD + NEW


def test_what_was_told_counts_only_as_long_as_it_is_true(control: CountedControl) -> None:
    async def run() -> ClusterMap:
        cluster = await fill(control, OLD)
        await control.put("joins/n090", ClusterMap(0, (node(90),)).to_json())  # which has ended meanwhile
        await enter(control, node(OLD))
        maps = ClusterMapStore(control)
        joined = maps.current()
        assert joined is not None
        assert joined.node("n090") is None
        await control.put("moves/n001", msgspec.json.encode(Progress(complete=joined.version)))
        for change in (transitions.mark_node_away, transitions.join_node):
            known = joined.node("n001")
            assert known is not None

            def turn(present: ClusterMap | None, change: object = change, known: Node = known) -> ClusterMap:
                assert present is not None
                if change is transitions.mark_node_away:
                    return transitions.mark_node_away(present, "n001")
                return transitions.join_node(present, known)

            joined = await maps.update_map(turn)
        await settle(control, f"n{OLD:03}", joined.version)
        found = maps.current()
        assert found is not None
        assert cluster.version < found.version
        return found

    found = asyncio.run(run())
    states = {each.node_id: each.state for each in found.nodes}
    assert states["n001"] == "returning"  # it was away since it told that it was complete
    assert found.is_rebalancing


def test_a_small_mesh_waits_for_nobody() -> None:
    few, some, many = map(transitions.batch_seconds, (31, 100, 10_000))
    assert few == 0 < some < many == 5
