"""Nodes of a mesh come, go and come back: real daemons, a real etcd."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshwire.cluster import ClusterMap

require_etcd()


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3) as three:
        yield three


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _state(cluster: ClusterMap, node_id: str) -> str:
    node = cluster.node(node_id)
    return "" if node is None else node.state


def test_nodes_that_start_together_are_one_mesh(mesh: DaemonCluster) -> None:
    cluster = mesh.await_map(lambda found: not found.is_rebalancing)
    assert [node.node_id for node in cluster.nodes] == ["n1", "n2", "n3"]
    assert {node.endpoint for node in cluster.nodes} == set(mesh.endpoints.values())
    assert len({node.request("GET", "/-/whoami").body for node in mesh.nodes.values()}) == 1


def test_users_and_buckets_are_everywhere(mesh: DaemonCluster) -> None:
    mesh["n1"].client().create_bucket(Bucket="everywhere")
    for node in mesh.nodes.values():
        assert [b["Name"] for b in node.client().list_buckets()["Buckets"]] == ["everywhere"]
    mesh["n3"].client().delete_bucket(Bucket="everywhere")


def test_sessions_revoked_at_one_node_are_refused_at_all(mesh: DaemonCluster) -> None:
    def session(node_id: str) -> dict[str, str]:
        made = json.loads(mesh[node_id].request("POST", "/-/sts", b"{}").body)
        return {
            "aws_access_key_id": made["AccessKeyId"],
            "aws_secret_access_key": made["SecretAccessKey"],
            "aws_session_token": made["SessionToken"],
        }

    def refused(node_id: str, keys: dict[str, str]) -> str:
        try:
            mesh[node_id].client(**keys).list_buckets()
        except ClientError as error:
            return str(error.response["Error"]["Code"])
        return ""

    old = session("n2")
    assert [refused(name, old) for name in mesh.nodes] == [""] * 3
    assert mesh["n1"].request("DELETE", "/-/admin/users/root/sessions").status == 200
    for name in mesh.nodes:
        for _ in range(1200):
            if refused(name, old):
                break
            threading.Event().wait(0.05)
    assert [refused(name, old) for name in mesh.nodes] == ["InvalidToken"] * 3
    fresh = session("n3")
    assert [refused(name, fresh) for name in mesh.nodes] == [""] * 3


def test_a_killed_node_is_away_and_comes_back(mesh: DaemonCluster) -> None:
    mesh.kill("n2")
    since = mesh.await_state("n2", "away").node("n2")
    mesh.up("n2")
    back = mesh.await_state("n2", "up").node("n2")
    assert since is not None
    assert back is not None
    assert back.since > since.since  # when it came back
    assert back.complete >= back.since


def test_a_node_that_stood_still_is_away_and_comes_back(mesh: DaemonCluster) -> None:
    mesh.pause("n3")
    try:
        mesh.await_state("n3", "away")
    finally:
        mesh.resume("n3")
    mesh.await_state("n3", "up")


def test_a_quick_restart_is_no_absence(mesh: DaemonCluster) -> None:
    before = mesh.await_state("n1", "up").version
    mesh["n1"].kill()
    mesh.up("n1")
    cluster = mesh.map_of("n1")
    if cluster.version == before:  # it was quicker than its lease
        assert _state(cluster, "n1") == "up"
    mesh.await_state("n1", "up")


def test_two_daemons_of_one_name_are_refused(mesh: DaemonCluster, tmp_path: Path) -> None:
    before = mesh.map_of()
    args = ["--control", mesh.control, "--node-id", "n1", "--lease", "1"]
    with pytest.raises(DaemonFailedError, match="another daemon runs as n1"):
        Daemon.start(tmp_path / "n1", args=args, env=_root(mesh))
    assert mesh.map_of() == before, "what the other one has is not taken for lost"


def test_a_directory_belongs_to_one_node_of_one_mesh(mesh: DaemonCluster) -> None:
    mesh.stop("n2")
    place = mesh["n2"].data_dir
    args = ["--control", mesh.control, "--node-id", "n9"]
    with pytest.raises(DaemonFailedError, match="belongs to node n2; start it with --node-id n2"):
        Daemon.start(place, args=args, env=_root(mesh))
    with pytest.raises(DaemonFailedError, match="start it with its previous --control"):
        Daemon.start(place)
    mesh.up("n2")
    mesh.await_state("n2", "up")


def test_a_node_that_had_objects_of_its_own_is_refused(mesh: DaemonCluster, tmp_path: Path) -> None:
    Daemon.start(tmp_path / "own").close()
    args = ["--control", mesh.control, "--node-id", "n8"]
    with pytest.raises(DaemonFailedError, match="holds objects of a node without a mesh"):
        Daemon.start(tmp_path / "own", args=args, env=_root(mesh))


def _root(mesh: DaemonCluster) -> dict[str, str]:
    return {"MESHD_ROOT_ACCESS_KEY": mesh.access_key, "MESHD_ROOT_SECRET_KEY": mesh.secret_key}
