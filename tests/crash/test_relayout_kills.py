"""Relayouts killed with -9: what was acknowledged is there, whole, and the job goes on to the end."""

from __future__ import annotations

import os
import random
import select
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
    """Replaces, removes and tags some of the objects, one at a time. `want`: what is there, by key; `tags`:
    those of keys that have some."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.want, self._rng = daemon, dict[str, bytes | None](), random.Random(3)
        self.tags: dict[str, str] = {}

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
        for number in range(0, COUNT, 6):
            self.tag(s3, f"train/{number:03d}", "first")

    def tag(self, s3: Any, key: str, value: str) -> None:
        tagging = {"TagSet": [{"Key": "t", "Value": value}]}
        s3.put_object_tagging(Bucket="photos", Key=key, Tagging=tagging)
        self.tags[key] = value

    def change(self, count: int) -> None:
        s3 = self.daemon.client()
        for number, key in enumerate(self._rng.sample(sorted(self.want), count)):
            if number % 3 == 2 and self.want[key] is not None:
                self.tag(s3, key, str(number))
                continue
            self.tags.pop(key, None)
            if number % 3 == 1:
                s3.put_object(Bucket="photos", Key=key, Body=content(number, 1))
                self.want[key] = content(number, 1)
            else:
                s3.delete_object(Bucket="photos", Key=key)
                self.want[key] = None


@pytest.mark.timeout(400)
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
            daemon.signal_child("coordinator-0")
            threading.Event().wait(0.7)
        daemon.kill()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        start(daemon, kind="relayout", source=SOURCE)  # the same job, without a limit
        found = ended(daemon, job)
        assert found["state"] == "done", found
        report = found["report"]
        assert (report["after"] or report["before"])["seeks"] < 10
        check(daemon, client.want, client.tags)
        daemon.stop()
        settings = load_settings({"data_dir": str(daemon.data_dir)}, env={}).store
        assert (checked := check_store(settings)).clean, checked.problems
        assert rebuild_index(settings).problems == []
        daemon.up()
        check(daemon, client.want, client.tags)
    finally:
        daemon.close()


def check(daemon: Daemon, want: dict[str, bytes | None], tags: dict[str, str]) -> None:
    """Every current version, and of every key the first version."""
    s3 = daemon.client()
    listed: dict[str, Any] = {
        entry["Key"]: entry for entry in s3.list_objects_v2(Bucket="photos", MaxKeys=1000)["Contents"]
    }
    assert sorted(listed) == sorted(key for key, body in want.items() if body is not None)
    for key, body in want.items():
        if body is not None:
            found = s3.get_object(Bucket="photos", Key=key)
            assert (found["Body"].read(), found.get("TagCount", 0)) == (body, key in tags)
    for key in sorted(tags)[::3]:
        assert s3.get_object_tagging(Bucket="photos", Key=key)["TagSet"] == [{"Key": "t", "Value": tags[key]}]
    versions = s3.list_object_versions(Bucket="photos", MaxKeys=1000)["Versions"]
    oldest = {entry["Key"]: entry["VersionId"] for entry in versions}
    assert len(oldest) == COUNT
    for key, version in oldest.items():
        body = s3.get_object(Bucket="photos", Key=key, VersionId=version)["Body"].read()
        assert body == content(int(key[-3:]), 0)
