"""A node that may have been taken out of the map asks before it answers by it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.read_barrier import ReadBarrier
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.util import shared_counters
from meshd.util.clock import SystemClock
from meshd.util.shared_counters import MAX_VERSION
from meshwire.cluster import Node, compute_placement
from meshwire.cluster.transitions import bootstrap_map, join_node, mark_complete, mark_node_away
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshwire.cluster import ClusterMap


async def _mesh(
    held: Callable[[], tuple[int, float]], newest: Callable[[], int] = lambda: 0
) -> tuple[ClusterView, ClusterMapStore]:
    control = MemoryControl(SystemClock())
    maps = ClusterMapStore(control)
    cluster = bootstrap_map(Node("n1", "http://n1"), copies=2)
    for name in ("n2", "n3"):
        cluster = join_node(cluster, Node(name, f"http://{name}"))
    for name in ("n1", "n2", "n3"):
        cluster = mark_complete(cluster, name)
    await maps.update_map(lambda _: cluster)
    return ClusterView("n1", control, lambda bucket: 0, lease_state=held, newest=newest), maps


def _key(cluster: ClusterMap, *owners: str) -> str:
    placed = compute_placement(cluster, 2)
    from meshwire.cluster.routes import slot_of

    for number in range(10_000):
        found = placed.owners_of_slot(slot_of("b", f"k{number}", cluster.slots))
        if {node.node_id for node in found} == set(owners):
            return f"k{number}"
    raise AssertionError(owners)


def _among(versions: dict[str, int | None], patience: float = 0.0) -> tuple[str, list[str]]:
    """Why there is doubt, and who was asked, about a name of n1 and n2."""
    asked: list[str] = []

    async def ask(node: Node) -> int | None:
        asked.append(node.node_id)
        return versions[node.node_id]

    async def run() -> str:
        mesh, _ = await _mesh(lambda: (0, 0.0))
        return await ReadBarrier(mesh, SystemClock(), ask).wait_until_current(
            "b", _key(mesh.current_map(), "n1", "n2"), patience
        )

    return asyncio.run(run()), asked


def test_other_owners_are_asked_and_nobody_else() -> None:
    assert _among({"n2": 1}) == ("", ["n2"])


def test_an_owner_that_is_silent_leaves_the_doubt() -> None:
    assert _among({"n2": None}) == (
        "reaches neither the control store nor n2",
        ["n2"],
    )


def test_an_owner_that_has_a_newer_map_leaves_the_doubt_until_it_is_here() -> None:
    why, asked = _among({"n2": 1 << 40})
    assert asked == ["n2"]
    assert "does not reach the control store, and n2 uses a newer cluster map" in why
    assert "nor n2" not in why  # it answered


def test_the_only_owner_that_answers_is_in_doubt_while_another_process_of_it_has_a_newer_map() -> None:
    """The owner that was away is back, and has compared with that process: it may decide by now."""

    async def run() -> None:
        newest = 0
        mesh, maps = await _mesh(lambda: (0, 0.0), lambda: newest)
        await maps.update_map(lambda cluster: mark_node_away(_known(cluster), "n2"))
        key, version = _key(mesh.current_map(), "n1", "n2"), mesh.current_map().version

        async def ask(node: Node) -> int | None:
            raise AssertionError(node)

        doubt = ReadBarrier(mesh, SystemClock(), ask)
        assert await doubt.wait_until_current("b", key) == ""
        newest = version + 1
        why = await doubt.wait_until_current("b", key, 0.0)
        assert f"another process of this node uses a newer cluster map ({version + 1})" in why
        await maps.update_map(lambda cluster: join_node(_known(cluster), Node("n2", "http://n2")))
        assert await ReadBarrier(mesh, SystemClock(), _always(version + 1)).wait_until_current("b", key) == ""

    asyncio.run(run())


def _always(version: int) -> Callable[[Node], Awaitable[int | None]]:
    async def ask(node: Node) -> int | None:
        return version

    return ask


def test_a_newer_map_that_comes_is_gone_by() -> None:
    async def run() -> None:
        mesh, maps = await _mesh(lambda: (0, 0.0))
        key, version = _key(mesh.current_map(), "n1", "n2"), mesh.current_map().version

        def grown(cluster: ClusterMap | None) -> ClusterMap:
            assert cluster is not None
            return join_node(cluster, Node("n4", "http://n4"))

        async def ask(node: Node) -> int | None:
            if mesh.current_map().version == version:
                await maps.update_map(grown)
            return version + 1

        assert await ReadBarrier(mesh, SystemClock(), ask).wait_until_current("b", key, 10.0) == ""
        assert mesh.current_map().version == version + 1

    asyncio.run(run())


def test_who_holds_its_lease_asks_nobody() -> None:
    async def run() -> None:
        mesh, _ = await _mesh(lambda: (0, 5.0))

        async def ask(node: Node) -> int | None:
            raise AssertionError(node)

        assert await ReadBarrier(mesh, SystemClock(), ask).wait_until_current("b", "k") == ""

    asyncio.run(run())


def test_those_who_wait_share_a_question_but_not_one_asked_before_they_came() -> None:
    async def run() -> None:
        mesh, _ = await _mesh(lambda: (0, 0.0))
        key, asked = _key(mesh.current_map(), "n1", "n2"), 0
        began, answer = asyncio.Event(), asyncio.Event()

        async def ask(node: Node) -> int | None:
            nonlocal asked
            asked += 1
            began.set()
            await answer.wait()
            return 1

        doubt = ReadBarrier(mesh, SystemClock(), ask)
        first = asyncio.ensure_future(doubt.wait_until_current("b", key))
        await began.wait()
        later = [asyncio.ensure_future(doubt.wait_until_current("b", key)) for _ in range(50)]
        for _ in range(10):
            await asyncio.sleep(0)
        answer.set()
        assert await first == ""
        assert await asyncio.gather(*later) == [""] * 50
        assert asked == 2

    asyncio.run(run())


def test_a_node_is_sure_while_its_lease_holds_and_it_knows_the_map_of_then() -> None:
    async def run() -> None:
        clock = ManualClock()

        def held() -> tuple[int, float]:
            version, until = shared_counters.get_lease()
            return version, until - clock.monotonic()

        mesh, maps = await _mesh(held)
        version = mesh.current_map().version
        shared_counters.set_lease(clock.monotonic() + 5.0, version)
        assert mesh.lease_remaining == 5.0
        assert mesh.lease_confirmed_version == version
        await maps.update_map(lambda cluster: join_node(_known(cluster), Node("n4", "http://n4")))
        assert mesh.lease_remaining == 5.0
        assert mesh.lease_confirmed_version == version + 1
        clock.advance(5.0)
        assert mesh.lease_remaining == 0.0
        assert mesh.lease_confirmed_version == version
        shared_counters.set_lease(clock.monotonic() + 5.0, version + 2)  # which has not come here yet
        assert mesh.lease_remaining == 0.0
        assert mesh.lease_confirmed_version == version + 1

    try:
        asyncio.run(run())
    finally:
        shared_counters.set_lease(0.0, 0)


def _known(cluster: ClusterMap | None) -> ClusterMap:
    assert cluster is not None
    return cluster


def test_a_version_beyond_what_processes_can_tell_each_other_makes_nobody_sure() -> None:
    try:
        shared_counters.set_lease(1e6, MAX_VERSION)
        assert shared_counters.get_lease() == (MAX_VERSION, 1e6)
        shared_counters.set_lease(1e6, MAX_VERSION + 1)
        assert shared_counters.get_lease() == (0, 0.0)
    finally:
        shared_counters.set_lease(0.0, 0)
