"""A warm-up of a mesh: each node fills its decoded cache with the samples whose rows it will build."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh_sdk
from meshsdk import ops
from tests.component.batches.test_decoded_cache_daemon import (
    SAMPLES,
    counted,
    fill,
    plan_of,
    wait_until,
)
from tests.component.batches.test_warm_up import ended, job, start
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import with_failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGS = ("--transform-workers", "1", "--frame-cache", "1MiB", "--decoded-cache", "256MiB")


@contextlib.contextmanager
def two_nodes() -> Iterator[DaemonCluster]:
    """A mesh with the samples."""
    with DaemonCluster.start(2, args=ARGS) as found:
        fill(found["n1"])
        yield found


def stored(mesh: DaemonCluster) -> dict[str, float]:
    return {name: counted(mesh[name], 'warmed_total{result="stored"}') for name in mesh.nodes}


def wanted(mesh: DaemonCluster, result: str) -> float:
    return sum(counted(node, f'reads_total{{result="{result}"}}') for node in mesh.nodes.values())


def test_each_node_keeps_its_own_samples_and_a_loader_finds_all() -> None:
    with two_nodes() as mesh:
        node = mesh["n1"]
        with mesh_sdk.connect(
            node.endpoint, access_key=mesh.access_key, secret_key=mesh.secret_key
        ) as client:
            data = mesh_sdk.open("s3://photos/train/", {"image": "jpg"}, client=client)
            data = data.map(ops.decode("image"), ops.random_resized_crop("image", size=160))
            with mesh_sdk.Loader(data, 16, output="numpy") as loader:
                found = mesh_sdk.warm(loader)
                assert found.state == "done", found
                assert found.report["stored"] + found.report["there"] == SAMPLES
                each = stored(mesh)
                assert all(0 < count < SAMPLES for count in each.values()), each
                assert sum(1 for _ in loader) == SAMPLES // 16
        assert wanted(mesh, "miss") == 0
        assert wanted(mesh, "hit") == SAMPLES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_killed_node_warms_up_again(victim: str) -> None:
    with with_failpoints("transform.row=sleep(200)"), two_nodes() as mesh:
        plan = plan_of(mesh["n1"])
        running = start(mesh["n1"], plan)
        assert wait_until(lambda: job(mesh["n1"], running)["progress"]["samples"] > 4)
        mesh.kill(victim)
        mesh.up(victim)
        found: dict[str, Any] = ended(mesh["n1"], running)
        assert found["state"] == "done", json.dumps(found)
        assert found["report"]["stored"] + found["report"]["there"] == SAMPLES
        assert sum(counted(node, "bytes") for node in mesh.nodes.values()) > SAMPLES * 320 * 240 * 3
