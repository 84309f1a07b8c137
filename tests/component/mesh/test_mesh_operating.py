"""A mesh as its operator sees and changes it: `mesh cluster`, against real daemons."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import threading
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.interpreters import program
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

require_etcd()


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3) as three:
        yield three


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def line_of(mesh: DaemonCluster | Daemon, *words: str) -> tuple[list[str], dict[str, str]]:
    """A command line, and its environment."""
    endpoint = mesh.endpoint if isinstance(mesh, Daemon) else mesh["n1"].endpoint
    env = os.environ | {
        "MESH_ENDPOINT": endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
    }
    return [program("mesh"), "cluster", *words], env


def command(mesh: DaemonCluster | Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    line, env = line_of(mesh, *words)
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=60)


def nodes(mesh: DaemonCluster) -> dict[str, dict[str, Any]]:
    document = json.loads(command(mesh, "status", "--json").stdout)
    return {node["id"]: node for node in document["nodes"]}


def test_status_shows_every_node_and_its_share(mesh: DaemonCluster) -> None:
    text = command(mesh, "status").stdout
    assert "all data is where it belongs" in text
    for node_id, endpoint in mesh.endpoints.items():
        assert any(line.startswith(node_id) and endpoint in line for line in text.splitlines())
    assert sum(node["slots"] for node in nodes(mesh).values()) == 2 * (1 << 14)
    assert all(node["lease"] for node in nodes(mesh).values())


def test_a_status_that_is_watched_goes_on(mesh: DaemonCluster) -> None:
    line, env = line_of(mesh, "status", "--watch", "--json", "--every", "0.2")
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            seen = [json.loads(watching.stdout.readline())["version"] for _ in range(3)]
        finally:
            watching.terminate()
    assert seen == sorted(seen)


def control_keys(mesh: DaemonCluster) -> list[str]:
    """All there are in the control store."""
    everything = base64.b64encode(b"\0").decode()
    body = json.dumps({"key": everything, "range_end": everything, "keys_only": True}).encode()
    with urlopen(f"http://{mesh.etcd.members[0]}/v3/kv/range", body, timeout=20) as answer:
        return [base64.b64decode(found["key"]).decode() for found in json.load(answer)["kvs"]]


def test_a_drained_node_is_empty_and_can_be_removed(mesh: DaemonCluster) -> None:
    assert "then: mesh cluster remove n2" in command(mesh, "drain", "n2").stdout
    mesh.await_map(lambda found: not found.is_rebalancing)
    for _ in range(240):  # its rebalancer reports a moment later that nothing is left
        if nodes(mesh)["n2"]["empty"]:
            break
        threading.Event().wait(0.5)
    else:
        pytest.fail(f"n2 is not empty: {nodes(mesh)['n2']}")
    assert any(line.startswith("n2") and "0%" in line for line in command(mesh, "status").stdout.splitlines())
    refused = command(mesh, "remove", "n2")
    assert (refused.returncode, "stop it first" in refused.stderr) == (1, True)
    mesh.stop("n2")
    assert "n2 is gone" in command(mesh, "remove", "n2").stdout
    assert set(nodes(mesh)) == {"n1", "n3"}
    assert [key for key in control_keys(mesh) if key.endswith("/n2") and "@leases" not in key] == []
    mesh.up("n2")
    mesh.await_state("n2", "up")


def test_a_drain_can_be_taken_back(mesh: DaemonCluster) -> None:
    assert command(mesh, "drain", "n3").returncode == 0
    assert command(mesh, "undrain", "n3").returncode == 0
    mesh.await_map(lambda found: not found.is_rebalancing and all(node.state == "up" for node in found.nodes))


def test_a_node_whose_disk_is_lost_is_replaced_by_an_empty_one(mesh: DaemonCluster) -> None:
    mesh.kill("n3")
    assert command(mesh, "status").stdout.splitlines()[0].endswith("2 copies: n3 does not answer")  # at once
    mesh.await_state("n3", "away")
    text = command(mesh, "status").stdout
    assert text.splitlines()[0].endswith("2 copies: n3 does not answer")
    assert text.splitlines()[1].startswith("all data can be read and written; restart the nodes")
    assert "does not answer; its share waits for it" in text
    assert text.count("has data that no other running node has: do not stop it") == 2
    assert "start it, or run `mesh cluster lost` first" in command(mesh, "remove", "n3").stderr
    assert "n3 is down" in command(mesh, "replace", "n3").stdout
    mesh.remove_data("n3")
    mesh.up("n3")
    mesh.await_state("n3", "up")


def test_a_mesh_goes_on_without_what_only_a_lost_node_had(mesh: DaemonCluster) -> None:
    """A bucket with one copy; that node is lost, and after all returns with what it had."""
    line, env = line_of(mesh)
    line[1:] = ["bucket", "create", "single", "--copies", "1"]
    subprocess.run(line, env=env, check=True, capture_output=True, timeout=60)
    store = mesh["n1"].client()
    keys = {name: mesh.key_with_primary(name, "single", copies=1) for name in ("n1", "n3")}
    for key in keys.values():
        store.put_object(Bucket="single", Key=key, Body=b"first")
    mesh.kill("n3")
    mesh.await_state("n3", "away")
    assert "lost NODE --anyway" in command(mesh, "lost", "n3").stderr
    assert "n3 is down" in command(mesh, "lost", "n3", "--anyway").stdout
    mesh.await_map(lambda found: not found.is_rebalancing)
    assert store.get_object(Bucket="single", Key=keys["n1"])["Body"].read() == b"first"
    other = mesh.key_with_primary("n1", "single", "again", copies=1)
    store.put_object(Bucket="single", Key=other, Body=b"second")
    assert "Keep its directory if it was given up with --anyway" in command(mesh, "remove", "n3").stdout
    mesh.up("n3")
    mesh.await_healthy()
    assert store.get_object(Bucket="single", Key=keys["n3"])["Body"].read() == b"first"
    assert store.get_object(Bucket="single", Key=other)["Body"].read() == b"second"
    for key in (*keys.values(), other):  # a mesh without it is of no concern to the other tests
        store.delete_object(Bucket="single", Key=key)
    store.delete_bucket(Bucket="single")


def test_an_empty_directory_takes_the_place_of_one_whose_objects_others_have(mesh: DaemonCluster) -> None:
    mesh.kill("n3")
    mesh.remove_data("n3")
    mesh.up("n3")
    mesh.await_map(lambda found: not found.is_rebalancing and all(node.state == "up" for node in found.nodes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("drain", "n9"), "there is no node 'n9'"),
        (("undrain", "n1"), "is up, not draining"),
        (("lost", "n1"), "is still running"),
        (("reweigh", "n1", "0"), "drain it instead"),
        (("remove", "n1"), "is still running"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    mesh: DaemonCluster, words: tuple[str, ...], message: str
) -> None:
    refused = command(mesh, *words)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_another_share_is_another_share(mesh: DaemonCluster) -> None:
    assert command(mesh, "reweigh", "n1", "3").returncode == 0
    mesh.await_map(lambda found: not found.is_rebalancing)
    assert nodes(mesh)["n1"]["slots"] > nodes(mesh)["n2"]["slots"]
    assert command(mesh, "reweigh", "n1", "1").returncode == 0


def test_others_than_root_learn_the_map_and_change_nothing(mesh: DaemonCluster) -> None:
    user = json.dumps({"user_id": f"ann-{secrets.token_hex(4)}"}).encode()
    assert mesh["n1"].request("POST", "/-/admin/users", user).status == 201
    key = json.loads(mesh["n1"].request("POST", "/-/admin/keys", user).body)
    mesh["n2"].access_key, access = key["access_key"], mesh["n2"].access_key
    mesh["n2"].secret_key, secret = key["secret_key"], mesh["n2"].secret_key
    try:
        for _ in range(600):  # other nodes learn of a key a moment later
            found = mesh["n2"].request("GET", "/-/map")
            if found.status == 200:
                break
            threading.Event().wait(0.1)
        assert found.status == 200
        assert mesh["n2"].request("GET", "/-/cluster").status == 403
        drained = mesh["n2"].request("POST", "/-/cluster/nodes/n1", b'{"action": "drain"}')
        assert drained.status == 403
    finally:
        mesh["n2"].access_key, mesh["n2"].secret_key = access, secret


def test_a_lone_node_says_how_to_have_several(daemon: Daemon) -> None:
    assert "1 node, 1 copy: all data is where it belongs" in command(daemon, "status").stdout
    assert "--control etcd" in command(daemon, "drain", "n1").stderr


def test_slots_are_split_while_objects_are_written(mesh: DaemonCluster) -> None:
    s3, body = mesh["n1"].client(), {number: secrets.token_bytes(4096) for number in range(200)}
    mesh.await_map(lambda found: not found.is_rebalancing)
    s3.create_bucket(Bucket="parts")
    for number in range(100):
        s3.put_object(Bucket="parts", Key=f"{number:03}", Body=body[number])
    before = mesh.map_of()
    split = command(mesh, "slots", "65536")
    assert split.returncode == 0, split.stderr
    assert "65,536 slots" in split.stdout
    for number in range(100, 200):
        s3.put_object(Bucket="parts", Key=f"{number:03}", Body=body[number])
        assert s3.get_object(Bucket="parts", Key=f"{number - 100:03}")["Body"].read() == body[number - 100]
    after = mesh.await_map(lambda found: not found.is_rebalancing)
    assert (before.slots, after.slots, after.base_slots) == (16384, 65536, None)
    for name in ("n1", "n2", "n3"):
        there = mesh[name].client()
        listed = there.list_objects_v2(Bucket="parts")["Contents"]
        assert [found["Key"] for found in listed] == [f"{number:03}" for number in range(200)]
        assert all(
            there.get_object(Bucket="parts", Key=f"{number:03}")["Body"].read() == body[number]
            for number in body
        )
    assert "a greater power of two" in command(mesh, "slots", "16384").stderr


def test_a_mesh_is_founded_with_the_slots_of_its_first_node() -> None:
    """The setting counts then alone; a node that joins with another number takes those of the mesh, and a
    larger number is logged."""
    require_etcd()
    with DaemonCluster.start(1, own={"n1": ("--slots", "131072")}) as two:
        s3, body = two["n1"].client(), {f"{number:02}": secrets.token_bytes(2048) for number in range(40)}
        s3.create_bucket(Bucket="many")
        for key, value in body.items():
            s3.put_object(Bucket="many", Key=key, Body=value)
        two.add("n2", "--slots", "262144")
        found = two.await_map(lambda found: len(found.nodes) == 2 and not found.is_rebalancing)
        assert (found.slots, found.base_slots) == (131_072, None)
        there = two["n2"].client()
        for key, value in body.items():
            assert there.get_object(Bucket="many", Key=key)["Body"].read() == value
        assert "to split the slots of this mesh, run `mesh cluster slots`" in two["n2"].output()
        assert "run `mesh cluster slots`" not in two["n1"].output()
        refused = command(two, "slots", "131072")
        assert "the mesh has 131072 slots" in refused.stderr


def test_slots_are_not_split_while_a_node_is_away() -> None:
    require_etcd()
    with DaemonCluster.start(2) as two:
        two.kill("n2")
        refused = command(two, "slots", "32768")
        assert refused.returncode != 0
        assert "n2 does not answer" in refused.stderr


def test_a_node_that_ends_in_order_holds_up_no_writes() -> None:
    """Its lease would for minutes; nor does a client that is slow to read its last answer."""
    require_etcd()
    with DaemonCluster.start(2, lease=300.0) as two:
        s3 = two["n1"].client()
        s3.create_bucket(Bucket="going")
        s3.put_object(Bucket="going", Key="large", Body=bytes(32 << 20))  # more than sockets buffer
        slow = two["n2"].client().get_object(Bucket="going", Key="large")["Body"]
        ending = threading.Thread(target=two.stop, args=["n2"])
        ending.start()
        for number in range(20):
            s3.put_object(Bucket="going", Key=f"{number}", Body=b"here")
        (gone,) = (node for node in two.map_of("n1").nodes if node.node_id == "n2")
        assert (gone.state, ending.is_alive()) == ("away", True)
        slow.close()
        ending.join(60)
        two.up("n2")
        two.await_healthy()
        for number in range(20):
            found = two["n2"].client().get_object(Bucket="going", Key=f"{number}")
            assert found["Body"].read() == b"here"
