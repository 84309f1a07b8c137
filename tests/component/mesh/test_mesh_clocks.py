"""A node whose clock is wrong: told by `mesh cluster status` of any node, by its own metrics, by logs, and in
the responses to requests that nodes refuse each other."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from meshd.util.clock import CLOCK_SHIFT_ENV, SystemClock, write_clock_shift
from meshsdk.cli.cluster import cluster
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

require_etcd()
_AHEAD = 420.0
_PATIENCE = 14.0
"""Seconds: less than requests wait for a node that may return."""
_clock = SystemClock()


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clock") / "n3"


@pytest.fixture(scope="module")
def mesh(clock: Path) -> Iterator[DaemonCluster]:
    write_clock_shift(clock, 0.0)
    with DaemonCluster.start(2) as found:
        found.add("n3", env={CLOCK_SHIFT_ENV: str(clock)})
        found.await_state("n3", "up")
        assert found["n1"].request("PUT", "/bucket").status == 200
        yield found


def _status(mesh: DaemonCluster, asked: str, *words: str) -> str:
    env = {
        "MESH_ENDPOINT": mesh[asked].endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
    }
    done = CliRunner().invoke(cluster, ["status", *words], env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _ahead(mesh: DaemonCluster, asked: str) -> dict[str, int | None]:
    found: dict[str, Any] = json.loads(_status(mesh, asked, "--json"))
    assert found["clocks_agree"]
    return {node["id"]: node["clock_ahead"] for node in found["nodes"]}


def _has_logged(node: Daemon, text: str) -> bool:
    return text in node.output()


@pytest.mark.parametrize("asked", ["n1", "n3"])
def test_the_wrong_one_is_named_whoever_is_asked(mesh: DaemonCluster, clock: Path, asked: str) -> None:
    assert "clock" not in _status(mesh, asked)
    write_clock_shift(clock, _AHEAD)
    try:
        lines = _status(mesh, asked).splitlines()
        assert lines[0].endswith(": n3's clock is 7 min ahead")
        told = next(line for line in lines if line.startswith("n3"))
        assert "its clock is 7 min ahead: set it (chronyc makestep)" in told
        ahead = _ahead(mesh, asked)
        assert ahead == {"n1": pytest.approx(0, abs=2), "n2": pytest.approx(0, abs=2), "n3": ahead["n3"]}
        assert ahead["n3"] == pytest.approx(_AHEAD, abs=2)
    finally:
        write_clock_shift(clock, 0.0)
    assert "clock" not in _status(mesh, asked)


def test_its_own_metric_tells_so(mesh: DaemonCluster, clock: Path) -> None:
    write_clock_shift(clock, _AHEAD)
    try:
        mesh.await_metric("n3", "meshd_cluster_clock_ahead_seconds", _AHEAD - 2)
        # What it has measured while the machine stood still is corrected a moment later.
        await_true(lambda: abs(mesh.metric("n1", "meshd_cluster_clock_ahead_seconds")) <= 2)
    finally:
        write_clock_shift(clock, 0.0)


def test_what_is_refused_for_the_clock_says_which_node(mesh: DaemonCluster, clock: Path) -> None:
    """A write that is forwarded, keys that are deleted together, and the log of a node that forwards."""
    key = mesh.key_with_primary("n3", "bucket")
    assert mesh["n1"].request("PUT", f"/bucket/{key}", b"x").status == 200
    deletion = f"<Delete><Object><Key>{key}</Key></Object></Delete>".encode()
    skew = b"the clock of node n3 is 7 min ahead of that of node n1"
    logged = "the clock of node n3 is 4"
    write_clock_shift(clock, _AHEAD)
    try:
        for answer in (
            mesh["n1"].request("PUT", f"/bucket/{key}", b"y"),
            mesh["n1"].request("POST", "/bucket?delete", deletion),
        ):
            assert (answer.status, skew in answer.body) == (503, True), answer.body
        for node in (mesh["n1"], mesh["n3"]):
            await_true(partial(_has_logged, node, logged), 60, told=node.output)
    finally:
        write_clock_shift(clock, 0.0)


def test_a_write_that_a_replica_refuses_for_its_clock_says_which_node(
    mesh: DaemonCluster, clock: Path
) -> None:
    def held_by(key: str) -> set[str]:
        return {node.node_id for node in mesh.route_for("bucket", key).write_set}

    keys = (mesh.key_with_primary("n1", "bucket", f"replicated-{number}") for number in range(100))
    key = next(key for key in keys if "n3" in held_by(key))
    deletion = f"<Delete><Object><Key>{key}</Key></Object></Delete>".encode()
    assert mesh["n1"].request("PUT", f"/bucket/{key}", b"x").status == 200
    write_clock_shift(clock, -3 * _AHEAD)
    try:
        for asked in ("n1", "n2"):
            began = _clock.monotonic()
            for answer in (
                mesh[asked].request("POST", "/bucket?delete", deletion),
                mesh[asked].request("PUT", f"/bucket/{key}", b"y"),
            ):
                assert answer.status == 503
                assert b"the clock of node n3 is 21 min behind that of node n1" in answer.body, answer.body
            assert _clock.monotonic() - began < _PATIENCE, "waiting sets no clock"
    finally:
        write_clock_shift(clock, 0.0)


def test_a_listing_does_not_wait_for_a_clock(mesh: DaemonCluster, clock: Path) -> None:
    write_clock_shift(clock, -3 * _AHEAD)
    try:
        began = _clock.monotonic()
        answer = mesh["n1"].request("GET", "/bucket?list-type=2")
        assert answer.status == 503
        assert b"the clock of node n3 is 21 min behind that of node n1" in answer.body, answer.body
        assert _clock.monotonic() - began < _PATIENCE
    finally:
        write_clock_shift(clock, 0.0)
