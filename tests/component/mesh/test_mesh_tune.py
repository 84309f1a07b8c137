"""`mesh tune` on a mesh of three nodes: what it sees of a loop, and the quota that it raises."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin.cluster_admin import create_bucket, show_bucket
from meshsdk.cli import run
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, BATCH, QUOTA = 192, 32, 400 << 10
NODES = ("n1", "n2", "n3")


def picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 255, (12, 16, 3), np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.resize(noise, (480, 360)))[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[DaemonCluster]:
    """Three nodes that may keep 400 KiB of results each, of 3.5 MiB that all samples take."""
    with DaemonCluster.start(3, args=("--decoded-cache", "32MiB", "--durability", "relaxed")) as made:
        where, key, secret = made["n1"].endpoint, made.access_key, made.secret_key
        with mesh.connect(where, access_key=key, secret_key=secret) as root:
            create_bucket(root.transport, "photos", {"copies": 1})
        with closing(made["n1"].client()) as client:
            for number in range(SAMPLES):
                client.put_object(Bucket="photos", Key=f"train/{number:04}.jpg", Body=picture(number))
        yield made


@pytest.fixture
def endpoint(cluster: DaemonCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", cluster.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", cluster.secret_key)
    monkeypatch.setenv("MESH_ENDPOINT", ",".join(cluster.endpoints.values()))
    return cluster["n1"].endpoint


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(["tune", "--json", "--window", "5", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_quota_is_found_raised_and_measured(
    cluster: DaemonCluster, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bucket", "change", "photos", "--decoded-quota", str(QUOTA)]) == 0
    ds = mesh.open("s3://photos/train/", fields={"image": "jpg"})
    ds = ds.map(ops.decode("image"), ops.resize("image", [80, 80]), ops.random_crop("image", 64))
    loader = mesh.Loader(ds, BATCH, seed=1, report="resnet", output="numpy")
    received, ended, epochs = [0], threading.Event(), threading.Semaphore(0)

    def train() -> None:
        while not ended.is_set():
            for batch in loader:
                received[0] += batch.rows
                if ended.wait(0.01):  # decoding takes longer, so the loop waits for it
                    break
            epochs.release()

    training = threading.Thread(target=train, daemon=True)
    training.start()
    try:
        for _ in range(3):
            assert epochs.acquire(timeout=60)
        before = received[0]
        capsys.readouterr()
        advice, outcome = told(capsys, "--apply", "--yes", "--only", "decoded quota", "--patience", "60")
        assert sorted(advice["nodes"]) == list(NODES)
        [loop] = advice["loops"]
        # A report counts at one node, though each step has a request to all three.
        assert 0 < loop["samples_per_second"] * advice["seconds"] < 1.5 * (received[0] - before)
        [change] = advice["changes"]
        assert change["live"]
        assert change["gain"] > 1.03
        assert change["setting"]["before"] == QUOTA
        with mesh.connect() as client:
            shown = show_bucket(client.transport, "photos")
        assert shown.decoded_quota == change["setting"]["value"] > QUOTA
        assert outcome["settled"]
        assert outcome["predicted"] == pytest.approx(change["gain"], rel=0.001)
        assert outcome["after"] > 0
        again, _ = told(capsys, "--apply", "--yes", "--only", "copies")
        assert [(each["kind"], each["gain"]) for each in again["changes"]] == [("copies", 1.0)]
        with mesh.connect() as client:
            assert show_bucket(client.transport, "photos").wanted == 2
        assert advice["decoded_hits"] < 0.9 < 0.99 < again["decoded_hits"]
    finally:
        ended.set()
        training.join(60)
