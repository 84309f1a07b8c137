"""A mesh whose nodes keep decoded samples: together, all that their quotas allow, whoever joins or leaves."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.cli import run
from tests.component.batches.test_decoded_cache_daemon import counted, reads, wait_until
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ARGUMENTS = ("--transform-workers", "1", "--frame-cache", "1MiB", "--decoded-cache", "256MiB")
SAMPLES, BATCH = 600, 40
RESULT = 120 * 120 * 3
QUOTA = 4 << 20
LEAST = 0.9
"""Of what all quotas together allow, and of all samples where they fit."""


def picture(number: int) -> bytes:
    """One that takes much longer to decode than its result to read."""
    small = np.random.default_rng(number).integers(0, 256, (60, 80, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((640, 480)).save(file, "JPEG", quality=90)
    return file.getvalue()


@contextlib.contextmanager
def three_nodes() -> Iterator[DaemonCluster]:
    """A mesh with the samples."""
    pictures = [picture(number) for number in range(8)]
    with DaemonCluster.start(3, args=ARGUMENTS) as mesh:
        with contextlib.closing(mesh["n1"].client()) as client, ThreadPoolExecutor(4) as pool:
            client.create_bucket(Bucket="photos")

            def put(number: int) -> None:
                body = pictures[number % len(pictures)]
                client.put_object(Bucket="photos", Key=f"train/{number:05}.jpg", Body=body)

            list(pool.map(put, range(SAMPLES), timeout=120))
        yield mesh


def running(mesh: DaemonCluster) -> list[str]:
    return [name for name, node in mesh.nodes.items() if node.running]


def kept_bytes(mesh: DaemonCluster) -> dict[str, float]:
    return {name: counted(mesh[name], "bytes") for name in running(mesh)}


def evicted(mesh: DaemonCluster, names: Iterable[str]) -> float:
    return sum(counted(mesh[name], "evicted_bytes_total") for name in names)


def hits(mesh: DaemonCluster) -> float:
    return sum(reads(mesh[name], "hit") for name in running(mesh))


@pytest.mark.timeout(300)
def test_nodes_keep_together_what_their_quotas_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SAMPLES * RESULT > 2 * 3 * QUOTA > SAMPLES * RESULT / 2
    with three_nodes() as mesh:
        monkeypatch.setenv("MESH_ENDPOINT", mesh["n1"].endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", mesh.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", mesh.secret_key)
        assert run(["bucket", "change", "photos", "--decoded-quota", str(QUOTA)]) == 0
        client = meshsdk.connect(mesh["n1"].endpoint, access_key=mesh.access_key, secret_key=mesh.secret_key)
        data = meshsdk.open("s3://photos/train/", {"image": "jpg"}, client=client)
        data = data.map(ops.decode("image"), ops.resize("image", [120, 120]), ops.random_crop("image", 100))
        with client, meshsdk.Loader(data, BATCH, output="numpy") as loader:

            def epochs(count: int) -> None:
                for _ in range(count):
                    assert sum(1 for _ in loader) == SAMPLES // BATCH

            def keeps_nearly_all() -> bool:  # on a busy machine a node may find some reads too slow
                before = hits(mesh)
                epochs(1)
                return hits(mesh) - before >= LEAST * SAMPLES

            epochs(3)
            found = kept_bytes(mesh)
            assert all(size <= QUOTA for size in found.values()), found
            assert sum(found.values()) >= LEAST * 3 * QUOTA, found
            before = hits(mesh)
            epochs(1)
            assert hits(mesh) - before >= LEAST * 3 * QUOTA / (RESULT + 256)

            mesh.add("n4")
            mesh.await_map(lambda cluster: len(cluster.nodes) == 4 and not cluster.is_rebalancing)

            def uses_all_quotas() -> bool:  # when the entries of samples that went to n4 have made room
                before = hits(mesh)
                epochs(1)
                return hits(mesh) - before >= 0.85 * 4 * QUOTA / (RESULT + 256)

            assert wait_until(uses_all_quotas)
            joined = kept_bytes(mesh)
            assert all(size <= QUOTA for size in joined.values()), joined
            assert joined["n4"] >= 0.75 * QUOTA, joined
            gone = evicted(mesh, found)
            assert 0 < gone <= 3 * QUOTA / 2, "a quarter went to n4"

            mesh.kill("n4")
            mesh.await_state("n4", "away", "down")
            epochs(1)
            left = kept_bytes(mesh)
            assert all(QUOTA >= left[name] >= joined[name] for name in found), left
            assert evicted(mesh, found) == gone, "something was thrown away"

            assert run(["bucket", "change", "photos", "--decoded-quota", "none"]) == 0
            assert wait_until(keeps_nearly_all)
