"""Who sees what, addresses that are refused, processes that die."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshwire.frame.sample_frames import SampleFrame
from tests.support.daemons import Daemon
from tests.support.native_fixtures import FIELDS, Mesh, error, fill

if TYPE_CHECKING:
    from pathlib import Path


def test_others_see_nothing(node: Daemon, mesh: Mesh, pictures: str) -> None:
    snapshot = mesh.snapshot(f"s3://{pictures}/train")["snapshot"]
    plan = mesh.plan(snapshot)["plan"]
    mesh.frame(plan, batch=4)
    eve = Mesh(node.endpoint, "EVEKEY", "evesecret")
    answers = [
        eve.post("/-/snapshots", {"source": f"s3://{pictures}/train", "fields": FIELDS}),
        eve.call("GET", f"/-/snapshots/{snapshot}"),
        eve.post(f"/-/snapshots/{snapshot}/read-cost", {"shuffles": [{"kind": "global"}]}),
        eve.post("/-/plans", {"snapshot": snapshot, "spec": {"ops": []}}),
        eve.call("GET", f"/-/plans/{plan}"),
        eve.raw(plan, batch=4),
        eve.raw(plan, batch=4, format="samples"),
        eve.raw(plan, batch=4, format="tar"),
        eve.call("GET", f"/-/plans/{plan}/bad"),
        eve.post(f"/-/plans/{plan}/rows", {"samples": [1]}),
    ]
    assert [(answer.status, error(answer)["code"]) for answer in answers] == [(403, "AccessDenied")] * 10
    gathered = eve.post("/-/gather", {"items": [{"bucket": pictures, "key": "train/dog/0000.png"}]})
    assert SampleFrame(gathered.body).status.tolist() == [4]
    eve.close()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("batch=0", 400), ("batch=-1", 400), ("batch=x", 400), ("batch=99999999999999999999", 400),
        ("world=0", 400), ("rank=1", 400), ("rank=2&world=2", 400), ("origin=51", 400), ("format=xml", 400),
        ("bach=4", 400), ("batch=4&batch=4", 400), ("batch=%ff", 400), ("a=1&" * 200, 400),
        ("batch=16777216&format=tar", 413),
        ("batch=16777216", 413),
    ],
)  # fmt: skip
def test_addresses_refused(mesh: Mesh, pictures: str, query: str, status: int) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    answer = mesh.call("GET", f"/-/plans/{plan}/0/0?{query}")
    assert answer.status == status, answer.body
    error(answer)


@pytest.mark.parametrize(
    "target",
    ["/-/plans/", "/-/plans/abc", "/-/plans/abc/0/0", "/-/plans/%00/0/0", "/-/snapshots/..%2f..%2fetc"],
)
def test_paths_refused(mesh: Mesh, target: str) -> None:
    answer = mesh.call("GET", target)
    assert answer.status in (400, 404)
    error(answer)


def test_steps_and_epochs_that_are_no_numbers(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    for place in ("x/0", "0/x", "-1/0", "0/-1", "0/0/0", "0/9999", "1e3/0"):
        assert mesh.call("GET", f"/-/plans/{plan}/{place}").status in (400, 404)


def test_unsigned_requests_are_refused(mesh: Mesh) -> None:
    request = f"GET /-/plans/{'0' * 64} HTTP/1.1\r\nHost: {mesh.host}\r\n\r\n".encode()
    assert mesh.exchange(request, method="GET").status == 403


def test_a_transform_process_that_dies_costs_nothing_but_time(
    node: Daemon, mesh: Mesh, pictures: str
) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"], seed=123)["plan"]
    wanted = mesh.frame(plan, 5, 0, batch=48)
    for name in ("transform-0", "transform-1"):
        node.signal_child(name, signal.SIGKILL)
    got = mesh.frame(plan, 5, 0, batch=48, origin=0, rank=0, world=1)
    np.testing.assert_array_equal(got["image"], wanted["image"])
    other = [mesh.frame(plan, 5, 0, batch=48, rank=rank, world=2) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in other]), wanted["image"])
    assert not np.concatenate([part["__status"] for part in other]).any()


def test_a_process_that_dies_in_the_middle_loses_nothing(s3: Any, tmp_path: Path) -> None:
    env = {"MESHD_FAILPOINTS": "transform.row=kill:after 30"}
    with Daemon.start(tmp_path / "data", env=env) as node:
        client = node.client()
        client.create_bucket(Bucket="crashing")
        fill(client, "crashing", 40)
        mesh = Mesh(node.endpoint, node.access_key, node.secret_key)
        plan = mesh.plan(mesh.snapshot("s3://crashing/train")["snapshot"], max_bad=1.0)["plan"]
        got = mesh.frame(plan, batch=40)
        mesh.close()
        # The process dies at its 31st row, and its successor serves the rest: nothing is lost.
        assert sorted(got["image"][:, 0, 0, 0].tolist()) == list(range(40))
        assert not got["__status"].any()
