"""A process that stood still does not take other nodes for silent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from meshd.cluster import failure_detector, peer_checks
from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.cluster.node_lease import node_lease_name
from meshd.control.cluster_map_store import ClusterMapStore
from meshwire.cluster import ClusterMap, Node
from tests.support.bounded_wait import await_end
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT = 0.6


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_that_came_while_this_process_stood_still_counts(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(peer_checks, "PROBE_TIMEOUT", _TIMEOUT)

    def serve(listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            connection.recv(1000)
            loop.call_soon_threadsafe(time.sleep, 2 * _TIMEOUT)
            time.sleep(_TIMEOUT / 4)
            if answers:
                connection.sendall(b"HTTP/1.1 200 OK\r\nx-mesh-map: 7\r\n\r\n")
            else:
                connection.recv(1000)  # until the probe is given up

    async def probe(listener: socket.socket) -> int | None:
        helper = threading.Thread(target=serve, args=(listener, asyncio.get_running_loop()))
        helper.start()
        node = Node("n2", f"http://127.0.0.1:{listener.getsockname()[1]}")
        version = await asyncio.wait_for(peer_checks.probe_map_version(node), 30)
        await asyncio.to_thread(await_end, helper)
        return version

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        assert asyncio.run(probe(listener)) == (7 if answers else None)


def test_a_node_that_renews_its_lease_during_its_probe_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []

    class Writer(NodeStateWriter):
        async def mark_away(self, silent: Mapping[str, int]) -> None:
            marked.extend(silent)

    async def check() -> None:
        clock = ManualClock()
        control = MemoryControl(clock)
        cluster = ClusterMap(3, tuple(Node(name, f"http://{name}:1") for name in ("n1", "n2", "n3")))
        mesh = ClusterView("n1", control, lambda _: 2, standalone_map=cluster)
        writer = Writer(control, ClusterMapStore(control))
        detector = FailureDetector(mesh, control, writer, lambda: 2, clock, ttl=1.0, down_after=900.0)

        async def probe(node: Node) -> None:
            if node.node_id == "n2":
                await control.acquire_lease(node_lease_name("n2"), "n2", 1.0)

        monkeypatch.setattr(failure_detector, "probe_map_version", probe)
        await detector.check_nodes()

    asyncio.run(check())
    assert marked == ["n3"]
