"""Shard views over a running daemon: tars of a bucket's objects, read by plain S3."""

from __future__ import annotations

import io
import json
import random
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from meshd.testing.daemons import Daemon
from meshsdk.cli import run

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2, env={"MESHD_SMALL_OBJECT": "256KiB"}) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="samples")
        rng = random.Random(1)
        for number in range(25):
            sizes = {"jpg": (500, 30 * KIB, 200 * KIB, 700 * KIB)[number % 4], "cls": 3}
            for ext, size in sizes.items():
                client.put_object(Bucket="samples", Key=f"train/{number:03d}.{ext}", Body=rng.randbytes(size))
        make(daemon, "tens", {"kind": "shards", "prefix": "train/", "count": 10})
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def make(daemon: Daemon, name: str, view: dict[str, Any]) -> None:
    body = json.dumps({"bucket": "samples", "name": name, "view": view}).encode()
    answer = daemon.request("POST", "/-/views", body)
    assert answer.status == 200, answer.body


def members(body: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def read(s3: Any, bucket: str, key: str, **options: Any) -> bytes:
    body = s3.get_object(Bucket=bucket, Key=key, **options)["Body"].read()
    assert isinstance(body, bytes)
    return body


def test_shards_hold_the_objects(s3: Any) -> None:
    listed = s3.list_objects_v2(Bucket="samples--tens")["Contents"]
    assert [entry["Key"] for entry in listed] == [f"shard-{number:06d}.tar" for number in range(3)]
    found: dict[str, bytes] = {}
    for entry in listed:
        body = read(s3, "samples--tens", entry["Key"])
        head = s3.head_object(Bucket="samples--tens", Key=entry["Key"])
        assert len(body) == entry["Size"] == head["ContentLength"]
        assert head["ETag"] == entry["ETag"]
        assert head["ContentType"] == "application/x-tar"
        found |= members(body)
    originals = {
        entry["Key"].removeprefix("train/"): read(s3, "samples", entry["Key"])
        for entry in s3.list_objects_v2(Bucket="samples")["Contents"]
    }
    assert found == originals


def test_windows_of_a_shard(s3: Any) -> None:
    whole = read(s3, "samples--tens", "shard-000001.tar")
    rng = random.Random(2)
    for _ in range(20):
        first = rng.randrange(len(whole))
        last = rng.randrange(first, len(whole))
        part = read(s3, "samples--tens", "shard-000001.tar", Range=f"bytes={first}-{last}")
        assert part == whole[first : last + 1]
    etag = s3.head_object(Bucket="samples--tens", Key="shard-000001.tar")["ETag"]
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="samples--tens", Key="shard-000001.tar", IfNoneMatch=etag)
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 304
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.get_object(Bucket="samples--tens", Key="shard-000009.tar")


def test_a_changed_member_changes_its_shard_alone(daemon: Daemon, s3: Any) -> None:
    make(daemon, "fives", {"kind": "shards", "prefix": "train/", "count": 5})
    before = {e["Key"]: e["ETag"] for e in s3.list_objects_v2(Bucket="samples--fives")["Contents"]}
    s3.put_object(Bucket="samples", Key="train/007.cls", Body=b"new")
    body = read(s3, "samples--fives", "shard-000001.tar")
    assert members(body)["007.cls"] == b"new"
    after = {key: s3.head_object(Bucket="samples--fives", Key=key)["ETag"] for key in before}
    assert [key for key in before if before[key] != after[key]] == ["shard-000001.tar"]


def test_parts_are_folders(daemon: Daemon, s3: Any) -> None:
    split = {"kind": "shards", "count": 4, "shuffle": 5, "split": {"train": 0.7, "val": 0.3}}
    make(daemon, "split", split)
    folders = s3.list_objects_v2(Bucket="samples--split", Delimiter="/")["CommonPrefixes"]
    assert [folder["Prefix"] for folder in folders] == ["train/", "val/"]
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="samples--split", PaginationConfig={"PageSize": 2}
    )
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    names = [name for key in keys for name in members(read(s3, "samples--split", key))]
    assert len(names) == len(set(names)) == 50


def test_materializing(
    daemon: Daemon, s3: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    s3.create_bucket(Bucket="written")
    command = ["view", "materialize", "--json", "samples--tens", "s3://written/v1/"]

    def materialize() -> dict[str, Any]:
        capfd.readouterr()
        assert run(command) == 0
        outcome = json.loads(capfd.readouterr().out)
        assert isinstance(outcome, dict)
        return outcome

    assert materialize()["made"] == 3
    assert materialize() | {"made": 0, "there": 3, "failed": 0} == materialize()
    s3.delete_object(Bucket="written", Key="v1/shard-000001.tar")
    s3.put_object(Bucket="samples", Key="train/021.cls", Body=b"upd")
    again = materialize()
    assert (again["made"], again["there"]) == (2, 1)
    for number in range(3):
        key = f"shard-{number:06d}.tar"
        written = s3.get_object(Bucket="written", Key=f"v1/{key}", ChecksumMode="ENABLED")
        assert written["Body"].read() == read(s3, "samples--tens", key)
        assert written["ContentType"] == "application/x-tar"
