"""The walks of docs/architecture.md against real requests: the files that it names are passed, their numbers
are those of the page, and none that hands a request on to many others is left out."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk import ops
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.native_fixtures import Mesh, png
from tests.support.walks import PLACE, ROOT, WalkRecorder, common, documented_walk, record_this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Groups = list[set[int]]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WARM, TIMES = 3, 4
TOLERANCE = 5
"""Helpers more or less: a task that runs every second may leave a thread or a callback in every request."""
MANY = 8
"""A file that calls so many others of a walk decides something: the page names it."""


def check(walk: dict[str, set[str]], beginning: str, most: int, skip: str = "\n") -> None:
    in_order, helpers, named = documented_walk(PAGE, beginning, skip)
    found = f"{beginning}: {len(named)} files in order, {len(walk)} with all helpers: {sorted(walk)}"
    assert [name for name in named if name not in walk] == [], found
    assert [name for name, called in walk.items() if len(called) >= MANY and name not in named] == [], found
    assert in_order == len(named) <= most, found
    assert abs(len(walk) - helpers) <= TOLERANCE, found


def recorded(recorder: WalkRecorder, request: Callable[[int], object], groups: Groups) -> dict[str, set[str]]:
    for number in range(WARM):
        request(number)
    turns = [recorder.record(partial(request, number)) for number in range(WARM, WARM + TIMES)]
    return common(turns, groups)


@pytest.fixture(scope="module")
def recorder() -> Iterator[WalkRecorder]:
    with WalkRecorder() as found:
        yield found


@pytest.fixture(scope="module")
def node(recorder: WalkRecorder) -> Iterator[Daemon]:
    daemon = Daemon(None, (), recorder.env, 2)
    daemon.prefix = ("env",)  # not forked: it loads its modules with the profiler
    with daemon:
        daemon.up()
        client = daemon.client()
        client.create_bucket(Bucket="walks")
        client.put_object(Bucket="walks", Key="large", Body=b"w" * 3_000_000)
        for sample in range(32):
            client.put_object(Bucket="walks", Key=f"train/{sample:04d}.png", Body=png(sample))
        yield daemon


def served(node: Daemon) -> Groups:
    """The processes of a node that serve requests, by their kind."""
    kinds = ("worker", "coordinator", "transform")
    return [{pid for name, pid in node.children().items() if name.startswith(kind)} for kind in kinds]


def test_a_signed_get(recorder: WalkRecorder, node: Daemon) -> None:
    client = node.client()

    def get(_: int) -> None:
        assert len(client.get_object(Bucket="walks", Key="large")["Body"].read()) == 3_000_000

    check(recorded(recorder, get, served(node)), "A GET of an object of 3 MB", 18)


def loaded(node: Daemon) -> mesh.Loader:
    client = mesh.connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key)
    dataset = mesh.open("s3://walks/train", fields={"image": "png"}, client=client)
    dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", size=8), ops.to_chw("image"))
    return mesh.Loader(dataset, 4, seed=3, shuffle=True, output="numpy")


def test_a_batch_from_its_address_to_a_tensor(
    recorder: WalkRecorder, node: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LOCAL", "off")  # over TCP, as from another host
    record_this_process(recorder.env[PLACE])
    try:
        with loaded(node) as loader, closing(Mesh(node.endpoint, node.access_key, node.secret_key)) as wire:
            plan = loader.plan.hash

            def frame(step: int) -> None:
                assert wire.raw(plan, 0, step, batch=4).status == 200

            def epoch(_: int) -> None:
                assert len([batch["image"] for batch in loader]) == 8

            on_the_node = recorded(recorder, frame, served(node))
            in_training = recorded(recorder, epoch, [{os.getpid()}])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    check(in_training, "**In the training process**", 10)
    check(on_the_node, "**On the node**", 26, skip="skip the next step")


def test_a_replicated_put_at_the_wrong_node(recorder: WalkRecorder) -> None:
    cluster = DaemonCluster(3, env=recorder.env)
    for each in cluster.nodes.values():
        each.prefix = ("env",)
    with cluster:
        cluster.etcd.__enter__()
        cluster.start_all()
        client = cluster["n1"].client()
        client.create_bucket(Bucket="walks")
        for number in range(1000):
            key = f"key-{number}"
            if "n1" not in [owner.node_id for owner in cluster.route_for("walks", key).write_set]:
                break

        def put(number: int) -> None:
            client.put_object(Bucket="walks", Key=key, Body=b"%d" % number * 100_000)

        groups = [group for each in cluster.nodes.values() for group in served(each)]
        check(recorded(recorder, put, groups), "A PUT of 100 kB with two copies", 25)
