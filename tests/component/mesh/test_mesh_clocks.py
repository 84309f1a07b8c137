"""A node whose clock is wrong: told by `mesh cluster status` of any node, and by its own metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from meshd.util.clock import CLOCK_SHIFT_ENV, write_clock_shift
from meshsdk.cli.cluster import cluster
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_etcd()
_AHEAD = 420.0


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clock") / "n3"


@pytest.fixture(scope="module")
def mesh(clock: Path) -> Iterator[DaemonCluster]:
    write_clock_shift(clock, 0.0)
    with DaemonCluster.start(2) as found:
        found.add("n3", env={CLOCK_SHIFT_ENV: str(clock)})
        found.await_state("n3", "up")
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
