"""The end of a job: once it is told as cancelled or paused, nothing of that run is written any more, whatever
its kind and however slow a commit is."""

from __future__ import annotations

import json
import random
import secrets
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.archive_files import archive_of
from tests.support.bounded_wait import await_true
from tests.support.daemons import FAILPOINTS, Daemon
from tests.support.job_fixtures import start

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT: Final = 1.0
"""Seconds that each commit takes; jobs' states are not kept in the store."""
SIZE: Final = 600 << 10  # two of these are not extracted together
VIEW: Final = (
    b'{"bucket": "samples", "name": "v", "view": {"kind": "shards", "prefix": "plain/", "count": 40}}'
)
JOBS: Final[dict[str, dict[str, Any]]] = {
    "shard": {"kind": "shard", "source": "s3://samples/plain", "count": 20},
    "reshard": {"kind": "reshard", "source": "s3://samples/packed", "count": 10},
    "extract": {"kind": "extract", "source": "s3://samples/packed"},
    "materialize": {"kind": "materialize", "source": "s3://samples--v/"},
}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    bodies = random.Random(7)
    with Daemon.start() as running:
        s3 = running.client()
        for bucket in ("samples", "made"):
            s3.create_bucket(Bucket=bucket)
        for number in range(40):
            s3.put_object(Bucket="samples", Key=f"plain/{number:03d}.txt", Body=b"x" * number)
        packed = archive_of("tar", {f"{number:03d}.bin": bodies.randbytes(SIZE) for number in range(10)})
        s3.put_object(Bucket="samples", Key="packed/all.tar", Body=packed)
        assert running.request("POST", "/-/views", VIEW).status == 200
        running.stop()
        running.env[FAILPOINTS] = f"store.data.before_sync=sleep({COMMIT * 1000:g})"
        running.up()
        yield running


def state(node: Daemon, job: dict[str, Any]) -> str:
    return str(json.loads(node.request("GET", f"/-/jobs/{job['id']}").body)["state"])


def written(node: Daemon, prefix: str) -> set[str]:
    listed = node.client().list_objects_v2(Bucket="made", Prefix=prefix)
    return {entry["Key"] for entry in listed.get("Contents", [])}


@pytest.mark.parametrize(("query", "told"), [("", "cancelled"), ("?pause=1", "paused")])
@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_is_told_to_have_ended_writes_no_more(
    node: Daemon, kind: str, query: str, told: str
) -> None:
    prefix = f"{kind}-{secrets.token_hex(4)}/"
    job = start(node, **JOBS[kind], target=f"s3://made/{prefix}")
    await_true(lambda: written(node, prefix))  # and the next ones are being committed
    assert node.request("DELETE", f"/-/jobs/{job['id']}{query}").status == 200
    await_true(lambda: state(node, job) not in ("running", "cancelling", "pausing"))
    there = written(node, prefix)
    assert state(node, job) == told
    threading.Event().wait(1.5 * COMMIT)
    assert written(node, prefix) == there
