"""Without their control store nodes go on; parted ones never change the map, and heal: real daemons, a real
etcd. (Hosts that are parted as networks are: tests/faults.)"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner

from meshsdk.cli.cluster import cluster
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import FAILPOINTS
from tests.support.relay import Relay
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshwire.cluster import ClusterMap

require_etcd()

FAILURES = "meshd_cluster_control_failures_total"
LEASE, MAP = "meshd_cluster_lease_held", "meshd_cluster_map_version"
BUCKET = "lasting"
LARGE = os.urandom(5 << 20)
SLOW_JOBS = {FAILPOINTS: "jobs.output.written=sleep(80)"}


class Parted:
    """n1 and n2, and n3 whose ways to etcd (`control`) and from the others (`front`) can be cut."""

    def __init__(self, mesh: DaemonCluster) -> None:
        self.mesh = mesh
        self.control, self.front = Relay(mesh.etcd.members[0].port), Relay()

    def start(self) -> None:
        ways = ("--control", f"etcd://{self.control}", "--advertise", f"http://{self.front}")
        self.front.target = int(self.mesh.add("n3", *ways).endpoint.rpartition(":")[2])
        self.mesh["n1"].client().create_bucket(Bucket=BUCKET)

    def whole(self) -> Parted:
        """All ways open, all nodes up, each with its lease and the newest map."""
        self.control.heal()
        self.front.heal()
        newest = self.mesh.await_healthy().map_of().version
        for node_id in self.mesh.nodes:
            self.mesh.await_metric(node_id, LEASE, 1)
            self.mesh.await_metric(node_id, MAP, newest)
        return self

    def await_failures(self, *node_ids: str) -> None:
        """Until coordinators have failed once more to reach the control store, and have no lease any more."""
        before = {node_id: self.mesh.metric(node_id, FAILURES) for node_id in node_ids}
        for node_id, failures in before.items():
            self.mesh.await_metric(node_id, FAILURES, failures + 1)
            while self.mesh.metric(node_id, LEASE):
                threading.Event().wait(0.05)


@pytest.fixture(scope="module")
def started() -> Iterator[Parted]:
    with DaemonCluster.start(2, env=SLOW_JOBS) as mesh:
        found = Parted(mesh)
        try:
            found.start()
            yield found
        finally:
            found.control.close()
            found.front.close()


@pytest.fixture
def parted(started: Parted) -> Parted:
    return started.whole()


def works(mesh: DaemonCluster, prefix: str) -> dict[str, bytes]:
    """All kinds of reads and writes, of names that each node decides, asked of each node. What is there
    now, below the prefix and a word that no try has had."""
    prefix = f"{prefix}-{secrets.token_hex(4)}"
    clients = {node_id: node.client() for node_id, node in mesh.nodes.items()}
    kept: dict[str, bytes] = {}
    for asked, client in clients.items():
        for decider in mesh.nodes:
            key = mesh.key_with_primary(decider, BUCKET, f"{prefix}/{asked}")
            client.put_object(Bucket=BUCKET, Key=key, Body=b"first")
            client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
            with pytest.raises(ClientError, match="PreconditionFailed"):
                client.put_object(Bucket=BUCKET, Key=key, Body=b"third", IfNoneMatch="*")
            client.put_object(Bucket=BUCKET, Key=f"{key}-gone", Body=b"gone")
            client.delete_object(Bucket=BUCKET, Key=f"{key}-gone")
            kept[key] = key.encode()
    client, name = clients["n2"], f"{prefix}/large"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
    about: dict[str, Any] = {"Bucket": BUCKET, "Key": name, "UploadId": upload}
    parts = [
        {"PartNumber": n, "ETag": client.upload_part(**about, PartNumber=n, Body=LARGE)["ETag"]}
        for n in (1, 2)
    ]
    client.complete_multipart_upload(**about, MultipartUpload={"Parts": parts})
    kept[name] = LARGE * 2
    return kept


def reads(mesh: DaemonCluster, kept: dict[str, bytes]) -> None:
    """Every node lists and gives all of it."""
    prefix = next(iter(kept)).partition("/")[0]
    for node in mesh.nodes.values():
        client = node.client()
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
        assert {entry["Key"] for entry in found} == set(kept)
        for key, body in kept.items():
            assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == body


def documents(mesh: DaemonCluster) -> dict[str, ClusterMap]:
    return {node_id: mesh.map_of(node_id) for node_id in mesh.nodes}


def test_without_the_control_store_everything_about_data_goes_on(parted: Parted) -> None:
    mesh = parted.mesh
    before = documents(mesh)
    kept = works(mesh, "before")
    mesh.etcd.kill_member(0)
    parted.await_failures(*mesh.nodes)
    reads(mesh, kept)
    during = works(mesh, "during")
    reads(mesh, during)
    assert documents(mesh) == before
    with pytest.raises(ClientError, match=r"ServiceUnavailable.*the control store is unreachable"):
        mesh["n1"].client().create_bucket(Bucket="not-now")
    assert "Traceback" not in mesh["n1"].output()
    refused = mesh["n1"].request("POST", "/-/cluster/nodes/n2", b'{"action": "drain"}')
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "Unavailable")
    status = json.loads(mesh["n1"].request("GET", "/-/cluster").body)
    assert "is etcd running" in status["control"]
    mesh.etcd.start_member(0)
    mesh.etcd.await_reads()
    for node_id in mesh.nodes:
        mesh.await_metric(node_id, LEASE, 1)
    assert documents(mesh) == before, "nobody was taken for gone afterwards"
    reads(mesh, kept)
    reads(mesh, during)


def test_a_job_that_ends_without_the_control_store_is_recorded_when_it_is_back(parted: Parted) -> None:
    mesh = parted.mesh
    client = mesh["n1"].client()
    for number in range(40):
        client.put_object(Bucket=BUCKET, Key=f"parts/{number}.bin", Body=b"part")
    source, target = f"s3://{BUCKET}/parts", f"s3://{BUCKET}/whole"
    document = {"kind": "shard", "source": source, "target": target, "count": 1}
    job = json.loads(mesh["n1"].request("POST", "/-/jobs", json.dumps(document).encode()).body)

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(mesh["n1"].request("GET", f"/-/jobs/{job['id']}").body)
        return found

    await_true(lambda: shown()["progress"]["written"] >= 1)
    mesh.etcd.kill_member(0)
    parted.await_failures(*mesh.nodes)
    await_true(lambda: client.list_objects_v2(Bucket=BUCKET, Prefix="whole/")["KeyCount"] >= 40)
    runs_it = mesh[shown()["node"]]
    await_true(lambda: "a job waits: the control store cannot be used" in runs_it.output())
    assert shown()["state"] == "running"
    mesh.etcd.start_member(0)
    mesh.etcd.await_reads()
    await_true(lambda: shown()["state"] == "done")
    assert (shown()["run"], shown()["failed"]) == (1, 0)
    assert "Traceback" not in runs_it.output()


def test_a_node_that_dies_meanwhile_is_told_though_the_map_has_it_as_up(parted: Parted) -> None:
    mesh = parted.mesh
    mesh.etcd.kill_member(0)
    parted.await_failures(*mesh.nodes)
    mesh.kill("n3")
    said = CliRunner().invoke(cluster, ["status", "--json"], env=_env(mesh))
    nodes = {node["id"]: node for node in json.loads(said.output)["nodes"]}
    assert [(name, node["state"], node["silent"]) for name, node in nodes.items()] == [
        ("n1", "up", False),
        ("n2", "up", False),
        ("n3", "up", True),
    ]
    first, second, *_ = CliRunner().invoke(cluster, ["status"], env=_env(mesh)).output.splitlines()
    assert re.search(r"\bn3 does not answer$", first), first
    assert "writes of data that n3 owns wait until it or the control store is back" in second


def _env(mesh: DaemonCluster) -> dict[str, str]:
    return {
        "MESH_ENDPOINT": mesh["n1"].endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
    }


def _back_from(mesh: DaemonCluster, backup: Path) -> None:
    """Put the control store back while the nodes run."""
    mesh.etcd.kill_member(0)
    mesh.etcd.restore_snapshot(backup)
    mesh.etcd.start_member(0)
    mesh.etcd.await_reads()


def _buckets(mesh: DaemonCluster) -> list[set[str]]:
    """As each node knows them."""
    every = [node.client().list_buckets()["Buckets"] for node in mesh.nodes.values()]
    return [{bucket["Name"] for bucket in buckets} for buckets in every]


def test_a_control_store_of_yesterday_has_the_map_of_today(parted: Parted, tmp_path: Path) -> None:
    """What is in its backup is known everywhere, and not what was made since; where objects are is not
    forgotten, though the map of the backup says otherwise."""
    mesh = parted.mesh
    mesh.etcd.save_snapshot(tmp_path / "backup")
    mesh["n1"].client().create_bucket(Bucket="younger")
    mesh["n1"].client().put_object(Bucket="younger", Key="kept", Body=b"kept")
    for action in ("drain", "undrain"):
        body = json.dumps({"action": action}).encode()
        assert mesh["n1"].request("POST", "/-/cluster/nodes/n3", body).status == 200
    before, kept = parted.whole().mesh.map_of(), works(mesh, "yesterday")
    _back_from(mesh, tmp_path / "backup")
    mesh.await_map(lambda found: found.version > before.version)
    for node_id in mesh.nodes:
        mesh.await_metric(node_id, LEASE, 1)
    while any("younger" in known for known in _buckets(mesh)):
        threading.Event().wait(0.1)
    # A node that was too slow to renew its lease on the store that came back has gone away, and returns.
    mesh.await_map(lambda found: [node.state for node in found.nodes] == ["up", "up", "up"])
    reads(mesh, kept)
    reads(mesh, works(mesh, "today"))
    mesh["n2"].client().create_bucket(Bucket="younger")
    assert mesh["n3"].client().get_object(Bucket="younger", Key="kept")["Body"].read() == b"kept"
    mesh.stop("n2")
    mesh.up("n2")
    mesh.await_state("n2", "up")
    reads(mesh, kept)


def test_an_emptied_control_store_is_none(parted: Parted, tmp_path: Path) -> None:
    mesh = parted.mesh
    mesh.etcd.save_snapshot(tmp_path / "backup")
    before, kept = documents(mesh), works(mesh, "emptied")
    mesh.etcd.kill_member(0)
    mesh.etcd.remove_data()
    mesh.etcd.start_member(0)
    parted.await_failures(*mesh.nodes)
    reads(mesh, kept)
    reads(mesh, works(mesh, "none"))
    assert documents(mesh) == before
    status = json.loads(mesh["n1"].request("GET", "/-/cluster").body)
    assert "restore this mesh's control store from its backup" in status["control"]
    _back_from(mesh, tmp_path / "backup")
    parted.whole()
    assert documents(mesh) == before
    reads(mesh, kept)


def test_users_that_could_not_be_stored_are_not_called_reloaded(tmp_path: Path) -> None:
    """A user who was taken out of the file is one still: whoever looks is told, and what to do."""
    users = tmp_path / "users.yaml"
    users.write_text("- {user_id: ann, access_key: ann-access-key, secret_key: ann-secret-key}\n")
    with DaemonCluster.start(1, args=["--users", str(users)]) as mesh:
        node = mesh["n1"]
        mesh.etcd.kill_member(0)
        users.write_text("[]\n")
        os.kill(node.pid, signal.SIGHUP)
        await_true(lambda: "users not reloaded" in node.output())
        assert "users reloaded" not in node.output()
        assert "send SIGHUP again" in node.output()
        mesh.etcd.start_member(0)
        mesh.etcd.await_reads()
        os.kill(node.pid, signal.SIGHUP)
        await_true(lambda: "users reloaded" in node.output())
        await_true(lambda: b'"ann"' not in node.request("GET", "/-/admin/users").body)


def test_a_node_that_alone_has_lost_it_stays_a_member(parted: Parted) -> None:
    """As long as it answers the others: on a machine that is too busy for that it is tried again."""
    assert any(_stays(parted, f"alone-{turn}") for turn in range(3))


def _stays(parted: Parted, prefix: str) -> bool:
    mesh, before = parted.mesh, documents(parted.mesh)
    parted.control.cut()
    try:
        parted.await_failures("n3")
        while _leases(mesh) != [True, True, False]:
            threading.Event().wait(0.1)
        try:
            reads(mesh, works(mesh, prefix))
        except (AssertionError, ClientError):
            if documents(mesh) == before:
                raise
        stayed = documents(mesh) == before
    finally:
        parted.control.heal()
    mesh.await_metric("n3", LEASE, 1)
    mesh.await_state("n3", "up")
    return stayed and documents(mesh) == before


def test_of_two_sides_one_changes_the_map_and_acknowledges(parted: Parted) -> None:
    mesh, before = parted.mesh, parted.mesh.map_of()
    key = mesh.key_with_primary("n3", BUCKET, f"sides-{secrets.token_hex(4)}/key")
    parted.control.cut()
    parted.front.cut()
    try:
        for node_id in ("n1", "n2"):
            while (states := [node.state for node in mesh.map_of(node_id).nodes]) != ["up", "up", "away"]:
                assert states == ["up", "up", "up"]
                threading.Event().wait(0.1)
        with ThreadPoolExecutor(2) as pool:
            # the other side goes by the old map, by which it decides: it takes nothing, now or later
            theirs = pool.submit(_created, mesh["n3"], key, b"theirs")
            change = pool.submit(mesh["n3"].request, "POST", "/-/cluster/nodes/n1", b'{"action": "drain"}')
            assert _created(mesh["n2"], key, b"ours")
            assert change.result(60).status == 503
            assert not theirs.result(60)
        assert mesh.map_of("n3") == before
    finally:
        parted.control.heal()
        parted.front.heal()
    mesh.await_state("n3", "up")
    reads(mesh, {key: b"ours"})


def _leases(mesh: DaemonCluster) -> list[bool]:
    """Who has one, as n1 knows."""
    return [node["lease"] for node in json.loads(mesh["n1"].request("GET", "/-/cluster").body)["nodes"]]


def _created(node: Any, key: str, body: bytes) -> bool:
    """Whether this was the one that made the object."""
    try:
        node.client().put_object(Bucket=BUCKET, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (412, 503):
            raise
        return False
    return True
