"""A bucket's own number of copies, in a mesh of real daemons: said, raised and lowered under load."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from meshd.config import StoreSettings
from meshd.store.index.index import Index
from meshd.util.clock import SystemClock
from tests.support.bounded_wait import await_end
from tests.support.daemon_cluster import DaemonCluster
from tests.support.interpreters import program
from tests.support.wakeups import restless

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = ("n1", "n2", "n3")
_clock = SystemClock()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, workers=2) as found:
        yield found


def test_a_member_that_nobody_asks_anything_rests(mesh: DaemonCluster) -> None:
    assert not restless(mesh["n2"], {"supervisor": 2, "worker-0": 12, "coordinator-0": 70})


@pytest.fixture
def name() -> str:
    """Of a bucket that no test has had."""
    return f"copies-{secrets.token_hex(4)}"


def _command(mesh: DaemonCluster, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "MESH_ENDPOINT": mesh["n2"].endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
    }
    line = [program("mesh"), *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=110)


def _held(mesh: DaemonCluster, bucket: str) -> dict[str, list[str]]:
    """By key, the nodes that have it."""
    found: dict[str, list[str]] = {}
    for name in NODES:
        index = Index(StoreSettings.at(mesh[name].data_dir).index_dir, map_bytes=1 << 36, readonly=True)
        try:
            for key, record in index.list(bucket, "", "", "", 1000).entries:
                assert not record.broken
                found.setdefault(key, []).append(name)
        finally:
            index.close()
    return found


def _await_copies(mesh: DaemonCluster, bucket: str, copies: int, keys: set[str]) -> None:
    deadline = _clock.monotonic() + 60
    while True:
        held = _held(mesh, bucket)
        if set(held) == keys and all(len(nodes) == copies for nodes in held.values()):
            return
        assert _clock.monotonic() < deadline, (held, mesh.output())
        threading.Event().wait(0.2)


def _counts(mesh: DaemonCluster) -> list[object]:
    found: list[object] = json.loads(mesh["n1"].request("GET", "/-/cluster").body)["counts"]
    return found


def test_a_number_is_said_when_a_bucket_is_made_and_bound_by_the_nodes(
    mesh: DaemonCluster, name: str
) -> None:
    refused = _command(mesh, "bucket", "create", name, "--copies", "5")
    assert refused.returncode != 0
    assert "5 copies need 5 nodes that store, and this mesh has 3" in refused.stderr
    assert "ask for 1 to 3, or add nodes first" in refused.stderr
    for _ in range(2):
        assert f"{name}  3 copies" in _command(mesh, "bucket", "create", name, "--copies", "3").stdout
    taken = _command(mesh, "bucket", "create", name, "--copies", "2")
    assert f"mesh bucket change {name} --copies N" in taken.stderr
    mesh["n3"].client().put_object(Bucket=name, Key="k", Body=b"three times")
    _await_copies(mesh, name, 3, {"k"})
    refused = _command(mesh, "bucket", "change", name, "--copies", "4")
    assert "copies are not possible: this mesh has 3 nodes" in refused.stderr


def test_copies_are_made_and_let_go_of_while_clients_read_and_write(mesh: DaemonCluster, name: str) -> None:
    patient = {"config": Config(retries={"mode": "standard", "total_max_attempts": 8})}
    writer = mesh["n1"].client(**patient)
    writer.create_bucket(Bucket=name)
    calm = f"{name}-calm"
    _command(mesh, "bucket", "create", calm, "--copies", "3")
    writer.put_object(Bucket=calm, Key="k", Body=b"three times")
    bodies: dict[str, bytes] = {}

    def put(key: str) -> None:
        body = os.urandom(700 if len(bodies) % 5 else 1 << 21)
        writer.put_object(Bucket=name, Key=key, Body=body)
        bodies[key] = body

    for number in range(20):
        put(f"before-{number}")
    _await_copies(mesh, name, 2, set(bodies))
    over, wrong, refused, marked = threading.Event(), list[str](), list[str](), mesh.away_count()

    def read() -> None:
        clients = [mesh[name].client() for name in NODES]
        while not over.is_set():
            for key, body in list(bodies.items()):
                for client in clients:
                    try:
                        if client.get_object(Bucket=name, Key=key)["Body"].read() != body:
                            wrong.append(key)
                    except ClientError as error:
                        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                        (refused if status == 503 else wrong).append(f"{key}: {error}")
                over.wait(0.02)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for copies in (3, 1):
            done = _command(mesh, "bucket", "change", name, "--copies", str(copies), "--json")
            assert json.loads(done.stdout)["wanted"] == copies, done
            for number in range(5):
                put(f"to-{copies}-{number}")
            mesh.await_map(lambda cluster: not cluster.is_rebalancing)
            _await_copies(mesh, name, copies, set(bodies))
            assert _counts(mesh) == []
            assert f"{name}  {copies} cop" in _command(mesh, "bucket", "ls").stdout
    finally:
        over.set()
        await_end(reader)
    assert wrong == []
    assert not refused or mesh.away_count() > marked, refused  # unless one was taken for gone
    _await_copies(mesh, calm, 3, {"k"})  # nobody touched that


def test_a_bucket_made_anew_has_the_mesh_s_number(mesh: DaemonCluster, name: str) -> None:
    client = mesh["n2"].client()
    for copies in ("3", "1"):
        verb = "create" if copies == "3" else "change"
        assert _command(mesh, "bucket", verb, name, "--copies", copies).returncode == 0
    client.delete_bucket(Bucket=name)
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="again", Body=b"twice")
    _await_copies(mesh, name, 2, {"again"})
