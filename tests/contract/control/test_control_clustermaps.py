"""The map in the control store: two sides never both change it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.control.cluster_map_store import ClusterMapStore, StoreChangedError
from meshd.control.embedded import EmbeddedControl
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.control.control_api import ControlStore
    from meshwire.cluster import ClusterMap


@pytest.fixture(params=["memory", "embedded"])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlStore]:
    if request.param == "memory":
        yield MemoryControl(ManualClock())
        return
    with closing(EmbeddedControl(tmp_path, ManualClock())) as store:
        yield store


def node(number: int) -> Node:
    return Node(f"n{number:02d}", f"http://10.0.0.{number}:9000")


def test_everybody_who_joins_at_once_is_in_the_map(control: ControlStore) -> None:
    async def join(number: int) -> None:
        def change(present: ClusterMap | None) -> ClusterMap:
            return (
                turn.bootstrap_map(node(number)) if present is None else turn.join_node(present, node(number))
            )

        await ClusterMapStore(control).update_map(change)

    async def everybody() -> None:
        await asyncio.gather(*[join(number) for number in range(12)])

    asyncio.run(everybody())
    found = ClusterMapStore(control).current()
    assert found is not None
    assert [n.node_id for n in found.nodes] == [f"n{number:02d}" for number in range(12)]
    assert found.version == 12, "each change is one version"


def test_an_older_map_in_the_store_is_replaced_by_the_newest_known(control: ControlStore) -> None:
    async def put_back() -> ClusterMap:
        maps = ClusterMapStore(control)
        await control.put("mesh/id", b"1")
        await maps.update_map(lambda _: turn.bootstrap_map(node(0)))
        entry = await control.get("cluster/map")
        assert entry is not None
        grown = await maps.update_map(
            lambda present: turn.join_node(present or turn.bootstrap_map(node(0)), node(1))
        )
        assert maps.current() == grown
        await control.put("cluster/map", entry.value)
        assert maps.current() == grown, "nobody goes back behind what was seen"
        assert await maps.fetch_version() == grown.version + 1
        maps.current()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("meshd.control.cluster_map_store.parse_map", None)  # the map is known
            assert await maps.fetch_version() == grown.version + 1
        found = ClusterMapStore(control).current()
        assert found is not None
        assert found.nodes == grown.nodes
        return found

    async def lose() -> None:
        maps, found = ClusterMapStore(control), await put_back()
        assert maps.current() == found
        for key in ("cluster/map", "mesh/id"):
            await control.delete(key)
        with pytest.raises(StoreChangedError, match="from its backup"):
            await maps.fetch_version()
        with pytest.raises(StoreChangedError):
            await maps.update_map(lambda _: turn.bootstrap_map(node(1)))
        assert maps.current() == found
        assert await control.get("cluster/map") is None

    asyncio.run(lose())


def test_a_change_that_raises_writes_nothing(control: ControlStore) -> None:
    maps = ClusterMapStore(control)
    assert maps.current() is None
    asyncio.run(maps.update_map(lambda _: turn.bootstrap_map(node(0))))

    def refuse(present: ClusterMap | None) -> ClusterMap:
        assert present is not None
        return turn.drain_node(present, "n00")

    with pytest.raises(turn.TransitionError):
        asyncio.run(maps.update_map(refuse))
    found = maps.current()
    assert found is not None
    assert found.version == 1
    assert maps.current() is found, "parsed once"
