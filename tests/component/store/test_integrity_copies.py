"""What the node copies into new objects is compared with its checksums: damage is refused by name."""

from __future__ import annotations

import json
import random
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.support.archive_files import archive_of
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.job_fixtures import done, ended, objects, start
from tests.support.native_fixtures import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"tiny.bin": 700, "small.bin": 200 * KIB, "large.bin": 5 * MIB}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=1) as daemon:
        client = daemon.client()
        for bucket in ("src", "out"):
            client.create_bucket(Bucket=bucket)
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def body_of(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def put(s3: Any, *names: str) -> None:
    for name in names:
        s3.put_object(Bucket="src", Key=name, Body=body_of(name))


def damage(daemon: Daemon, body: bytes, at: int | None = None) -> None:
    """One bit of stored bytes, the middle's if no place is told."""
    at = len(body) // 2 if at is None else at
    for path in daemon.data_dir.rglob("*.tar"):
        found = path.read_bytes().find(body)
        if found >= 0:
            with path.open("r+b") as file:
                file.seek(found + at)
                file.write(bytes([body[at] ^ 1]))
            return
    pytest.fail("no data file holds the object")


def corrupt_reads(daemon: Daemon) -> float:
    with closing(Mesh(daemon.endpoint, daemon.access_key, daemon.secret_key)) as mesh:
        return mesh.metric("meshd_store_corrupt_reads_total")


def quarantined(daemon: Daemon) -> bool:
    with closing(Mesh(daemon.endpoint, daemon.access_key, daemon.secret_key)) as mesh:
        return mesh.metric("meshd_quarantined_total") > 0


def refused(daemon: Daemon, call: Any, name: str) -> None:
    with pytest.raises(ClientError) as caught:
        call()
    told = caught.value.response
    assert told["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert f"s3://src/{name} is damaged" in told["Error"]["Message"]
    assert corrupt_reads(daemon) > 0


def failed(daemon: Daemon, name: str, **document: Any) -> dict[str, Any]:
    job = ended(daemon, start(daemon, **document))
    assert job["state"] == "failed", job
    assert f"s3://src/{name} is damaged" in job["error"]
    assert corrupt_reads(daemon) > 0
    return job


def view(daemon: Daemon, **document: Any) -> None:
    asked = {"bucket": "src", "name": "v", "view": {"kind": "shards", **document}}
    answer = daemon.request("POST", "/-/views", json.dumps(asked).encode())
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("name", SIZES)
def test_a_copy_that_reads_its_source(daemon: Daemon, s3: Any, name: str) -> None:
    put(s3, name)
    damage(daemon, body_of(name))
    source = {"Bucket": "src", "Key": name}
    refused(
        daemon,
        lambda: s3.copy_object(Bucket="out", Key="c", CopySource=source, ChecksumAlgorithm="SHA256"),
        name,
    )
    assert objects(s3, "out") == {}


@pytest.mark.parametrize("asked", ["", "bytes=0-99", "bytes=4000000-5242879"])
def test_a_part_made_of_an_object_and_of_a_range_beside_the_damage(
    daemon: Daemon, s3: Any, asked: str
) -> None:
    put(s3, "large.bin")
    damage(daemon, body_of("large.bin"))
    upload = {"Bucket": "out", "Key": "c"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    ranged = {"CopySourceRange": asked} if asked else {}
    source = {"Bucket": "src", "Key": "large.bin"}
    refused(
        daemon,
        lambda: s3.upload_part_copy(**upload, PartNumber=1, CopySource=source, **ranged),
        "large.bin",
    )
    assert "Parts" not in s3.list_parts(**upload)


@pytest.mark.parametrize("name", SIZES)
def test_views_are_neither_copied_nor_materialized_with_damage(daemon: Daemon, s3: Any, name: str) -> None:
    put(s3, *SIZES)
    view(daemon, count=1)
    damage(daemon, body_of(name))
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="src--v")["Contents"]]
    shard = keys[sorted(SIZES).index(name)]
    source = {"Bucket": "src--v", "Key": shard}
    refused(daemon, lambda: s3.copy_object(Bucket="out", Key="c", CopySource=source), name)
    assert objects(s3, "out") == {}
    job = {"kind": "materialize", "source": "s3://src--v", "target": "s3://out/m"}
    found = ended(daemon, start(daemon, **job))  # by now it may be in quarantine, and the shard is named
    assert found["state"] == "failed", found
    assert "is damaged" in found["error"]
    assert shard not in objects(s3, "out", "m/")
    put(s3, name)
    done(daemon, **job)
    whole = {key: s3.get_object(Bucket="src--v", Key=key)["Body"].read() for key in keys}
    assert objects(s3, "out", "m/") == whole


@pytest.mark.parametrize("name", SIZES)
def test_shards_of_objects(daemon: Daemon, s3: Any, name: str) -> None:
    put(s3, *SIZES)
    damage(daemon, body_of(name))
    job = {"kind": "shard", "source": "s3://src", "target": "s3://out/s", "count": 10}
    failed(daemon, name, **job)
    assert objects(s3, "out") == {}
    put(s3, name)
    done(daemon, **job)


@pytest.mark.parametrize("kind", ["tar", "zip", "tgz", "tar.zst"])
@pytest.mark.parametrize("job", ["reshard", "extract"])
def test_archives_are_not_taken_apart_with_damage(daemon: Daemon, s3: Any, kind: str, job: str) -> None:
    files = {name: body_of(name) for name in SIZES}
    whole, sound = archive_of(kind, files), archive_of(kind, {"sound.txt": b"sound"})
    s3.put_object(Bucket="src", Key=f"a.{kind}", Body=sound)
    s3.put_object(Bucket="src", Key=f"b.{kind}", Body=whole)
    damage(daemon, whole, whole.find(b"ustar") + 2000 if kind == "tar" else len(whole) // 3)
    asked: dict[str, Any] = {"kind": job, "source": "s3://src", "target": "s3://out/x"}
    asked |= {"count": 10} if job == "reshard" else {"on_bad": "skip"}
    failed(daemon, f"b.{kind}", **asked)
    assert set(objects(s3, "out", "x/")) <= {"sound.txt"}
    s3.put_object(Bucket="src", Key=f"b.{kind}", Body=whole)  # the same bytes: nothing bad is remembered
    done(daemon, **asked)


def test_members_and_shards_of_archives(daemon: Daemon, s3: Any) -> None:
    whole = archive_of("tar", {name: body_of(name) for name in SIZES})
    s3.put_object(Bucket="src", Key="b.tar", Body=whole)
    view(daemon, count=10, samples="archives")
    damage(daemon, whole, whole.find(body_of("tiny.bin")) + 5)
    for source in (
        "src/b.tar/-/tiny.bin",
        "src--v/" + s3.list_objects_v2(Bucket="src--v")["Contents"][0]["Key"],
    ):
        refused(daemon, lambda: s3.copy_object(Bucket="out", Key="c", CopySource=source), "b.tar")  # noqa: B023
        await_true(partial(quarantined, daemon))  # what comes next is told of by the same name
    failed(daemon, "b.tar", kind="materialize", source="s3://src--v", target="s3://out/m")
    assert objects(s3, "out") == {}
