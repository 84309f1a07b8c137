"""A node that starts on another directory than it ran on last, or on an older image of it: real daemons."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.interpreters import program
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_etcd()

BUCKET = "things"
NODE = "n2"


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3) as three:
        three["n1"].client().create_bucket(Bucket=BUCKET)
        yield three


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def image(mesh: DaemonCluster, place: Path) -> Path:
    """A copy of what n2, which does not run, has now."""
    shutil.copytree(mesh[NODE].data_dir, place, ignore=lambda _, names: {"run"} & set(names))
    return place


def put(mesh: DaemonCluster, prefix: str, body: bytes) -> list[str]:
    keys = [mesh.key_with_primary(NODE, BUCKET, f"{prefix}{number}") for number in range(5)]
    for key in keys:
        mesh["n1"].client().put_object(Bucket=BUCKET, Key=key, Body=body)
    return keys


def agree(mesh: DaemonCluster, keys: list[str], body: bytes) -> None:
    for node in mesh.nodes.values():
        if node.running:
            said = [node.client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys]
            assert said == [body] * len(keys)


def test_a_directory_whose_name_another_has_by_now(mesh: DaemonCluster, tmp_path: Path) -> None:
    """Its machine was repaired, and tries to start as long as the one in its place runs: that stops, and has
    its turn."""
    keys = put(mesh, "named", b"old")
    mesh.kill(NODE)
    mesh.await_state(NODE, "away")
    former = image(mesh, tmp_path / "former")
    answer = mesh["n1"].request(
        "POST", f"/-/cluster/nodes/{NODE}", json.dumps({"action": "replace"}).encode()
    )
    assert answer.status == 200
    mesh.remove_data(NODE)
    mesh.up(NODE)
    mesh.await_healthy()
    for key in keys:
        mesh["n1"].client().put_object(Bucket=BUCKET, Key=key, Body=b"new")
    again = Daemon(former, mesh[NODE].args, mesh[NODE].env, 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(again.up)
            mesh.stop(NODE)
            starting.result(60)
        for _ in range(10):
            agree(mesh, keys, b"new")
            threading.Event().wait(0.1)
        mesh.await_state(NODE, "up")
        agree(mesh, keys, b"new")
        assert again.client().get_object(Bucket=BUCKET, Key=keys[0])["Body"].read() == b"new"
        assert "is not the directory that n2 last ran on" in again.output()
    finally:
        again.kill()
        again.close()


def test_an_older_image_is_compared_where_others_have_what_it_lacks(
    mesh: DaemonCluster, tmp_path: Path
) -> None:
    mesh.stop(NODE)
    older = image(mesh, tmp_path / "older")
    mesh.up(NODE)
    mesh.await_healthy()
    keys = put(mesh, "imaged", b"new")
    mesh.stop(NODE)
    mesh.await_state(NODE, "away")  # else the map may say that it went last, and all wait for it
    mesh.remove_data(NODE)
    shutil.copytree(older, mesh[NODE].data_dir)
    mesh["n1"].kill()
    mesh.await_state("n1", "away")
    with pytest.raises(DaemonFailedError, match="is an older image of that directory: start it"):
        mesh.up(NODE)
    mesh.up("n1")
    mesh.await_state("n1", "up")
    mesh.up(NODE)
    agree(mesh, keys, b"new")
    mesh.await_state(NODE, "up")
    agree(mesh, keys, b"new")
    mesh.stop(NODE)
    mesh.up(NODE)
    assert mesh[NODE].output().count("is an older image of that directory: comparing it") == 1


def test_an_older_image_is_all_there_is(mesh: DaemonCluster, tmp_path: Path) -> None:
    keys = put(mesh, "last", b"kept")
    mesh.stop(NODE)
    older = image(mesh, tmp_path / "older")
    mesh.up(NODE)
    mesh.await_healthy()
    mesh.kill("n1")
    mesh.await_state("n1", "away")
    mesh.stop(NODE)  # it went last: what it has is what there is
    mesh.await_state(NODE, "away")
    mesh.remove_data(NODE)
    shutil.copytree(older, mesh[NODE].data_dir)
    with pytest.raises(DaemonFailedError, match="start once with --lost-disk"):
        mesh.up(NODE)
    args = mesh[NODE].args
    mesh[NODE].args = (*args, "--lost-disk", str(mesh[NODE].data_dir))
    try:
        mesh.up(NODE)
    finally:
        mesh[NODE].args = args
    said = {key: mesh[NODE].client().get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
    assert said == dict.fromkeys(keys, b"kept")


def test_a_rebuilt_index_knows_what_was_deleted(mesh: DaemonCluster) -> None:
    keys = put(mesh, "deleted", b"body")
    mesh.kill("n1")
    mesh.kill("n3")  # each has a copy of some, and misses that they are deleted
    mesh.await_state("n1", "away")
    mesh.await_state("n3", "away")
    for key in keys:
        mesh[NODE].client().delete_object(Bucket=BUCKET, Key=key)
    mesh.stop(NODE)
    line = [program("meshd"), "fsck", "--data-dir", str(mesh[NODE].data_dir), "--rebuild"]
    subprocess.run(line, check=True, capture_output=True, timeout=60)
    mesh.await_healthy()
    for _ in range(10):
        for node in mesh.nodes.values():
            assert node.client().list_objects_v2(Bucket=BUCKET, Prefix="deleted")["KeyCount"] == 0
        threading.Event().wait(0.1)


def test_a_lost_index_is_rebuilt_before_the_map_gives_anything_up(mesh: DaemonCluster) -> None:
    keys = put(mesh, "rebuilt", b"body")
    mesh.stop(NODE)
    mesh.await_state(NODE, "away")
    index = mesh[NODE].data_dir / "index"
    shutil.rmtree(index)
    with pytest.raises(DaemonFailedError, match="or run meshd fsck --rebuild"):
        mesh.up(NODE)
    assert "lost n2 --anyway" not in mesh[NODE].output()
    known = mesh.map_of("n1").node(NODE)
    assert known is not None
    assert known.state == "away"
    line = [program("meshd"), "fsck", "--data-dir", str(mesh[NODE].data_dir), "--rebuild"]
    subprocess.run(line, check=True, capture_output=True, timeout=60)
    damaged = next(
        path for path in mesh[NODE].data_dir.glob("extents/*/*.tar") if b"body" in path.read_bytes()
    )
    damaged.write_bytes(damaged.read_bytes().replace(b"body", b"rots"))
    found = subprocess.run(line[:-1], check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "problems: start the node, which restores those that other nodes have, and restore" in found.stdout
    mesh.up(NODE)
    mesh.await_healthy()
    agree(mesh, keys, b"body")
