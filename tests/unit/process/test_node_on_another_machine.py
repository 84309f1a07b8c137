"""A node that something started on a machine without its directory: it waits to be moved, for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.cluster.data_dir_identity import establish_identity, recorded_machine
from meshd.config import load_settings
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.process import join_cluster
from meshwire.cluster import Node, transitions
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from meshd.config import NodeSettings

WAIT = join_cluster._wait_while_elsewhere


def settings(place: Path, machine: str) -> NodeSettings:
    place.mkdir(exist_ok=True)
    flags = {"data-dir": str(place), "node-id": "n1", "control": "etcd://127.0.0.1:1", "machine": machine}
    return load_settings(flags, env={})


async def recorded(place: Path, machine: str) -> MemoryControl:
    """A mesh whose node n1 ran on a machine."""
    control = MemoryControl(ManualClock())
    await establish_identity(control, ClusterMapStore(control), settings(place, machine), 2)
    found = transitions.bootstrap_map(Node("n1", "http://n1:1"))
    found = transitions.join_node(found, Node("n2", "http://n2:1"))
    await control.put("cluster/map", found.to_json())
    return control


def test_a_node_records_the_machine_of_its_directory(tmp_path: Path) -> None:
    async def run() -> None:
        control = await recorded(tmp_path / "a", "k1")
        assert await recorded_machine(control, "n1") == "k1"
        assert await recorded_machine(control, "n2") == ""

    asyncio.run(run())


def test_a_node_on_another_machine_waits_until_that_one_is_forgotten_or_it_is_given_up(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        control = await recorded(tmp_path / "a", "k1")
        task = asyncio.create_task(WAIT(control, settings(tmp_path / "b", "k2")))
        await asyncio.sleep(0.3)
        assert not task.done()
        await control.put("machines/n1", b'{"machine":""}')
        await asyncio.wait_for(task, 10)
        await control.put("machines/n1", b'{"machine":"k1"}')
        found = ClusterMapStore(control).current()
        assert found is not None
        await control.put("cluster/map", transitions.mark_node_down(found, "n1").to_json())
        await asyncio.wait_for(WAIT(control, settings(tmp_path / "b", "k2")), 10)

    asyncio.run(run())


def test_a_node_with_its_directory_or_without_a_machine_waits_for_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        control = await recorded(tmp_path / "a", "k1")
        await asyncio.wait_for(WAIT(control, settings(tmp_path / "a", "k2")), 10)  # the disk was moved
        await asyncio.wait_for(WAIT(control, settings(tmp_path / "b", "k1")), 10)  # and emptied
        await asyncio.wait_for(WAIT(control, settings(tmp_path / "b", "")), 10)

    asyncio.run(run())


def test_a_node_that_nobody_moves_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_cluster, "_ELSEWHERE_S", 0.2)

    async def run() -> None:
        control = await recorded(tmp_path / "a", "k1")
        await asyncio.wait_for(WAIT(control, settings(tmp_path / "b", "k2")), 10)

    asyncio.run(run())
