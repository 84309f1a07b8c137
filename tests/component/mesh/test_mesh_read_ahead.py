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
from tests.support.job_fixtures import ended
from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rotational_disk import RotationalDisk

SAMPLES, SIZE, SHARD, BATCH, COPIES = 1280, 96 << 10, 16, 64, 2
TRIES = 3
NODES = ("n1", "n2", "n3")


def sample(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path_factory.mktemp("drive"), size=768 * MIB) as made:
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


def epoch(mesh: DaemonCluster, plan: str, *, parts: bool, samples: int = SAMPLES) -> list[bytes]:
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
        return [row for rows in pool.map(batch, range(samples // BATCH)) for row in rows]


def post(mesh: DaemonCluster, path: str, document: dict[str, Any]) -> Any:
    answer = mesh["n1"].request("POST", path, json.dumps(document).encode())
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def planned(mesh: DaemonCluster, bucket: str, shuffle: dict[str, Any]) -> str:
    fields = {"data": {"ext": ["bin"]}}
    source = {"source": f"s3://{bucket}/", "kind": "auto", "fields": fields}
    snapshot = post(mesh, "/-/snapshots", source)["snapshot"]
    op = {"op": "frombuffer", "field": "data", "args": {"dtype": "uint8", "shape": [SIZE]}}
    spec = {"seed": 1, "ops": [op], "shuffle": shuffle}
    return str(post(mesh, "/-/plans", {"snapshot": snapshot, "spec": spec, "batch": BATCH})["plan"])


def counted(mesh: DaemonCluster, name: str) -> list[float]:
    return [mesh.metric(node, f"meshd_read_ahead_{name}_total") for node in NODES]


def test_windows_are_as_large_as_the_bytes_that_a_node_reads(
    mesh: DaemonCluster, disk: RotationalDisk
) -> None:
    plan = planned(mesh, "tars", {"kind": "global"})
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


def test_packed_rows_are_read_in_windows_on_each_node(mesh: DaemonCluster, disk: RotationalDisk) -> None:
    fields = {"data": {"ext": ["bin"]}}
    snapshot = post(mesh, "/-/snapshots", {"source": "s3://tars/", "kind": "auto", "fields": fields})
    op = {"op": "frombuffer", "field": "data", "args": {"dtype": "uint8", "shape": [None]}}
    pack = {"fields": ["data"], "length": SIZE // 2, "segments": False, "positions": "none"}
    halves = [sample(number)[at : at + 16] for number in range(SAMPLES) for at in (0, SIZE // 2)]
    for number in range(TRIES):  # some kernels take pages away that were read ahead
        spec = {"seed": 2 + number, "ops": [op], "shuffle": {"kind": "global"}, "pack": pack}
        document = {"snapshot": snapshot["snapshot"], "spec": spec, "batch": BATCH}
        plan = str(post(mesh, "/-/plans", document)["plan"])
        disk.drop_caches()
        rows = epoch(mesh, plan, parts=False, samples=2 * SAMPLES)
        assert sorted(rows) == sorted(halves)
        seen = disk.stats()
        if seen.seeks < 2 * SAMPLES / 4 and seen.bytes < 1.3 * COPIES * SAMPLES * SIZE:
            break
    # Each piece took a seek; every node reads all that it stores for batches that are requested whole.
    assert seen.seeks < 2 * SAMPLES / 4, seen
    assert seen.bytes < 1.3 * COPIES * SAMPLES * SIZE


def test_a_relayout_puts_what_a_node_reads_apart_from_its_second_copies(
    mesh: DaemonCluster, disk: RotationalDisk
) -> None:
    count = 320
    with closing(mesh["n2"].client()) as client:
        client.create_bucket(Bucket="loose")
        for number in random.Random(2).sample(range(count), count):
            client.put_object(Bucket="loose", Key=f"{number:04d}.bin", Body=sample(number))
    plan = planned(mesh, "loose", {"kind": "none"})
    disk.drop_caches()
    rows = epoch(mesh, plan, parts=True, samples=count)
    assert rows == [sample(number)[:16] for number in range(count)]
    before = disk.stats().bytes
    assert before > 1.7 * count * SIZE  # what is read lies between second copies

    job = post(mesh, "/-/jobs", {"kind": "relayout", "source": "s3://loose/"})
    report = ended(mesh["n3"], job)["report"]
    assert report["nodes"] == list(NODES)
    assert (report["objects"], report["moved"]) == (COPIES * count, report["to_move"])
    assert report["after"]["disk_seconds"] < 0.7 * report["before"]["disk_seconds"]
    disk.drop_caches()
    assert epoch(mesh, plan, parts=True, samples=count) == rows
    assert disk.stats().bytes < 1.2 * count * SIZE
