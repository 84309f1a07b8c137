"""Nodes join, leave, die, return and lose their disks while clients write and read: real daemons, a real
etcd.

Law: the mesh is one for all tests, for starting one takes longer than most of them; each begins when all
nodes that there are, three or more, are up and settled, whatever another test, or a try of its own, left.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from meshd.util.shared_counters import NICE_FAILPOINT
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import FAILPOINTS
from tests.support.mesh_traffic import Traffic
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwire.cluster import ClusterMap

require_etcd()

BUCKET, VERSIONED = "moved", "moved-versions"
DOWN_AFTER = 6


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    memory = Path("/dev/shm")  # movement is what is tested, not the disk
    place = Path(tempfile.mkdtemp(prefix="moved-", dir=memory if memory.is_dir() else None))
    try:
        with DaemonCluster.start(3, place, args=("--down-after", str(DOWN_AFTER)), lease=4.0) as three:
            for bucket in (BUCKET, VERSIONED):
                three["n1"].client().create_bucket(Bucket=bucket)
            yield three
    finally:
        shutil.rmtree(place, ignore_errors=True)


def settled(cluster: ClusterMap) -> bool:
    return not cluster.is_rebalancing and all(node.state in ("up", "down") for node in cluster.nodes)


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    """All nodes up, as heavy as each other, without failpoints, and settled."""
    for node_id, node in started.nodes.items():
        if node.env.pop(FAILPOINTS, None) and node.running:
            started.stop(node_id)
        if not node.running:
            started.up(node_id)
    for found in started.map_of("n1").nodes:
        if found.leaving or found.state == "draining":
            change(started, found.node_id, "undrain")
        if found.weight != 1:
            change(started, found.node_id, "reweigh", weight=1)
    started.await_map(lambda cluster: settled(cluster) and {node.state for node in cluster.nodes} == {"up"})
    return started


def others(mesh: DaemonCluster, node_id: str) -> list[str]:
    return [name for name in mesh.nodes if name != node_id]


def new_nodes(mesh: DaemonCluster, count: int) -> list[str]:
    """Names that no node has had."""
    return [f"n{len(mesh.nodes) + number}" for number in range(1, count + 1)]


def status(mesh: DaemonCluster, asked: str = "n1") -> dict[str, Any]:
    answer = mesh[asked].request("GET", "/-/cluster")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def change(mesh: DaemonCluster, node_id: str, action: str, **more: Any) -> None:
    body = json.dumps({"action": action, **more}).encode()
    answer = mesh["n1"].request("POST", f"/-/cluster/nodes/{node_id}", body)
    assert answer.status == 200, answer.body


def await_drained(mesh: DaemonCluster, node_id: str) -> dict[str, Any]:
    """What is told of it when it is empty."""
    for _ in range(600):
        row = next(row for row in status(mesh)["nodes"] if row["id"] == node_id)
        drain: dict[str, Any] = row["drain"] or {"empty": False}
        if drain["empty"]:
            return drain
        threading.Event().wait(0.1)
    raise AssertionError(f"{node_id} is not empty: {row}\n{mesh.output()}")


def await_rebalancer(mesh: DaemonCluster, node_id: str, *, there: bool) -> int:
    """The process id of the node's rebalancer; 0 when it is gone."""
    for _ in range(1200):
        found = mesh[node_id].children().get("rebalancer-0", 0)
        if bool(found) == there:
            return found
        threading.Event().wait(0.05)
    raise AssertionError(f"rebalancer of {node_id}: {found}\n{mesh.output()}")


def test_two_nodes_join_at_once_one_drains_one_weighs_more(mesh: DaemonCluster) -> None:
    new = new_nodes(mesh, 2)
    count = len(mesh.nodes) + len(new)
    with Traffic(mesh, BUCKET) as traffic:
        with traffic.unrefused():
            with ThreadPoolExecutor(2) as pool:
                assert len(list(pool.map(mesh.add, new))) == 2
            cluster = mesh.await_map(lambda found: len(found.nodes) == count and settled(found))
            assert {node.state for node in cluster.nodes} == {"up"}
            moved = status(mesh)["movement"]
            assert moved["takers"] == []
            assert moved["bytes_moved"] == moved["bytes_total"] > 0
            traffic.asked = list(mesh.nodes)
            change(mesh, new[1], "drain")
            change(mesh, "n1", "reweigh", weight=3)
            drain = await_drained(mesh, new[1])
            assert (drain["owns"], drain["names"]) == (False, 0)
            assert drain["bytes_moved"] > 0
        traffic.check()
        with traffic.unrefused():
            change(mesh, new[1], "undrain")
            change(mesh, "n1", "reweigh", weight=1)
            mesh.await_map(settled)
        traffic.check()


def test_a_node_that_was_killed_learns_what_it_missed(mesh: DaemonCluster) -> None:
    client, run = mesh["n1"].client(), secrets.token_hex(4)
    v, gone, u = ([f"{run}/{kind}/{number}" for number in range(20)] for kind in ("v", "gone", "u"))
    client.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
    first = [client.put_object(Bucket=VERSIONED, Key=key, Body=b"1")["VersionId"] for key in v]
    for key in gone:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    with Traffic(mesh, BUCKET, seed=2) as traffic:
        traffic.asked = others(mesh, "n3")
        mesh.kill("n3")
        mesh.await_state("n3", "away", "down")
        for number in range(20):
            client.delete_object(Bucket=BUCKET, Key=gone[number])
            client.delete_object(Bucket=VERSIONED, Key=v[number], VersionId=first[number])
            client.put_object(Bucket=VERSIONED, Key=v[number], Body=b"2", Tagging="a=b")
        uploads = {key: client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"] for key in u[:5]}
        for key, upload in uploads.items():
            client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"part" * 1000)
        mesh.up("n3")
        mesh.await_map(settled)
        traffic.check()
    back = mesh["n3"].client()
    for key, upload in uploads.items():
        parts = back.list_parts(Bucket=BUCKET, Key=key, UploadId=upload)["Parts"]
        wanted = {"Parts": [{"ETag": part["ETag"], "PartNumber": part["PartNumber"]} for part in parts]}
        back.complete_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload=wanted)
        assert back.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"part" * 1000
    for key in v:
        assert back.get_object(Bucket=VERSIONED, Key=key)["Body"].read() == b"2"
        assert back.get_object_tagging(Bucket=VERSIONED, Key=key)["TagSet"]
    versions = back.list_object_versions(Bucket=VERSIONED, Prefix=f"{run}/")["Versions"]
    assert {version["VersionId"] for version in versions}.isdisjoint(first)
    listed = {entry["Key"] for entry in back.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert listed >= {*uploads, *traffic.present()}
    assert listed.isdisjoint(gone)


def test_what_a_dead_node_had_is_copied_anew_and_it_returns_without_what_was_deleted(
    mesh: DaemonCluster,
) -> None:
    with Traffic(mesh, BUCKET, seed=3) as traffic:
        traffic.asked = others(mesh, "n2")
        mesh.kill("n2")
        cluster = mesh.await_map(lambda found: settled(found) and "down" in {n.state for n in found.nodes})
        assert [node.node_id for node in cluster.nodes if node.state == "down"] == ["n2"]
        traffic.check(*traffic.asked)
        with traffic.unrefused():
            mesh.up("n2")
            mesh.await_state("n2", "up")
            mesh.await_map(settled)
        traffic.check()


@pytest.mark.parametrize("what", ["all of it", "all but whose it is"])
def test_a_node_that_lost_its_disk_never_says_that_nothing_is_there(mesh: DaemonCluster, what: str) -> None:
    with Traffic(mesh, BUCKET, seed=4) as traffic:
        traffic.asked = others(mesh, "n2")
        mesh.kill("n2")
        belongs = (mesh["n2"].data_dir / "cluster.json").read_bytes()
        mesh.remove_data("n2")
        if what == "all but whose it is":
            mesh["n2"].data_dir.mkdir()
            (mesh["n2"].data_dir / "cluster.json").write_bytes(belongs)
        mesh.up("n2")
        traffic.check("n2")
        mesh.await_map(settled)
        traffic.check()


def test_a_rebalancer_that_is_killed_again_and_again_gets_there(mesh: DaemonCluster) -> None:
    [new] = new_nodes(mesh, 1)
    count = len(mesh.nodes) + 1
    with Traffic(mesh, BUCKET, keys=80, seed=5) as traffic:
        mesh.add(new, env={FAILPOINTS: "moves.entered=kill:after 12"})
        cluster = mesh.await_map(lambda found: len(found.nodes) == count and settled(found))
        assert {node.state for node in cluster.nodes} == {"up"}
        traffic.check("n1", new)
    assert mesh[new].output().count("rebalancer-0 ended") > 0
    assert (
        "worker-0 ended" not in mesh[new].output()
    )  # it waits behind its door, and the coordinator asks again


def test_the_process_that_moves_ends_with_its_work_and_comes_back_for_more(mesh: DaemonCluster) -> None:
    await_rebalancer(mesh, "n1", there=False)
    mesh.stop("n1")
    mesh["n1"].env[FAILPOINTS] = f"{NICE_FAILPOINT}=sleep(0)"  # as where nobody tests
    mesh.up("n1")
    client = mesh["n1"].client()
    for number in range(40):
        client.put_object(Bucket=BUCKET, Key=f"kept/{number}", Body=b"x" * 1000)
    await_rebalancer(mesh, "n1", there=False)
    assert "rebalancer-0 ended" not in mesh["n1"].output()  # nobody ended it
    change(mesh, "n1", "reweigh", weight=2)
    rebalancer, ordinary = psutil.Process(await_rebalancer(mesh, "n1", there=True)), psutil.Process().nice()
    while rebalancer.nice() <= min(ordinary, 18):  # it gives way from when it has opened its store
        threading.Event().wait(0.05)  # NoSuchProcess, should it end as it is
    mesh.await_map(settled)
