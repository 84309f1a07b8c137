"""Epochs from a rotational disk: what reaches the disk, counted below the file system, not timed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.batches.read_ahead.disk_reader import SHORT_BYTES, DiskReader, DiskWork, _Read
from meshd.batches.read_ahead.extents import READ_BYTES, plan_reads
from meshd.store.disks.disk_type import request_limit
from meshd.store.disks.layout import Disks
from meshd.store.engine.data_files import Segment
from meshd.util.clock import SystemClock
from meshsdk.admin.cluster_admin import scrape
from meshsdk.client.settings import parse_endpoint
from meshwire.frame import tensor_frame
from meshwire.frame.sample_frames import ragged_rows
from tests.support.daemons import Daemon
from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.rotational_disk import ReadLog, RotationalDisk

SAMPLES, SIZE, SHARD, BATCH = 600, 64 << 10, 50, 40
TRIES = 3
PAGE = 4096
ORDERS: dict[str, dict[str, Any]] = {
    "blocks": {"kind": "blocks", "shards": 4},
    "global": {"kind": "global"},
    "stored": {"kind": "none"},
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path_factory.mktemp("drive")) as made:
        yield made


def sample(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE - random.Random(-number).randrange(4096))


def fill(daemon: Daemon) -> None:
    """The same samples as objects of their own, and in tars."""
    with contextlib.closing(daemon.client()) as client:
        for bucket in ("loose", "tars"):
            client.create_bucket(Bucket=bucket)
        for number in range(SAMPLES):
            client.put_object(Bucket="loose", Key=f"{number:05d}.bin", Body=sample(number))
        for first in range(0, SAMPLES, SHARD):
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w") as archive:
                for number in range(first, first + SHARD):
                    member = tarfile.TarInfo(f"{number:05d}.bin")
                    member.size = len(data := sample(number))
                    archive.addfile(member, io.BytesIO(data))
            client.put_object(Bucket="tars", Key=f"{first:05d}.tar", Body=file.getvalue())


class Node:
    """A daemon whose data files are on the disk, and its index elsewhere."""

    def __init__(self, disk: RotationalDisk, folder: Path, *args: str) -> None:
        self.disk = disk
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(folder / "index"))
        self.daemon = Daemon.start(folder / "data", args=(*where, *args))

    def plan(self, bucket: str, shuffle: dict[str, Any], seed: int) -> str:
        source = {"source": f"s3://{bucket}/", "kind": "auto", "fields": {"data": {"ext": ["bin"]}}}
        snapshot = self.post("/-/snapshots", source)["snapshot"]
        spec = {"seed": seed, "ops": [], "shuffle": shuffle}
        found: str = self.post("/-/plans", {"snapshot": snapshot, "spec": spec, "batch": BATCH})["plan"]
        return found

    def post(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer = self.daemon.request("POST", path, json.dumps(document).encode())
        assert answer.status == 200, answer.body
        result: dict[str, Any] = json.loads(answer.body)
        return result

    def epoch(self, plan: str, epoch: int = 0) -> list[str]:
        """Request the batches of an epoch as a loader does, four at a time; the samples' hashes in order."""

        def get(step: int) -> list[str]:
            answer = self.daemon.request("GET", f"/-/plans/{plan}/{epoch}/{step}?batch={BATCH}")
            assert answer.status == 200, answer.body
            rows = ragged_rows(tensor_frame.tensor_views(answer.body), "data")
            return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]

        with ThreadPoolExecutor(4) as pool:
            return [row for rows in pool.map(get, range(SAMPLES // BATCH)) for row in rows]

    def cold_epoch(
        self, bucket: str, order: str, seed: int, enough: Callable[[ReadLog], bool] = lambda _: True
    ) -> ReadLog:
        """An epoch with an empty page cache; every sample must come once. One that has not read little
        `enough` is tried again: some kernels take pages away that were read ahead for batches that come
        seconds later."""
        for number in range(TRIES):
            seen = self._cold_epoch(bucket, order, seed + 100 * number)  # frames of a seed are cached
            if enough(seen):
                break
        return seen

    def _cold_epoch(self, bucket: str, order: str, seed: int) -> ReadLog:
        plan = self.plan(bucket, ORDERS[order], seed)
        self.await_rest()
        self.disk.drop_caches()
        rows = self.epoch(plan)
        assert sorted(rows) == HASHES
        return self.disk.stats()

    def await_rest(self) -> None:
        """Wait until nothing is read ahead any more, such as the window of an earlier plan's next epoch."""
        seen, alike = -1.0, 0
        for _ in range(200):
            before, seen = seen, self.counted("read_ahead_seconds")
            alike = alike + 1 if seen == before else 0
            if alike == 3:
                return
            threading.Event().wait(0.3)
        raise AssertionError(f"reads ahead do not end: {seen} s\n{self.daemon.output()}")

    def counted(self, name: str) -> float:
        told = scrape(parse_endpoint(self.daemon.endpoint))
        assert f"meshd_{name}_total" in told.values
        return told.sum_of(f"meshd_{name}_total")


HASHES = sorted(hashlib.sha256(sample(number)).hexdigest() for number in range(SAMPLES))


@pytest.fixture(scope="module")
def node(disk: RotationalDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    made = Node(disk, folder, "--read-ahead", "64MiB")
    with contextlib.closing(made.daemon):
        fill(made.daemon)
        yield made


@pytest.mark.parametrize("bucket", ["tars", "loose"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_is_read_in_runs_whatever_its_order(node: Node, bucket: str, order: str) -> None:
    most = SAMPLES / (4 if order == "global" else 20)

    def in_runs(seen: ReadLog) -> bool:
        quick = order == "global" or seen.seek_s < seen.media_s
        return seen.bytes < 1.3 * SAMPLES * SIZE and seen.seeks < most and quick

    seen = node.cold_epoch(bucket, order, 1, in_runs)
    assert in_runs(seen), seen


def test_without_it_an_epoch_costs_many_times_the_seeks(
    disk: RotationalDisk, node: Node, tmp_path: Path
) -> None:
    ordered = node.cold_epoch("loose", "global", seed=2)
    node.daemon.stop()
    try:
        node.daemon.args = (*node.daemon.args, "--disk-type", "solid-state")
        node.daemon.up()
        plain = node.cold_epoch("loose", "global", seed=3)
    finally:
        node.daemon.stop()
        node.daemon.args = node.daemon.args[:-2]
        node.daemon.up()
    assert plain.seeks > 5 * ordered.seeks


def test_the_next_epoch_of_cached_data_reads_nothing(node: Node) -> None:
    plan = node.plan("tars", ORDERS["global"], seed=4)
    assert sorted(node.epoch(plan)) == HASHES
    node.disk.stats()
    read_ahead = []
    for epoch in range(1, 5):
        before, read = node.disk.stats().bytes, node.counted("read_ahead_samples")
        assert sorted(node.epoch(plan, epoch=epoch)) == HASHES
        # Not 0: some kernels take single pages away within seconds. A window that misses one is read.
        assert node.disk.stats().bytes - before < SAMPLES * SIZE // 100
        read_ahead.append(node.counted("read_ahead_samples") - read)
    assert 0 in read_ahead, read_ahead


@pytest.mark.parametrize("size", [READ_BYTES, SHORT_BYTES])
def test_the_kernel_makes_the_requests_that_the_reader_counts_as_its_own(
    disk: RotationalDisk, size: int
) -> None:
    """Whatever more the disk has to do is a read of others, which goes first."""
    path, total = disk.path / "window", 32 * MIB
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, total)
        file.write(random.Random(0).randbytes(total))
    device = path.stat().st_dev
    most = min(size, request_limit(device))
    places = np.arange(0, total, size)
    reads = plan_reads(np.zeros(len(places)), places, np.full(len(places), size), read=size)
    counted, done, begin = list[int](), threading.Event(), _Read.begin

    def begin_counted(read: _Read, request_bytes: int) -> None:
        counted.append(read.requests_left(request_bytes))
        begin(read, request_bytes)

    disk.drop_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Read, "begin", begin_counted)
        reader = DiskReader(device, SystemClock())
        reader.submit(DiskWork(device, [str(path)], reads, done.set))
        assert done.wait(60)
        reader.close()
    requests = [each for each in disk.stats().requests if each.length > PAGE]  # no inodes
    path.unlink()
    assert sum(counted) == total // most
    assert abs(len(requests) - sum(counted)) <= 2  # where the file changes from one run to the next
    assert max(each.length for each in requests) <= most


@pytest.mark.parametrize("in_runs", [True, False])
def test_writers_at_the_same_time_get_space_in_runs(disk: RotationalDisk, in_runs: bool) -> None:
    """Of 16 MiB each in small members; without runs, the file system gives them every other piece."""
    root = disk.path / f"runs-{in_runs}"
    disks = Disks({0: root})
    for file in (1, 2):
        Path(disks.directory(0, file)).mkdir(parents=True, exist_ok=True)
    free = os.statvfs(disk.path).f_bavail
    segments = [Segment(disks, 0, file, in_runs=in_runs) for file in (1, 2)]
    for _ in range(128):
        for segment in segments:
            segment.append(bytes(512), [bytes(128 << 10)], 128 << 10)
            segment.write_pending()
            segment.sync()
            segment.mark_committed()
    for segment in segments:
        segment.seal(durable=True)
        told = subprocess.run(
            ["filefrag", segment.path], capture_output=True, text=True, timeout=30, check=True
        )
        assert (int(told.stdout.split()[1]) <= 3) == in_runs, told.stdout
        assert os.stat(segment.path).st_blocks * 512 < 17 * MIB  # what was reserved is free again
        os.unlink(segment.path)
    assert abs(os.statvfs(disk.path).f_bavail - free) < 100
