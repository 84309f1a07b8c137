"""Reads ahead in a mesh: a node reads the rows that it builds, in windows of its own bytes."""

from __future__ import annotations

import io
import json
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshwire.frame import tensor_frame
from tests.support.daemon_cluster import DaemonCluster
from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rotational_disk import RotationalDisk

SAMPLES, SIZE, SHARD, BATCH, COPIES = 1280, 96 << 10, 16, 64, 2
NODES = ("n1", "n2", "n3")


def sample(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path_factory.mktemp("drive"), size=512 * MIB) as made:
        yield made


@pytest.fixture(scope="module")
def mesh(disk: RotationalDisk) -> Iterator[DaemonCluster]:
    """Three nodes with their data on the disk and memory for two windows of 32 MiB each; tars of 1.5 MiB."""
    own = {name: ("--disk", str(disk.path / name)) for name in NODES}
    args = ("--disk-type", "rotational", "--read-ahead", "64MiB", "--durability", "relaxed")
    with DaemonCluster.start(3, args=args, own=own) as made:
        with closing(made["n1"].client()) as client:
            client.create_bucket(Bucket="tars")
            for first in range(0, SAMPLES, SHARD):
                file = io.BytesIO()
                with tarfile.open(fileobj=file, mode="w") as archive:
                    for number in range(first, first + SHARD):
                        member = tarfile.TarInfo(f"{number:05d}.bin")
                        member.size = SIZE
                        archive.addfile(member, io.BytesIO(sample(number)))
                client.put_object(Bucket="tars", Key=f"{first:05d}.tar", Body=file.getvalue())
        yield made


def epoch(mesh: DaemonCluster, plan: str, *, parts: bool) -> list[bytes]:
    """Request an epoch as a loader does: the rows of each step from all nodes, or whole batches from one
    each, four steps at a time. The beginning of each sample, in the order of the epoch."""
    version = mesh.map_of().version

    def ask(node: str, step: int) -> Any:
        also = f"&part={version}" if parts else ""
        answer = mesh[node].request("GET", f"/-/plans/{plan}/0/{step}?batch={BATCH}{also}")
        assert answer.status == 200, answer.body
        return tensor_frame.tensor_views(answer.body)

    def batch(step: int) -> list[bytes]:
        if not parts:
            return [row[:16].tobytes() for row in ask(NODES[step % len(NODES)], step)["data"]]
        with ThreadPoolExecutor(len(NODES)) as asking:
            views = list(asking.map(lambda node: ask(node, step), NODES))
        places = np.concatenate([view["__row"] for view in views])
        rows = np.concatenate([view["data"][:, :16] for view in views])
        assert np.array_equal(np.sort(places), np.arange(BATCH))
        return [row.tobytes() for row in rows[np.argsort(places)]]

    with ThreadPoolExecutor(4) as pool:
        return [row for rows in pool.map(batch, range(SAMPLES // BATCH)) for row in rows]


def counted(mesh: DaemonCluster, name: str) -> list[float]:
    return [mesh.metric(node, f"meshd_read_ahead_{name}_total") for node in NODES]


def test_windows_are_as_large_as_the_bytes_that_a_node_reads(
    mesh: DaemonCluster, disk: RotationalDisk
) -> None:
    def post(path: str, document: dict[str, Any]) -> Any:
        answer = mesh["n1"].request("POST", path, json.dumps(document).encode())
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    fields = {"data": {"ext": ["bin"]}}
    snapshot = post("/-/snapshots", {"source": "s3://tars/", "kind": "tar", "fields": fields})["snapshot"]
    op = {"op": "frombuffer", "field": "data", "args": {"dtype": "uint8", "shape": [SIZE]}}
    spec = {"seed": 1, "ops": [op], "shuffle": {"kind": "global"}}
    plan = post("/-/plans", {"snapshot": snapshot, "spec": spec, "batch": BATCH})["plan"]
    disk.drop_caches()
    before = counted(mesh, "samples"), counted(mesh, "seeks")
    rows = epoch(mesh, plan, parts=True)
    samples = np.subtract(counted(mesh, "samples"), before[0])
    seeks = np.subtract(counted(mesh, "seeks"), before[1])
    assert sorted(rows) == sorted(sample(number)[:16] for number in range(SAMPLES))
    # Each node reads its own rows ahead, and not the second copies of others' rows, …
    assert SAMPLES <= samples.sum() < 1.9 * SAMPLES
    assert disk.stats().bytes < 1.3 * SAMPLES * SIZE
    # … in windows of up to 32 MiB of its 40 MiB. In windows of 32 MiB of the epoch it was 0.37.
    assert (seeks < 0.15 * SAMPLES / len(NODES)).all()
    disk.drop_caches()
    assert epoch(mesh, plan, parts=False) == rows
