"""Nodes that own nothing: one beside the trainers, which keeps copies, and one that only makes batches."""

from __future__ import annotations

import hashlib
import itertools
import random
import secrets
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from botocore.exceptions import ClientError
from prometheus_client.parser import text_string_to_metric_families

import meshsdk
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshwire.cluster.routes import batch_nodes
from tests.faults.epochs import BATCH, connect, epoch, fill
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

require_etcd()

SAMPLES = 64
STEPS = SAMPLES // BATCH
chance = random.Random(1)
epochs = itertools.count(10)  # frames that nobody has asked for


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    """n1 and n2 store, n3 computes, n4 caches."""
    own = {
        "n1": ("--role", "store"),
        "n2": ("--role", "store"),
        "n3": ("--role", "compute"),
        "n4": ("--role", "cache"),
    }
    with DaemonCluster.start(4, own=own, args=("--frame-cache", "1MiB")) as four:
        with connect([four["n1"].endpoint], keys(four)) as client:
            fill(client, SAMPLES)
        yield four


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


@pytest.fixture
def things(mesh: DaemonCluster) -> str:
    """A new bucket."""
    name = f"things-{secrets.token_hex(4)}"
    mesh["n1"].client().create_bucket(Bucket=name)
    return name


def keys(mesh: DaemonCluster) -> tuple[str, str]:
    return mesh.access_key, mesh.secret_key


def counted(mesh: DaemonCluster, node_id: str, name: str, **labels: str) -> float:
    """A counter of a node, over those of its labels that are not given."""
    with urllib.request.urlopen(f"{mesh[node_id].endpoint}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: list[float] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


def near_parts(mesh: DaemonCluster, result: str) -> float:
    return counted(mesh, "n4", "meshd_near_cache_reads_total", kind="part", result=result)


def copied(s3: Any, mesh: DaemonCluster, things: str, key: str) -> bytes:
    """An object through the cache node, read until every part of it comes from a copy."""
    while True:
        hits, misses = near_parts(mesh, "hit"), near_parts(mesh, "miss")
        body: bytes = s3.get_object(Bucket=things, Key=key)["Body"].read()
        if near_parts(mesh, "hit") > hits and near_parts(mesh, "miss") == misses:
            return body
        threading.Event().wait(0.05)


def test_only_those_that_store_own_something(mesh: DaemonCluster) -> None:
    cluster = mesh.map_of("n4")
    assert {node.node_id for node in cluster.nodes if node.stores} == {"n1", "n2"}
    assert [node.node_id for node in batch_nodes(cluster)] == ["n3"]


def test_objects_are_read_from_copies_and_are_never_old(mesh: DaemonCluster, things: str) -> None:
    near, far = mesh["n4"].client(), mesh["n1"].client()
    for size in (10, 100_000, 9_000_000):
        body = chance.randbytes(size)
        far.put_object(Bucket=things, Key=f"of-{size}", Body=body, Metadata={"a": "b"})
        assert copied(near, mesh, things, f"of-{size}") == body
        moved = counted(mesh, "n4", "meshd_remote_bytes_total")
        answer = near.get_object(Bucket=things, Key=f"of-{size}", Range=f"bytes=3-{size - 3}")
        assert answer["Body"].read() == body[3 : size - 2]
        assert (answer["ETag"], answer["Metadata"]) == (f'"{hashlib.md5(body).hexdigest()}"', {"a": "b"})
        assert counted(mesh, "n4", "meshd_remote_bytes_total") == moved
    far.put_object(Bucket=things, Key="of-10", Body=b"new")
    assert near.get_object(Bucket=things, Key="of-10")["Body"].read() == b"new"
    far.delete_object(Bucket=things, Key="of-10")
    with pytest.raises(ClientError, match="NoSuchKey"):
        near.get_object(Bucket=things, Key="of-10")
    with pytest.raises(ClientError, match="304"):
        near.get_object(
            Bucket=things,
            Key="of-100000",
            IfNoneMatch=far.head_object(Bucket=things, Key="of-100000")["ETag"],
        )


def test_rights_are_those_of_the_object(mesh: DaemonCluster, things: str) -> None:
    """An ACL lies with the object, which this node does not have."""
    far = mesh["n1"].client()
    far.put_bucket_ownership_controls(
        Bucket=things, OwnershipControls={"Rules": [{"ObjectOwnership": "ObjectWriter"}]}
    )
    for key, acl in (("open", "public-read"), ("closed", "private")):
        far.put_object(Bucket=things, Key=key, Body=b"body", ACL=acl)
    statuses = {}
    for key in ("open", "closed"):
        connection = mesh["n4"].connect()
        connection.request("GET", f"/{things}/{key}")
        answer = connection.getresponse()
        statuses[key] = (answer.status, answer.read() == b"body")
        connection.close()
    assert statuses == {"open": (200, True), "closed": (403, False)}


def test_batches_are_made_where_it_is_computed_and_kept_beside_the_trainers(mesh: DaemonCluster) -> None:
    number = next(epochs)
    made = counted(mesh, "n3", "meshd_frames_total", result="miss")
    others = [counted(mesh, each, "meshd_frames_total") for each in ("n1", "n2", "n4")]
    expected = list(epoch([mesh["n1"].endpoint], keys(mesh), number))
    assert counted(mesh, "n3", "meshd_frames_total", result="miss") == made + STEPS
    assert [counted(mesh, each, "meshd_frames_total") for each in ("n1", "n2", "n4")] == others
    hits = 0.0
    while hits < STEPS:  # written behind the answers
        moved = counted(mesh, "n4", "meshd_remote_bytes_total")
        before = counted(mesh, "n4", "meshd_near_cache_reads_total", kind="frame", result="hit")
        assert list(epoch([mesh["n1"].endpoint], keys(mesh), number)) == expected
        hits = counted(mesh, "n4", "meshd_near_cache_reads_total", kind="frame", result="hit") - before
    assert counted(mesh, "n4", "meshd_remote_bytes_total") == moved


MODULE = b'''
import numpy as np
from meshsdk.userops import image, op

@op(input=image("h", "w", 3), output=image("h", "w", 3), memory=128 << 20)
def darker(pixels, *, by: float = 2.0):
    """Pixels divided."""
    return (pixels / by).astype(np.uint8)
'''


def test_ops_of_users_are_on_every_node(mesh: DaemonCluster) -> None:
    """Pushed on one that stores, planned on the one that caches, run on the one that computes."""
    for number, (node_id, by) in enumerate((("n1", 2.0), ("n4", 4.0), ("n3", 8.0))):
        with connect([mesh[node_id].endpoint], keys(mesh)) as client:
            if not number:
                op_catalog.push_module(client.transport, "mine", MODULE)
            dataset = meshsdk.open("s3://training/train", fields={"image": "png"}, client=client)
            dataset = dataset.map(ops.decode("image"), ops.user("mine/darker", "image", by=by))
            loader = meshsdk.Loader(dataset, BATCH, shuffle=False, output="numpy")
            images = loader.at(0)["image"]
            loader.close()
            assert isinstance(images, meshsdk.Ragged)
            assert np.asarray(images.data).max() == 255 // by


def test_nobody_misses_a_cache_or_a_computer_that_dies(mesh: DaemonCluster) -> None:
    number = next(epochs)
    expected = list(epoch([mesh["n1"].endpoint], keys(mesh), number))
    found = []
    for step, digest in enumerate(epoch([mesh["n1"].endpoint], keys(mesh), number)):
        found.append(digest)
        if step == 1:
            mesh.kill("n4")
        if step == 4:
            mesh.kill("n3")
    assert found == expected
    mesh.up("n4")
    assert list(epoch([mesh["n4"].endpoint], keys(mesh), number)) == expected
