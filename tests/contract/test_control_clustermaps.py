"""The map in the control store: two sides never both change it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.control.clustermaps import ClusterMaps
from meshd.control.embedded import EmbeddedControl
from meshd.control.memory import MemoryControl
from meshd.kit.clock import ManualClock
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.control.interface import ControlStore
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
            return turn.founded(node(number)) if present is None else turn.joined(present, node(number))

        await ClusterMaps(control).change(change)

    async def everybody() -> None:
        await asyncio.gather(*[join(number) for number in range(12)])

    asyncio.run(everybody())
    found = ClusterMaps(control).current()
    assert found is not None
    assert [n.node_id for n in found.nodes] == [f"n{number:02d}" for number in range(12)]
    assert found.version == 12, "each change is one version"


def test_a_change_that_raises_writes_nothing(control: ControlStore) -> None:
    maps = ClusterMaps(control)
    assert maps.current() is None
    asyncio.run(maps.change(lambda _: turn.founded(node(0))))

    def refuse(present: ClusterMap | None) -> ClusterMap:
        assert present is not None
        return turn.drained(present, "n00")

    with pytest.raises(turn.TransitionError):
        asyncio.run(maps.change(refuse))
    found = maps.current()
    assert found is not None
    assert found.version == 1
    assert maps.current() is found, "parsed once"
