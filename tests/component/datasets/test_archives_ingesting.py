"""Archives are indexed without being asked for, however they come in and whatever dies meanwhile."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.archive_files import archive_of
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable

_source = random.Random(9)
FILES = {f"{number:04}.jpg": _source.randbytes(40_000) for number in range(20)}
LARGE = {f"{number:04}.bin": _source.randbytes(1 << 20) for number in range(12)}
_METRIC = re.compile(r'^meshd_archives_total\{kind="([\w.]+)",result="(\w+)"\} (\d+)', re.M)


def counted(daemon: Daemon) -> dict[tuple[str, str], int]:
    with urllib.request.urlopen(f"{daemon.endpoint}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {(kind, result): int(count) for kind, result, count in _METRIC.findall(text)}


def until(daemon: Daemon, there: Callable[[], bool]) -> None:
    """The periodic task runs every second, and nothing says when."""
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline, f"{counted(daemon)}\n{daemon.output()}"
        time.sleep(0.05)


def test_however_an_archive_comes_in_it_is_indexed(daemon_of_its_own: Daemon) -> None:
    daemon, s3 = daemon_of_its_own, daemon_of_its_own.client()
    s3.create_bucket(Bucket="box")
    s3.put_object(Bucket="box", Key="put.zip", Body=archive_of("zip", FILES))
    s3.put_object(Bucket="box", Key="broken.zip", Body=b"PK")
    s3.put_object(Bucket="box", Key="plain", Body=archive_of("tgz", FILES))
    s3.copy_object(Bucket="box", Key="copied.tgz", CopySource="box/plain")
    body = archive_of("tar", LARGE)
    upload = s3.create_multipart_upload(Bucket="box", Key="parts.tar")["UploadId"]
    where = {"Bucket": "box", "Key": "parts.tar", "UploadId": upload}
    parts = []
    for number, at in enumerate(range(0, len(body), 6 << 20), start=1):
        put = s3.upload_part(**where, PartNumber=number, Body=body[at : at + (6 << 20)])
        parts.append({"PartNumber": number, "ETag": put["ETag"]})
    s3.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
    expected = {("zip", "indexed"), ("zip", "refused"), ("tgz", "indexed"), ("tar", "indexed")}
    until(daemon, lambda: expected <= counted(daemon).keys())
    for key, files in {"put.zip": FILES, "copied.tgz": FILES, "parts.tar": LARGE}.items():
        for name, data in files.items():
            assert s3.get_object(Bucket="box", Key=f"{key}/-/{name}")["Body"].read() == data
    after = counted(daemon)
    # nothing was left to be done for the first reader
    assert [after[kind, "indexed"] for kind in ("zip", "tgz", "tar")] == [1, 1, 1]
    s3.close()


@pytest.fixture
def daemon_of_its_own() -> Any:
    with Daemon.start() as running:
        yield running


@pytest.mark.parametrize("place", ["archives.copy.written", "archives.index.made", "archives.note.settled"])
def test_a_coordinator_killed_at_any_step_is_made_up_for(place: str) -> None:
    with Daemon.start(env={"MESHD_FAILPOINTS": f"{place}=kill"}, workers=2) as daemon:
        coordinator = daemon.children()["coordinator-0"]
        s3 = daemon.client()
        s3.create_bucket(Bucket="box")
        kinds = ("tar.zst", "tgz", "zip")
        for kind in kinds:
            s3.put_object(Bucket="box", Key=f"x.{kind}", Body=archive_of(kind, FILES))
        until(daemon, lambda: daemon.children().get("coordinator-0") not in (coordinator, None))
        daemon.kill()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        left = 2 if place == "archives.note.settled" else 3  # there the first has its index already
        until(daemon, lambda: sum(counted(daemon).get((kind, "indexed"), 0) for kind in kinds) == left)
        for kind in kinds:
            for name, data in FILES.items():
                assert s3.get_object(Bucket="box", Key=f"x.{kind}/-/{name}")["Body"].read() == data
        s3.close()
