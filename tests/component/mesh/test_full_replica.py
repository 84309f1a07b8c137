"""One of three daemons has a full disk: clients are told at once which, whatever its part in a write is."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshd.cluster.replication.replicator import WRITE_TIMEOUT
from meshd.util.disk_space import measure_disk_space
from meshsdk.errors import ServerError
from meshwire.cluster import routes
from tests.support.archives import UNPACK, tar_of
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

require_etcd()
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not run here: takes root and mounts")
LEFT = 5 << 20
AT_ONCE, TRIES = WRITE_TIMEOUT / 2, 3
SMALL, LARGE = b"small", os.urandom(8 << 20)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """n2's disk, a file system of its own."""
    with _file_system(tmp_path_factory.mktemp("disk")) as place:
        yield place


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Holds n2's index, likewise."""
    with _file_system(tmp_path_factory.mktemp("index")) as place:
        yield place


@contextmanager
def _file_system(place: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(place)]
    subprocess.run(command, check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


@pytest.fixture(scope="module")
def daemons(disk: Path, index: Path) -> Iterator[DaemonCluster]:
    own = ["--disk", str(disk / "store"), "--index-dir", str(index / "index")]
    with DaemonCluster.start(3, lease=10.0, own={"n2": own}) as found:
        found["n1"].client().create_bucket(Bucket="full")
        found["n1"].client().put_object(Bucket="full", Key=_key(found, "n1", "before"), Body=SMALL)
        yield found


@contextmanager
def filled(disk: Path, left: int = LEFT) -> Iterator[None]:
    """Another program fills the disk for a while, but for some of what the store keeps for deletions."""
    another = disk / "another-program"
    with another.open("wb", buffering=0) as file:
        while measure_disk_space(disk).free > left:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        another.unlink()


@pytest.fixture
def full(daemons: DaemonCluster, disk: Path) -> Iterator[DaemonCluster]:
    """The same while n2's disk is full."""
    with filled(disk):
        yield daemons
    await_true(lambda: _stores(daemons, "after"), told=daemons.output)


def _stores(daemons: DaemonCluster, prefix: str) -> bool:
    try:
        daemons["n1"].client().put_object(Bucket="full", Key=_key(daemons, "n1", prefix), Body=SMALL)
    except ClientError:
        return False
    return True


def _key(daemons: DaemonCluster, primary: str, prefix: str) -> str:
    """A key of this primary with a copy on n2."""
    table = routes(daemons.map_of(), 2)
    for number in range(1000):
        key = f"{prefix}-{number}"
        route = table.route_of_key("full", key)
        nodes = [node.node_id for node in route.write_set]
        if route.primary is not None and route.primary.node_id == primary and "n2" in nodes:
            return key
    raise AssertionError(f"no key of {primary} has a copy on n2")


def _refusal(write: Callable[[], Any]) -> str:
    """The message of a write that is refused at once, if not the first time on a busy machine."""
    taken = list[float]()
    while not taken or (min(taken) >= AT_ONCE and len(taken) < TRIES):
        began = time.monotonic()
        with pytest.raises(ClientError) as caught:
            write()
        taken.append(time.monotonic() - began)
    assert min(taken) < AT_ONCE, taken
    error = caught.value.response
    assert error["Error"]["Code"] == "InsufficientStorage", caught.value
    assert error["ResponseMetadata"]["HTTPStatusCode"] == 507
    return str(error["Error"]["Message"])


@pytest.mark.parametrize("asked", ["n1", "n2", "n3"])
@pytest.mark.parametrize("primary", ["n1", "n2"])
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
def test_a_write_names_the_full_node(full: DaemonCluster, primary: str, asked: str, body: bytes) -> None:
    key = _key(full, primary, f"new-{primary}-{asked}-{len(body)}")
    client = full[asked].client()
    told = _refusal(lambda: client.put_object(Bucket="full", Key=key, Body=body))
    assert "on the disks of node n2," in told
    if primary == "n2" or body is LARGE:
        assert "Nothing was changed" in told
        for node in ("n1", "n2", "n3"):
            with pytest.raises(ClientError, match="404"):
                full[node].client().head_object(Bucket="full", Key=key)


@pytest.mark.parametrize("asked", ["n1", "n2"])
@pytest.mark.parametrize("primary", ["n1", "n2"])
def test_a_write_names_a_full_index(daemons: DaemonCluster, index: Path, primary: str, asked: str) -> None:
    key = _key(daemons, primary, f"index-{primary}-{asked}")
    client = daemons[asked].client()
    with filled(index, LEFT // 2):
        for body in (SMALL, LARGE, SMALL):
            told = _refusal(partial(client.put_object, Bucket="full", Key=key, Body=body))
            assert "the file system of the index (`--index-dir`) of node n2," in told
            assert "deleting objects does not help" in told
    await_true(lambda: _stores(daemons, "after"), told=daemons.output)


def test_after_a_refusal_nothing_is_committed_elsewhere(full: DaemonCluster) -> None:
    """The first write may be at its primary; those that follow are not."""
    client = full["n1"].client()
    for number in range(100):  # a slow machine may take longer for two writes than a refusal is remembered
        key = _key(full, "n1", f"next-{number}")
        told = _refusal(partial(client.put_object, Bucket="full", Key=key, Body=SMALL))
        if "Nothing was changed" in told:
            break
        assert "may or may not have taken effect" in told
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket="full", Key=key)


def test_uploads_copies_and_many_objects_are_refused_alike(full: DaemonCluster) -> None:
    client = full["n1"].client()
    began = _key(full, "n1", "upload")
    assert "node n2" in _refusal(lambda: client.create_multipart_upload(Bucket="full", Key=began))
    source = {"Bucket": "full", "Key": _key(full, "n1", "before")}
    copy = _key(full, "n1", "copy")
    assert "node n2" in _refusal(lambda: client.copy_object(Bucket="full", Key=copy, CopySource=source))
    packed = tar_of({_key(full, "n1", "packed"): SMALL})
    put = {"Bucket": "full", "Key": "packed.tar", "Body": packed, "Metadata": UNPACK}
    assert "node n2" in _refusal(lambda: client.put_object(**put))


def test_parts_are_refused_alike(daemons: DaemonCluster, disk: Path) -> None:
    client, key = daemons["n1"].client(), _key(daemons, "n1", "parts")
    upload = client.create_multipart_upload(Bucket="full", Key=key)["UploadId"]
    part = {"Bucket": "full", "Key": key, "UploadId": upload, "PartNumber": 1}
    with filled(disk):
        for body in (LARGE, SMALL):
            assert "node n2" in _refusal(partial(client.upload_part, **part, Body=body))
    await_true(lambda: _stores(daemons, "after"), told=daemons.output)
    client.abort_multipart_upload(Bucket="full", Key=key, UploadId=upload)


def test_reads_and_deletions_continue(full: DaemonCluster) -> None:
    key = _key(full, "n1", "before")
    for node in ("n1", "n2", "n3"):
        assert full[node].client().get_object(Bucket="full", Key=key)["Body"].read() == SMALL
    gone = _key(full, "n1", "after")
    full["n3"].client().delete_object(Bucket="full", Key=gone)
    for node in ("n1", "n2", "n3"):
        with pytest.raises(ClientError, match="404"):
            full[node].client().head_object(Bucket="full", Key=gone)


def test_the_sdk_raises_at_once(full: DaemonCluster) -> None:
    node = full["n1"]
    with mesh.connect(node.endpoint, access_key=full.access_key, secret_key=full.secret_key) as client:
        taken = list[float]()
        while not taken or (min(taken) >= AT_ONCE and len(taken) < TRIES):
            began = time.monotonic()
            with pytest.raises(ServerError, match="node n2") as caught:
                client.put("full", _key(full, "n1", "sdk"), SMALL)
            taken.append(time.monotonic() - began)
        assert min(taken) < AT_ONCE, taken
        assert (caught.value.status, caught.value.code) == (507, "InsufficientStorage")
