"""Relayouts killed with -9: what was acknowledged is there, whole, and the job goes on to the end."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshd.config import load_settings
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from tests.support.daemons import Daemon
from tests.support.job_fixtures import ended, start

if TYPE_CHECKING:
    from pathlib import Path

COUNT, SIZE, RATE = 60, 20_000, 512 << 10
SOURCE = "s3://photos/"


def content(number: int, version: int) -> bytes:
    return random.Random(number * 1000 + version).randbytes(SIZE)


class Client:
    """Replaces and removes some of the objects, one at a time. `want`: what is there, by key."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.want, self._rng = daemon, dict[str, bytes | None](), random.Random(3)

    def fill(self) -> None:
        s3 = self.daemon.client()
        for bucket in ("photos", "others"):
            s3.create_bucket(Bucket=bucket)
        s3.put_bucket_versioning(Bucket="photos", VersioningConfiguration={"Status": "Enabled"})
        for number in self._rng.sample(range(COUNT), COUNT):
            key = f"train/{number:03d}"
            s3.put_object(Bucket="photos", Key=key, Body=content(number, 0))
            s3.put_object(Bucket="others", Key=key, Body=bytes(900_000))
            self.want[key] = content(number, 0)

    def change(self, count: int) -> None:
        s3 = self.daemon.client()
        for number, key in enumerate(self._rng.sample(sorted(self.want), count)):
            if number % 3:
                s3.put_object(Bucket="photos", Key=key, Body=content(number, 1))
                self.want[key] = content(number, 1)
            else:
                s3.delete_object(Bucket="photos", Key=key)
                self.want[key] = None


@pytest.mark.timeout(120)
def test_killed_while_objects_move(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data", ("--disk-type", "rotational"), {}, 2)
    client = Client(daemon)
    try:
        daemon.up()
        client.fill()
        daemon.kill()
        # 26 objects are moved at a time: the second time, in the middle of a group.
        daemon.env["MESHD_FAILPOINTS"] = "store.compact.placed=kill:after 30"
        daemon.up()
        watched = os.pidfd_open(daemon.children()["coordinator-0"])
        job = start(daemon, kind="relayout", source=SOURCE, rate=RATE)
        client.change(10)
        assert select.select([watched], [], [], 60)[0], "the coordinator was not killed"
        os.close(watched)
        daemon.kill()
        daemon.env["MESHD_FAILPOINTS"] = "store.compact.placed=sleep(20)"
        daemon.up()
        for _ in range(2):
            client.change(10)
            os.kill(daemon.children()["coordinator-0"], signal.SIGKILL)
            threading.Event().wait(0.7)
        daemon.kill()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        start(daemon, kind="relayout", source=SOURCE)  # the same job, without a limit
        found = ended(daemon, job)
        assert found["state"] == "done", found
        report = found["report"]
        assert (report["after"] or report["before"])["seeks"] < 10
        check(daemon, client.want)
        daemon.stop()
        settings = load_settings({"data_dir": str(daemon.data_dir)}, env={}).store
        assert (checked := check_store(settings)).clean, checked.problems
        assert rebuild_index(settings).problems == []
        daemon.up()
        check(daemon, client.want)
    finally:
        daemon.close()


def check(daemon: Daemon, want: dict[str, bytes | None]) -> None:
    """Every current version, and of every key the first version."""
    s3 = daemon.client()
    listed: dict[str, Any] = {
        entry["Key"]: entry for entry in s3.list_objects_v2(Bucket="photos", MaxKeys=1000)["Contents"]
    }
    assert sorted(listed) == sorted(key for key, body in want.items() if body is not None)
    for key, body in want.items():
        if body is not None:
            assert s3.get_object(Bucket="photos", Key=key)["Body"].read() == body
    versions = s3.list_object_versions(Bucket="photos", MaxKeys=1000)["Versions"]
    oldest = {entry["Key"]: entry["VersionId"] for entry in versions}
    assert len(oldest) == COUNT
    for key, version in oldest.items():
        body = s3.get_object(Bucket="photos", Key=key, VersionId=version)["Body"].read()
        assert body == content(int(key[-3:]), 0)
