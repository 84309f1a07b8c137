"""Jobs whose sources are on a rotational disk of another node: which reads reach that disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.job_fixtures import done, members, objects
from tests.support.required import require_etcd
from tests.support.rotational_disk import rotational_disk
from tests.support.scattered_objects import contents, put_scattered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.rotational_disk import RotationalDisk

require_etcd()

OBJECTS, SIZE = 600, 64 << 10


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[RotationalDisk, DaemonCluster]]:
    """Two nodes with half of the objects each; those of n1 were put on the disk in no order of key."""
    with rotational_disk(tmp_path / "drive") as disk:
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(tmp_path / "index"))
        own = {"n1": where, "n2": ("--disk-type", "rotational")}
        args = ("--copies", "1", "--durability", "relaxed", "--read-ahead", "512MiB")
        with DaemonCluster.start(2, tmp_path / "mesh", own=own, args=args) as mesh:
            client = mesh["n1"].client()
            put_scattered(client, "scattered", contents(OBJECTS, SIZE))
            client.create_bucket(Bucket="packed")
            yield disk, mesh


@pytest.mark.parametrize("kind", ["shard", "materialize"])
def test_other_nodes_read_the_sources_of_a_job_in_the_order_of_their_disks(
    stored: tuple[RotationalDisk, DaemonCluster], kind: str
) -> None:
    disk, mesh = stored
    routes = [mesh.route_for("scattered", f"train/{name}", 1) for name in contents(OBJECTS, SIZE)]
    there = sum(route.read_set[0].node_id == "n1" for route in routes)
    job: dict[str, Any] = {"source": "s3://scattered/train", "count": 100, "shuffle": 3}
    if kind == "materialize":
        view = {"kind": "shards", "prefix": "train/", "count": 100, "shuffle": 3}
        request = {"bucket": "scattered", "name": "shards", "view": view}
        assert mesh["n2"].request("POST", "/-/views", json.dumps(request).encode()).status == 200
        job = {"source": "s3://scattered--shards/"}
    disk.drop_caches()
    ran = done(mesh["n2"], kind=kind, target="s3://packed/shards", **job)
    seen = disk.stats()
    assert ran["node"] == "n2"
    assert there > OBJECTS / 4
    assert there * SIZE <= seen.bytes < 1.3 * there * SIZE, seen
    assert seen.seeks < there / 8, seen
    files = members(*objects(mesh["n2"].client(), "packed", "shards/").values())
    assert files == contents(OBJECTS, SIZE)


def test_other_nodes_read_what_a_client_names_in_the_order_of_their_disks(
    stored: tuple[RotationalDisk, DaemonCluster],
) -> None:
    disk, mesh = stored
    keys = [f"train/{name}" for name in contents(OBJECTS, SIZE)]
    there = [name for name in keys if mesh.route_for("scattered", name, 1).read_set[0].node_id == "n1"]
    disk.drop_caches()
    body = json.dumps({"bucket": "scattered", "keys": keys}).encode()
    answer = mesh["n2"].request("POST", "/-/read-ahead", body)
    assert json.loads(answer.body) == {"loaded": OBJECTS}
    client = mesh["n1"].client()
    for name in there:
        client.get_object(Bucket="scattered", Key=name)["Body"].read()
    seen = disk.stats()
    assert len(there) > OBJECTS / 4
    assert len(there) * SIZE <= seen.bytes < 1.3 * len(there) * SIZE, seen
    assert seen.seeks < len(there) / 8, seen


def test_other_nodes_read_the_shards_of_a_view_in_the_order_of_their_disks(
    stored: tuple[RotationalDisk, DaemonCluster],
) -> None:
    disk, mesh = stored
    names = [f"train/{name}" for name in contents(OBJECTS, SIZE)]
    there = sum(mesh.route_for("scattered", name, 1).read_set[0].node_id == "n1" for name in names)
    view = {"kind": "shards", "prefix": "train/", "count": 50, "shuffle": 3}
    request = {"bucket": "scattered", "name": "shards", "view": view}
    assert mesh["n2"].request("POST", "/-/views", json.dumps(request).encode()).status == 200
    client = mesh["n2"].client()
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket="scattered--shards")["Contents"]]
    disk.drop_caches()
    bodies = {key: client.get_object(Bucket="scattered--shards", Key=key)["Body"].read() for key in keys}
    seen = disk.stats()
    assert members(*bodies.values()) == contents(OBJECTS, SIZE)
    assert there > OBJECTS / 4
    assert there * SIZE <= seen.bytes < 1.3 * there * SIZE, seen
    assert seen.seeks < there / 3, seen
