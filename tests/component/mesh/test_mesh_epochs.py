"""Epochs on real daemons while nodes die, come back and join: every step as if nothing had happened."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.faults.epochs import BATCH, References, Trainer, connect, epoch, fill
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

require_etcd()

SAMPLES = 120
STEPS = -(-SAMPLES // BATCH)


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, args=("--frame-cache", "1MiB")) as three:  # room for one: they are made anew
        with connect(list(three.endpoints.values()), (three.access_key, three.secret_key)) as client:
            fill(client, SAMPLES)
        yield three


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


@pytest.fixture(scope="module")
def expected(started: DaemonCluster) -> list[str]:
    """Of a mesh nothing happens to."""
    found = list(epoch([started["n1"].endpoint], keys(started), 5))
    assert len(set(found)) == STEPS
    return found


def keys(mesh: DaemonCluster) -> tuple[str, str]:
    return mesh.access_key, mesh.secret_key


def run(mesh: DaemonCluster, events: Mapping[int, Callable[[], object]], *endpoints: str) -> list[str]:
    """An epoch through these nodes; before a step something happens."""
    found = []
    for step, digest in enumerate(epoch(endpoints, keys(mesh), 5)):
        found.append(digest)
        if step + 1 in events:
            events[step + 1]()
    return found


def test_the_control_store_lost_in_mid_epoch(mesh: DaemonCluster, expected: list[str]) -> None:
    events: dict[int, Callable[[], object]] = {
        3: lambda: mesh.etcd.signal_member(0, signal.SIGSTOP),
        12: lambda: mesh.etcd.signal_member(0, signal.SIGCONT),
    }
    try:
        assert run(mesh, events, mesh["n1"].endpoint) == expected
    finally:
        mesh.etcd.signal_member(0, signal.SIGCONT)


def test_a_node_is_killed_and_comes_back_and_another_joins_in_mid_epoch(
    mesh: DaemonCluster, expected: list[str]
) -> None:
    def back() -> None:
        mesh.await_state("n1", "away")
        mesh.up("n1")

    new = f"n{len(mesh.nodes) + 1}"
    trainer = Trainer([mesh["n2"].endpoint], keys(mesh))
    trainer.start()
    try:
        events: dict[int, Callable[[], object]] = {
            3: lambda: mesh.kill("n1"),
            7: back,
            10: lambda: mesh.add(new),
        }
        assert run(mesh, events, mesh["n1"].endpoint) == expected
    finally:
        trainer.stop()
    assert trainer.steps
    assert trainer.check(References([mesh[new].endpoint], keys(mesh))) == []
    assert list(epoch([mesh[new].endpoint], keys(mesh), 5)) == expected


def test_a_node_is_drained_in_mid_epoch(mesh: DaemonCluster, expected: list[str]) -> None:
    def drain() -> None:
        answer = mesh["n3"].request("POST", "/-/cluster/nodes/n2", b'{"action": "drain"}')
        assert answer.status == 200, answer.body

    assert run(mesh, {3: drain}, mesh["n2"].endpoint) == expected
    mesh.await_map(lambda found: not found.is_rebalancing)
    mesh.kill("n2")
    assert list(epoch([mesh["n3"].endpoint], keys(mesh), 5)) == expected
