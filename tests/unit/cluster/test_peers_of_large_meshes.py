"""What a node of a large mesh asks its peers and the control store: no more than one of a small mesh."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from meshd.cluster import failure_detector, peer_checks
from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import NodeStateWriter, SuspectProbe
from meshd.cluster.peer_checks import SURVEYED_AT_ONCE, survey_peers
from meshd.control import cluster_map_store
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node, parse_map, transitions
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    import pytest

    from meshd.rpc.peer_client import PeerClient

NODES, PROCESSES = 2000, 200


def large() -> ClusterMap:
    return ClusterMap(3, tuple(Node(f"n{number:04}", f"http://n{number:04}:1") for number in range(NODES)))


class Peers:
    """Peers that accept every certificate; counts the questions, and how many wait at the same time."""

    def __init__(self) -> None:
        self.connector, self.asked = self, list[str]()
        self.waiting = self.most = 0

    async def certificate_error(self, node: Node, patience: float) -> str:
        self.asked.append(node.node_id)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.001)
        self.waiting -= 1
        return ""


async def answers(*_: object) -> Any:
    return peer_checks._Look(answers=True, ahead=0.0)


def test_a_survey_of_some_asks_others_each_time_and_one_of_all_a_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_checks, "_look_at", answers)
    clock, peers = SystemClock(), Peers()

    async def run() -> None:
        with closing(MemoryControl(clock)) as control:
            mesh = ClusterView("n0000", control, lambda _: 2, standalone_map=large())
            for _ in range(40):
                seen = await survey_peers(mesh, cast("PeerClient", peers), clock, most=64)
                assert len(seen.ahead) == 65  # and this node
            assert len(peers.asked) == 40 * 64
            assert len(set(peers.asked)) > NODES / 2
            assert "n0000" not in peers.asked
            peers.asked.clear()
            whole = await survey_peers(mesh, cast("PeerClient", peers), clock)
            assert len(whole.ahead) == NODES
            assert sorted(peers.asked) == [f"n{number:04}" for number in range(1, NODES)]
            assert peers.most <= SURVEYED_AT_ONCE

    asyncio.run(run())


async def silent(*_: object) -> int | None:
    return None


def test_many_processes_that_wait_for_a_lost_node_read_its_lease_and_write_the_map_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detector, "probe_map_version", silent)
    monkeypatch.setattr(transitions, "batch_seconds", lambda nodes: nodes / NODES * 3.0)
    # Each would parse each map on a processor of its own; here one does for all.
    monkeypatch.setattr(cluster_map_store, "parse_map", cache(parse_map))
    clock = SystemClock()

    async def run() -> None:
        with closing(MemoryControl(clock)) as control:
            maps = ClusterMapStore(control)
            before = await maps.update_map(lambda _: large())
            looks, marks = list[str](), list[str]()
            together = asyncio.Barrier(PROCESSES)

            class Writer(NodeStateWriter):
                async def is_alive(self, node_id: str) -> bool:
                    found = await super().is_alive(node_id)
                    await together.wait()  # only their pauses keep them apart
                    return found

                async def mark_away(self, silent: Any) -> None:
                    marks.extend(silent)
                    await asyncio.sleep(0.1)  # a write takes a while
                    await super().mark_away(silent)

            holders = control.lease_holders

            async def noted(prefix: str) -> Any:
                looks.append(prefix)
                return await holders(prefix)

            monkeypatch.setattr(control, "lease_holders", noted)
            views = [ClusterView(f"n{number:04}", control, lambda _: 2) for number in range(1, PROCESSES + 1)]
            probe = SuspectProbe(Writer(control, maps), clock, 5.0)
            async with asyncio.timeout(100):
                await asyncio.gather(*[probe(each, "n0000", before.version) for each in views])
            found = maps.current()
            assert found is not None
            lost = found.node("n0000")
            assert lost is not None
            assert lost.state == "away"
            assert set(looks) == {"node/n0000"}
            assert 1 <= len(marks) < 40  # those that come while the first one writes

    asyncio.run(run())


def test_a_node_that_may_be_cut_off_asks_a_few_witnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def answer(node: Node) -> int | None:
        asked.append(node.node_id)
        return None if node.node_id == "n0000" else 3

    monkeypatch.setattr(failure_detector, "probe_map_version", answer)
    clock = SystemClock()

    async def run() -> None:
        with closing(MemoryControl(clock)) as control:
            mesh = ClusterView("n0001", control, lambda _: 2, standalone_map=large())
            probe = SuspectProbe(NodeStateWriter(control, ClusterMapStore(control)), clock, 5.0)
            assert await probe._reaches(mesh, mesh.current_map().nodes[0])

    asyncio.run(run())
    assert len(asked) == 32
    assert not {"n0000", "n0001"} & set(asked)
