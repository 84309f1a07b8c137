"""A mesh whose nodes speak https with each other: data moves, a disk is lost, a certificate that ran out is
named, and renewed while nodes run."""

from __future__ import annotations

import io
import json
import os
import shutil
import ssl
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.cli.cluster import cluster
from meshsdk.errors import ConfigurationError
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

_SIZES = (900, 40_000, 300_000, 3 << 20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def mesh(place: Path) -> Iterator[DaemonCluster]:
    with DaemonCluster.start(2, place, tls=True) as found:
        found["n1"].client().create_bucket(Bucket="secret")
        yield found


@pytest.fixture(scope="module")
def bodies(mesh: DaemonCluster) -> dict[str, bytes]:
    client = mesh["n1"].client()
    found = {f"k{number}": os.urandom(_SIZES[number % 4]) for number in range(16)}
    for key, body in found.items():
        client.put_object(Bucket="secret", Key=key, Body=body)
    return found


def _env(mesh: DaemonCluster) -> dict[str, str]:
    return {
        "MESH_ENDPOINT": mesh["n1"].endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
        "MESH_CA_BUNDLE": mesh["n1"].ca_cert,
    }


def _said(mesh: DaemonCluster) -> str:
    return CliRunner().invoke(cluster, ["status"], env=_env(mesh)).output


def _node(mesh: DaemonCluster, node_id: str) -> dict[str, Any]:
    nodes = json.loads(mesh["n1"].request("GET", "/-/cluster").body)["nodes"]
    found: dict[str, Any] = next(node for node in nodes if node["id"] == node_id)
    return found


def _await(mesh: DaemonCluster, wanted: Callable[[], bool]) -> None:
    await_true(wanted, told=mesh.output)


def _await_refusal(mesh: DaemonCluster, *words: str) -> None:
    """Until n1 tells of n2's certificate, in these words. A look that a busy machine makes too long judges
    nobody, so one alone need not tell."""

    def told() -> bool:
        said = _said(mesh)
        return ": n2 cannot be reached by other nodes" in said.splitlines()[0] and all(
            each in said for each in words
        )

    _await(mesh, told)


def _is_believed(daemon: Daemon) -> bool:
    """As who verifies its certificate sees it, over a new connection."""
    try:
        return daemon.request("GET", "/-/ready").status == 200
    except ssl.SSLCertVerificationError:
        return False


def _read_everywhere(mesh: DaemonCluster, bodies: dict[str, bytes]) -> None:
    for node in mesh.nodes.values():
        client = node.client()
        for key, body in bodies.items():
            assert client.get_object(Bucket="secret", Key=key)["Body"].read() == body, key


def test_a_node_joins_and_one_is_drained(mesh: DaemonCluster, place: Path, bodies: dict[str, bytes]) -> None:
    assert all(node.endpoint.startswith("https://") for node in mesh.map_of().nodes)
    disks = [word for name in ("one", "two") for word in ("--disk", str(place / name))]
    mesh.add("n3", *disks)
    mesh.await_state("n3", "up")
    assert mesh.metric("n3", "meshd_rebalance_bytes_total") > 0
    _read_everywhere(mesh, bodies)
    done = mesh["n1"].request("POST", "/-/cluster/nodes/n2", b'{"action": "drain"}')
    assert done.status == 200, done.body
    _await(mesh, lambda: bool((_node(mesh, "n2")["drain"] or {}).get("empty")))
    _read_everywhere(mesh, bodies)
    assert mesh["n1"].request("POST", "/-/cluster/nodes/n2", b'{"action": "undrain"}').status == 200
    mesh.await_state("n2", "up")


def test_a_disk_is_lost_and_what_it_had_comes_back(
    mesh: DaemonCluster, place: Path, bodies: dict[str, bytes]
) -> None:
    _await(mesh, lambda: "all data is where it belongs" in _said(mesh))
    lost = mesh.metric("n3", "meshd_quarantined_total")
    shutil.rmtree((place / "two" / "extents").rename(place / "gone"))
    _await(mesh, lambda: mesh.metric("n3", "meshd_quarantined_total") > lost)
    _await(mesh, lambda: mesh.metric("n3", "meshd_store_quarantined") == 0)
    _read_everywhere(mesh, bodies)


def test_a_loader_takes_rows_from_their_owners(mesh: DaemonCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, client = io.BytesIO(), mesh["n1"].client()
    Image.new("RGB", (16, 16), "red").save(picture, "PNG")
    for number in range(16):
        client.put_object(Bucket="secret", Key=f"pictures/{number}.png", Body=picture.getvalue())
    monkeypatch.setenv("MESH_CA_BUNDLE", mesh["n1"].ca_cert)
    with meshsdk.connect(
        mesh["n1"].endpoint, access_key=mesh.access_key, secret_key=mesh.secret_key
    ) as connected:
        dataset = meshsdk.open("s3://secret/pictures/", fields={"image": "png"}, client=connected)
        dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", 16))
        with meshsdk.Loader(dataset, global_batch=8, seed=1, output="numpy") as loader:
            assert sum(len(batch.positions) for batch in loader) == 16
            assert loader.stats().parted == 2


def test_a_certificate_runs_out_and_is_renewed_while_nodes_run(mesh: DaemonCluster) -> None:
    """New connections to it are refused, and the status says why."""
    assert mesh.authority is not None
    mesh.authority.issue("n2", days=-1)
    _await(mesh, lambda: "the TLS certificate has expired" in mesh["n2"].output())
    _await_refusal(mesh, "n2    up", "its certificate is refused (certificate has expired): renew it")
    with pytest.raises(ConfigurationError, match=r"The node's certificate has expired: replace the files"):
        CliRunner().invoke(
            cluster,
            ["status"],
            env=_env(mesh) | {"MESH_ENDPOINT": mesh["n2"].endpoint},
            catch_exceptions=False,
        )
    mesh.authority.issue("n2")
    _await(mesh, lambda: _is_believed(mesh["n2"]))
    _await(mesh, lambda: "refused" not in _said(mesh))
    key = mesh.key_with_primary("n2", "secret")
    mesh["n1"].client().put_object(Bucket="secret", Key=key, Body=b"renewed")
    _read_everywhere(mesh, {key: b"renewed"})


def test_a_certificate_of_another_name_is_counted_before_connections_end(mesh: DaemonCluster) -> None:
    """The others look on purpose, over connections of their own."""
    assert mesh.authority is not None
    mesh.authority.issue("n2", ["elsewhere.example"])
    mesh.await_metric("n1", "meshd_cluster_certificates_refused", 1)
    _await_refusal(mesh, "IP address mismatch")
    assert "the certificate of another node is refused node=n2" in mesh["n1"].output()
    mesh.authority.issue("n2")
    _await(mesh, lambda: mesh.metric("n1", "meshd_cluster_certificates_refused") == 0)
