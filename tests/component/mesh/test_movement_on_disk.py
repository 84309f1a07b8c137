"""Movement of data from a rotational disk: which reads reach the disk, counted below the file system."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd
from tests.support.rotational_disk import rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rotational_disk import ReadLog, RotationalDisk

require_etcd()

OBJECTS, SIZE = 600, 64 << 10
BUCKET = "scattered"


def body(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def key(number: int) -> str:
    return f"train/{number:05d}.bin"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path_factory.mktemp("drive")) as made:
        yield made


@pytest.fixture(scope="module")
def mesh(disk: RotationalDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """A node whose data files are on the disk; four writers put objects there in no order of key."""
    folder = tmp_path_factory.mktemp("mesh")
    where = ("--disk", str(disk.path / "data"), "--index-dir", str(folder / "index"))
    relaxed = ("--durability", "relaxed")
    with DaemonCluster.start(1, folder, own={"n1": where}, workers=2, args=relaxed) as one:
        client = one["n1"].client()
        client.create_bucket(Bucket=BUCKET)

        def put(number: int) -> None:
            client.put_object(Bucket=BUCKET, Key=key(number), Body=body(number))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, random.Random(1).sample(range(OBJECTS), OBJECTS)))
        yield one


def moved(mesh: DaemonCluster, disk: RotationalDisk, node_id: str) -> ReadLog:
    """Wait until a node has all data; return the reads of the disk until then."""
    mesh.await_map(
        lambda cluster: not cluster.is_rebalancing and all(node.state == "up" for node in cluster.nodes)
    )
    assert mesh.metric(node_id, "meshd_rebalance_applied_total") >= OBJECTS
    return disk.stats()


def require_in_disk_order(seen: ReadLog) -> None:
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 20, seen
    assert seen.seek_s < seen.media_s, seen


def test_a_node_that_joins_is_filled_in_the_order_of_the_disk(
    mesh: DaemonCluster, disk: RotationalDisk
) -> None:
    disk.drop_caches()
    mesh.add("n2")
    require_in_disk_order(moved(mesh, disk, "n2"))


def test_lost_copies_are_restored_in_the_order_of_the_disk(mesh: DaemonCluster, disk: RotationalDisk) -> None:
    mesh.stop("n2")
    mesh.remove_data("n2")
    disk.drop_caches()
    mesh.up("n2")
    require_in_disk_order(moved(mesh, disk, "n2"))
    client = mesh["n2"].client()
    mesh.kill("n1")
    mesh.await_state("n1", "away", "down")
    for number in range(0, OBJECTS, 60):
        assert client.get_object(Bucket=BUCKET, Key=key(number))["Body"].read() == body(number)
