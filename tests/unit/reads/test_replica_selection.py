"""Which node is asked for what others hold, and which one next."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.cluster_view import ClusterView
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.errors import MeshdError
from meshd.peer_reads import replica_selection
from meshd.peer_reads.replica_selection import ReplicaSearch, ReplicaSelector
from meshd.rpc.peer_client import PeerClient, StaleMapError
from meshd.util.clock import SystemClock
from meshwire.cluster import Node, compute_placement
from meshwire.cluster.routes import slot_of
from meshwire.cluster.transitions import bootstrap_map, join_node, mark_complete
from meshwire.errors import S3Error
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.cluster import ClusterMap


def _key(cluster: ClusterMap, *owners: str) -> str:
    placed = compute_placement(cluster, 2)
    for number in range(10_000):
        found = placed.owners_of_slot(slot_of("b", f"k{number}", cluster.slots))
        if {node.node_id for node in found} == set(owners):
            return f"k{number}"
    raise AssertionError(owners)


def _cluster(*names: str) -> ClusterMap:
    cluster = bootstrap_map(Node(names[0], f"http://{names[0]}"), copies=2)
    for name in names[1:]:
        cluster = join_node(cluster, Node(name, f"http://{name}"))
    for name in names:
        cluster = mark_complete(cluster, name)
    return cluster


async def _mesh() -> tuple[ClusterView, ClusterMapStore]:
    control = MemoryControl(SystemClock())
    maps = ClusterMapStore(control)
    await maps.update_map(lambda _: _cluster("n1", "n2", "n3"))
    return ClusterView("n1", control, lambda bucket: 0), maps


def _asking(mesh: ClusterView) -> ReplicaSelector:
    return ReplicaSelector(mesh, PeerClient("n1", lambda _: b"", SystemClock()))


def test_the_next_holder_is_asked_for_what_one_has_not_and_this_node_is_not() -> None:
    async def run() -> None:
        mesh, _ = await _mesh()
        asked: list[str] = []

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            asked.append(node.node_id)
            if len(asked) == 1:
                raise MeshdError("not now")
            return list(numbers)

        far, mine = _key(mesh.current_map(), "n2", "n3"), _key(mesh.current_map(), "n1", "n2")
        why = await _asking(mesh).ask_replicas({0: ("b", far)}, ask)
        assert sorted(asked) == ["n2", "n3"]
        assert why == {0: f"{asked[1]} does not have it"}
        asked.clear()
        await _asking(mesh).ask_replicas({0: ("b", mine)}, ask)  # what is damaged here, say
        assert asked == ["n2"]

    asyncio.run(run())


def test_this_node_is_asked_for_what_it_came_to_read_meanwhile() -> None:
    async def run() -> None:
        mesh, maps = await _mesh()
        key, asked = _key(mesh.current_map(), "n2", "n3"), list[str]()

        def without_n3(cluster: ClusterMap | None) -> ClusterMap:
            assert cluster is not None
            return replace(_cluster("n1", "n2"), version=cluster.version + 1)

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            asked.append(node.node_id)
            if node.node_id == "n1":
                return []
            before = mesh.current_map().version
            await maps.update_map(without_n3)
            await mesh.wait_for_newer_map(before, 5.0)
            return list(numbers)

        assert await _asking(mesh).ask_replicas({0: ("b", key)}, ask) == {}
        assert asked[-1] == "n1"

    asyncio.run(run())


@pytest.mark.parametrize("homes", [(), ("n3", "n1"), ("n2",)])
@pytest.mark.parametrize("writes", ["", "through", "off"])
def test_the_slots_that_are_read_here_are_those_of_the_routes(writes: str, homes: tuple[str, ...]) -> None:
    async def run() -> None:
        control = MemoryControl(SystemClock())
        await ClusterMapStore(control).update_map(lambda _: _cluster("n1", "n2", "n3"))
        mesh = ClusterView(
            "n1", control, lambda bucket: 0, writes_of=lambda bucket: writes, homes_of=lambda bucket: homes
        )
        first, all_of_it = (mesh.slots_read_here("b", first_only=first) for first in (True, False))
        for number in range(300):
            readers = mesh.route_for("b", f"k{number}").read_set
            slot = slot_of("b", f"k{number}", mesh.current_map().slots)
            assert first[slot] == (readers[0].node_id == "n1")
            assert all_of_it[slot] == ("n1" in [node.node_id for node in readers])

    asyncio.run(run())


def test_a_search_asks_every_replica_in_each_round_and_then_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_selection, "_ROUNDS", 2)
    monkeypatch.setattr(replica_selection, "_PAUSE", 0.01)

    async def run() -> None:
        mesh, _ = await _mesh()
        asked = list[str]()
        search = ReplicaSearch(mesh, "b", _key(mesh.current_map(), "n2", "n3"))

        async def ask_all() -> None:
            while (node := await search.next_replica()) is not None:
                asked.append(node.node_id)
                await search.mark_failed(node, MeshdError("not now"))

        with pytest.raises(S3Error) as caught:
            await ask_all()
        assert caught.value.code == "SlowDown"
        assert [sorted(asked[at : at + 2]) for at in range(0, len(asked), 2)] == [["n2", "n3"]] * 3

    asyncio.run(run())


def test_a_search_goes_by_the_newer_map_that_a_node_names_and_may_end_here() -> None:
    async def run() -> None:
        mesh, maps = await _mesh()
        search = ReplicaSearch(mesh, "b", _key(mesh.current_map(), "n2", "n3"))
        node = await search.next_replica()
        assert node is not None
        newer = mesh.current_map().version + 1
        await maps.update_map(lambda _: replace(_cluster("n1"), version=newer))
        await search.mark_failed(node, StaleMapError(newer))
        assert await search.next_replica() is None

    asyncio.run(run())
