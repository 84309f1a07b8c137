"""Pages of a snapshot that are being made: a worker is killed meanwhile, or the other one makes them, too."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

import pytest

from tests.support.archive_files import tar_of
from tests.support.daemons import Daemon
from tests.support.tf_example_writer import BytesList, example, record

SHARDS, ROWS, PATIENCE = 7, 5, 60.0


def shard(kind: str, number: int) -> tuple[str, bytes]:
    rows = [b"%d %d" % (number, row) for row in range(ROWS)]
    if kind == "lines":
        return f"{number}.txt", b"\n".join(rows)
    if kind == "tar":
        return f"{number}.tar", tar_of({f"{row}.txt": text for row, text in enumerate(rows)})
    return f"{number}.tfrecord", b"".join(record(example({"x": BytesList([row])})) for row in rows)


def pin(daemon: Daemon, kind: str) -> Any:
    """Open a source, as often as it takes."""
    field = {"feature": "x"} if kind == "tfrecord" else {"ext": ["txt"]}
    wanted = json.dumps({"source": f"s3://{kind}", "kind": kind, "fields": {"text": field}}).encode()
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            answer = daemon.request("POST", "/-/snapshots", wanted)
        except (OSError, HTTPException):
            assert time.monotonic() < deadline
            continue
        if answer.status == 200:
            return json.loads(answer.body)
        assert answer.status in (429, 503), answer.body
        assert time.monotonic() < deadline


@pytest.mark.timeout(480)
def test_what_a_killed_worker_has_made_is_not_made_again() -> None:
    with Daemon.start(env={"MESHD_FAILPOINTS": "indexes.made=kill:after 3"}) as daemon:
        s3 = daemon.client()
        for kind in ("lines", "tar", "tfrecord"):
            s3.create_bucket(Bucket=kind)
            for number in range(SHARDS):
                key, data = shard(kind, number)
                s3.put_object(Bucket=kind, Key=key, Body=data)
        lives, found = {daemon.children()["worker-0"]}, {}
        for kind in ("lines", "tar", "tfrecord"):
            found[kind] = pin(daemon, kind)
            lives.add(daemon.children()["worker-0"])
        assert len(lives) == 4
        daemon.stop()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        for kind, snapshot in found.items():
            assert (snapshot["samples"], snapshot["shards"]) == (SHARDS * ROWS, SHARDS)
            assert pin(daemon, kind) == snapshot
        s3.close()


@pytest.mark.timeout(480)
def test_two_workers_that_index_the_same_shards_at_once_agree() -> None:
    with Daemon.start(workers=2, env={"MESHD_FAILPOINTS": "indexes.made=sleep(100)"}) as daemon:
        s3 = daemon.client()
        for kind in ("lines", "tar", "tfrecord"):
            s3.create_bucket(Bucket=kind)
            for number in range(SHARDS):
                key, data = shard(kind, number)
                s3.put_object(Bucket=kind, Key=key, Body=data)
        found = {}
        for kind in ("lines", "tar", "tfrecord"):
            with ThreadPoolExecutor(8) as pool:  # connections of their own, so both workers are asked
                answers = list(pool.map(pin, [daemon] * 8, [kind] * 8, timeout=2 * PATIENCE))
            assert all(answer == answers[0] for answer in answers)
            assert (answers[0]["samples"], answers[0]["shards"]) == (SHARDS * ROWS, SHARDS)
            found[kind] = answers[0]
        daemon.stop()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        for kind, snapshot in found.items():
            assert pin(daemon, kind) == snapshot
        s3.close()
