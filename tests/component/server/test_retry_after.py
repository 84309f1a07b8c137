"""Every 503 of a mesh says when to ask again, to S3's clients and to the native protocol's."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Answer

require_etcd()

LEASE = 6.0  # seconds: long enough for a write to come to its node on a slow machine
BUCKET = "bucket"


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, lease=LEASE) as mesh:
        mesh["n1"].client().create_bucket(Bucket=BUCKET)
        yield mesh


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _key(mesh: DaemonCluster, decider: str) -> str:
    return mesh.key_with_primary(decider, BUCKET, f"key-{secrets.token_hex(4)}")


def _refused_by_death(mesh: DaemonCluster, target: str) -> Answer:
    """The answer to a write whose node dies with it. On a slow machine it may die before the write has come
    to it: then another one decides, and it is tried again."""
    for patience in (0.5, 1.0, 2.0, 4.0):
        mesh.await_healthy().pause("n2")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(mesh["n1"].request, "PUT", target, b"data")
            threading.Event().wait(patience)
            mesh.kill("n2")
            answer = asked.result(60)
        if answer.status != 200:
            return answer
    raise AssertionError("n2 never had the write")


def test_a_write_whose_node_dies_is_worth_repeating_when_the_lease_has_run_out(mesh: DaemonCluster) -> None:
    target = f"/{BUCKET}/{_key(mesh, 'n2')}"
    answer = _refused_by_death(mesh, target)
    assert answer.status == 503, answer.body
    assert 1 <= int(answer.headers["retry-after"]) <= LEASE + 1  # 1 when it is marked away already
    time.sleep(float(answer.headers["retry-after"]))
    assert mesh["n1"].request("PUT", target, b"data").status == 200


def test_a_write_that_waited_until_its_node_was_away_is_worth_repeating_at_once(mesh: DaemonCluster) -> None:
    target = f"/{BUCKET}/{_key(mesh, 'n3')}"
    mesh.pause("n3")
    answer = mesh["n1"].request("PUT", target, b"data")
    assert answer.status == 503, answer.body
    assert answer.headers["retry-after"] == "1"
    assert mesh["n1"].request("PUT", target, b"data").status == 200


def test_a_node_without_its_lease_is_asked_again_when_it_has_tried_to_renew_it(mesh: DaemonCluster) -> None:
    key = _key(mesh, "n2")
    assert mesh["n2"].request("PUT", f"/{BUCKET}/{key}", b"data").status == 200
    mesh.etcd.kill_member(0)
    mesh.kill("n3")
    mesh.kill("n1")
    while mesh["n2"].request("GET", f"/{BUCKET}/{key}").status == 200:
        threading.Event().wait(0.2)  # until its lease has run out
    for method, target in (
        ("GET", f"/{BUCKET}/{key}"),
        ("GET", f"/{BUCKET}?list-type=2"),
        ("PUT", "/another"),
        ("POST", "/-/cluster/nodes/n1"),
    ):
        answer = mesh["n2"].request(method, target, b'{"action": "drain"}' if method == "POST" else b"")
        assert answer.status == 503, (target, answer.body)
        assert answer.headers["retry-after"] == str(ceil(LEASE / 4)), target
