"""Shard views over a running daemon: tars of a bucket's objects, read by plain S3."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ResponseStreamingError,
)

from meshsdk.cli import run
from tests.support.daemons import Daemon
from tests.support.tfrecord_reader import example, features, records

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


# --- sorted, grouped, regrouped, as TFRecord ---------------------------------------------------------------


def names_in_order(s3: Any, bucket: str) -> dict[str, list[str]]:
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]
    return {key: list(members(read(s3, bucket, key))) for key in keys}


def test_groups_by_what_is_in_a_small_file(daemon: Daemon, s3: Any) -> None:
    for number in range(12):
        s3.put_object(Bucket="samples", Key=f"labelled/{number:02d}.cls", Body=f"{number % 3}\n".encode())
        body = json.dumps({"width": 100 * number}).encode()
        s3.put_object(Bucket="samples", Key=f"labelled/{number:02d}.json", Body=body)
    document: dict[str, Any] = {"kind": "shards", "prefix": "labelled/", "group": "number(cls)"}
    document["sort"] = "-json.width"
    make(daemon, "classes", document | {"where": "json.width > 200"})
    found = names_in_order(s3, "samples--classes")
    assert list(found) == ["0/shard-000000.tar", "1/shard-000000.tar", "2/shard-000000.tar"]
    assert found["0/shard-000000.tar"][::2] == ["09.cls", "06.cls", "03.cls"]
    s3.put_object(Bucket="samples", Key="labelled/09.cls", Body=b"2")
    # The shard that held it is laid out anew at once, the others some milliseconds later.
    assert "09.cls" not in members(read(s3, "samples--classes", "0/shard-000000.tar"))
    held = (members(read(s3, "samples--classes", "2/shard-000000.tar")) for _ in range(1000))
    assert any("09.cls" in files for files in held)
    # What is wrong with an expression is said where it is.
    bad = {"bucket": "samples", "name": "bad", "view": {"kind": "shards", "sort": "part(key, '/'"}}
    answer = daemon.request("POST", "/-/views", json.dumps(bad).encode())
    assert answer.status == 400
    assert b"sort: at character 14 of" in answer.body


def test_records_hold_the_objects(daemon: Daemon, s3: Any) -> None:
    make(daemon, "records", {"kind": "shards", "prefix": "train/", "count": 10, "format": "tfrecord"})
    listed = s3.list_objects_v2(Bucket="samples--records")["Contents"]
    assert [entry["Key"] for entry in listed] == [f"shard-{number:06d}.tfrecord" for number in range(3)]
    found: dict[str, bytes] = {}
    for entry in listed:
        body = read(s3, "samples--records", entry["Key"])
        assert len(body) == entry["Size"]
        for record in records(body):
            features = example(record)
            stem = features.pop("__key__").decode()
            found |= {f"{stem}.{ext}": value for ext, value in features.items()}
    whole = read(s3, "samples--records", "shard-000001.tfrecord")
    rng = random.Random(3)
    for _ in range(20):
        first = rng.randrange(len(whole))
        last = min(len(whole) - 1, first + rng.choice((0, 3, 1000, 1 << 20)))
        part = read(s3, "samples--records", "shard-000001.tfrecord", Range=f"bytes={first}-{last}")
        assert part == whole[first : last + 1]
    originals = s3.list_objects_v2(Bucket="samples", Prefix="train/")["Contents"]
    assert found == {e["Key"].removeprefix("train/"): read(s3, "samples", e["Key"]) for e in originals}


def test_labels_are_numbers(daemon: Daemon, s3: Any) -> None:
    for number in range(5):
        s3.put_object(Bucket="samples", Key=f"numbered/{number}.cls", Body=f"{number - 2}\n".encode())
        s3.put_object(Bucket="samples", Key=f"numbered/{number}.w", Body=b"0.25")
        s3.put_object(Bucket="samples", Key=f"numbered/{number}.jpg", Body=bytes(1000))
    document = {"kind": "shards", "prefix": "numbered/", "format": "tfrecord", "count": 3}
    make(daemon, "numbered", document | {"features": {"cls": "int64", "w": "float"}})
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="samples--numbered")["Contents"]]
    told = [features(record) for key in keys for record in records(read(s3, "samples--numbered", key))]
    assert [(each["cls"], each["w"], each["jpg"]) for each in told] == [
        (number - 2, 0.25, bytes(1000)) for number in range(5)
    ]
    s3.put_object(Bucket="samples", Key="numbered/0.cls", Body=b"cat")
    with pytest.raises(ClientError, match=r"numbered/0\.cls: b'cat' is not a valid int64") as error:
        read(s3, "samples--numbered", keys[0])
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 422


def test_a_multipart_member_has_its_sum(daemon: Daemon, s3: Any) -> None:
    upload = s3.create_multipart_upload(Bucket="samples", Key="large/0.bin")["UploadId"]
    parts, rng = [], random.Random(4)
    for number in (1, 2):
        body = rng.randbytes(5 << 20 if number == 1 else 12345)
        part = s3.upload_part(
            Bucket="samples", Key="large/0.bin", UploadId=upload, PartNumber=number, Body=body
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    s3.complete_multipart_upload(
        Bucket="samples", Key="large/0.bin", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    make(daemon, "large", {"kind": "shards", "prefix": "large/", "format": "tfrecord"})
    body = read(s3, "samples--large", "shard-000000.tfrecord")
    (record,) = records(body)
    assert example(record)["bin"] == read(s3, "samples", "large/0.bin")
    assert body[-4:] == read(s3, "samples--large", "shard-000000.tfrecord", Range="bytes=-4")


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return out.getvalue()


@pytest.fixture
def tars(s3: Any) -> dict[str, bytes]:
    rng = random.Random(5)
    everything: dict[str, bytes] = {}
    for number in range(3):
        files = {
            f"{number * 4 + n:03d}.{ext}": rng.randbytes(size)
            for n in range(4)
            for ext, size in (("jpg", (1000, 90 * KIB)[n % 2]), ("txt", 7))
        }
        everything |= files
        s3.put_object(Bucket="samples", Key=f"tars/in-{number}.tar", Body=tar_of(files))
    s3.put_object(Bucket="samples", Key="tars/readme.md", Body=b"no tar")
    return everything


def test_samples_of_tars(daemon: Daemon, s3: Any, tars: dict[str, bytes]) -> None:
    source = {"kind": "shards", "samples": "archives", "prefix": "tars/"}
    make(daemon, "regrouped", source | {"count": 5, "sort": "-number(base(stem))"})
    found = names_in_order(s3, "samples--regrouped")
    assert [len(names) for names in found.values()] == [10, 10, 4]
    assert found["shard-000000.tar"][:2] == ["011.jpg", "011.txt"]
    bodies = {key: read(s3, "samples--regrouped", key) for key in found}
    assert {name: body for key in found for name, body in members(bodies[key]).items()} == tars
    assert bodies == {key: read(s3, "samples--regrouped", key) for key in found}
    make(daemon, "retold", source | {"format": "tfrecord"})
    told = [example(record) for record in records(read(s3, "samples--retold", "shard-000000.tfrecord"))]
    assert {f"{each['__key__'].decode()}.{e}": each[e] for each in told for e in ("jpg", "txt")} == tars


def test_a_tar_that_lies_is_named(daemon: Daemon, s3: Any, tars: dict[str, bytes]) -> None:
    s3.put_object(Bucket="samples", Key="lying/a.tar", Body=tar_of({"a.txt": b"a"}))
    s3.put_object(Bucket="samples", Key="lying/b.tar", Body=b"x" * 2048)
    make(daemon, "lying", {"kind": "shards", "samples": "archives", "prefix": "lying/"})
    with pytest.raises(ClientError, match=r"lying/b\.tar") as error:
        s3.list_objects_v2(Bucket="samples--lying")
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 422
    s3.delete_object(Bucket="samples", Key="lying/b.tar")
    assert names_in_order(s3, "samples--lying") == {"shard-000000.tar": ["a.txt"]}


# --- copied in parts -------------------------------------------------------------------------------


def copy_in_parts(s3: Any, source: dict[str, str], key: str, step: int, **options: Any) -> None:
    size = s3.head_object(**source)["ContentLength"]
    target = {"Bucket": "samples", "Key": key}
    upload = s3.create_multipart_upload(**target, **options)["UploadId"]
    parts = []
    for number, first in enumerate(range(0, size, step), 1):
        part = s3.upload_part_copy(
            **target,
            UploadId=upload,
            PartNumber=number,
            CopySource=source,
            CopySourceRange=f"bytes={first}-{min(size, first + step) - 1}",
        )["CopyPartResult"]
        sums = {name: value for name, value in part.items() if name.startswith("Checksum")}
        parts.append({"PartNumber": number, "ETag": part["ETag"], **sums})
    s3.complete_multipart_upload(**target, UploadId=upload, MultipartUpload={"Parts": parts})


@pytest.mark.parametrize("options", [{}, {"ChecksumAlgorithm": "CRC32C"}, {"ChecksumAlgorithm": "SHA256"}])
def test_a_shard_is_copied_in_parts(daemon: Daemon, s3: Any, options: dict[str, str]) -> None:
    make(daemon, "whole", {"kind": "shards", "prefix": "train/"})
    source = {"Bucket": "samples--whole", "Key": "shard-000000.tar"}
    copy_in_parts(s3, source, "copied.tar", 5 << 20, **options)
    copied = s3.get_object(Bucket="samples", Key="copied.tar", ChecksumMode="ENABLED")["Body"].read()
    assert copied == read(s3, source["Bucket"], source["Key"])
    assert len(copied) > 5 << 20


def test_wrong_ranges_and_conditions_of_parts(daemon: Daemon, s3: Any) -> None:
    make(daemon, "whole", {"kind": "shards", "prefix": "train/"})
    target = {"Bucket": "samples", "Key": "never.tar"}
    upload = s3.create_multipart_upload(**target)["UploadId"]
    asked = target | {"UploadId": upload, "PartNumber": 1}
    source = {"Bucket": "samples--whole", "Key": "shard-000000.tar"}
    for options, code in (
        ({"CopySourceRange": "bytes=0-99999999999"}, "InvalidArgument"),
        ({"CopySourceIfMatch": '"other"'}, "PreconditionFailed"),
        ({"CopySource": source | {"Key": "shard-000001.tar"}}, "NoSuchKey"),
        ({"UploadId": "none"}, "NoSuchUpload"),
    ):
        with pytest.raises(ClientError) as error:
            s3.upload_part_copy(**{"CopySource": source, **asked, **options})
        assert error.value.response["Error"]["Code"] == code
    s3.abort_multipart_upload(**target, UploadId=upload)


def test_the_command_makes_layouts(
    daemon: Daemon, s3: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    options = ["--prefix", "train/", "--tfrecord", "--group", "text(size > 100000)", "--sort", "-size"]
    assert run(["view", "create", "samples--big", *options, "--split", "a=0.5", "--split", "b=0.5"]) == 0
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="samples--big")["Contents"]]
    assert keys == [
        f"{part}/{group}/shard-000000.tfrecord" for part in ("a", "b") for group in ("false", "true")
    ]
    capfd.readouterr()
    assert run(["view", "ls", "samples"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("samples--big"))
    assert "1000 samples each, as tfrecord, group text(size > 100000), sort -size, split a b" in line
    assert run(["view", "create", "samples--bad", "--sort", "sze"]) != 0
    assert "did you mean 'size'" in capfd.readouterr().err
    assert run(["view", "create", "samples--bad", "--feature", "cls"]) != 0
    assert "expected EXT=KIND" in capfd.readouterr().err
    # A shard is copied like any object.
    assert run(["cp", f"s3://samples--big/{keys[0]}", "s3://samples/copied.tfrecord"]) == 0
    assert read(s3, "samples", "copied.tfrecord") == read(s3, "samples--big", keys[0])


# --- what may go wrong --------------------------------------------------------------------------------------


def test_empty_files_and_files_without_an_extension(daemon: Daemon, s3: Any) -> None:
    for key, body in (("0.txt", b""), ("0.cls", b"5"), ("plain", b"no extension"), (".hidden", b"")):
        s3.put_object(Bucket="samples", Key=f"odd/{key}", Body=body)
    make(daemon, "odd", {"kind": "shards", "prefix": "odd/", "format": "tfrecord"})
    found = [example(record) for record in records(read(s3, "samples--odd", "shard-000000.tfrecord"))]
    assert found == [
        {"__key__": b".hidden", "data": b""},
        {"__key__": b"0", "cls": b"5", "txt": b""},
        {"__key__": b"plain", "data": b"no extension"},
    ]


@pytest.mark.parametrize("kind", ["tgz", "zip"])
def test_samples_of_compressed_archives(daemon: Daemon, s3: Any, kind: str) -> None:
    rng = random.Random(6)
    files = {f"{number}.{ext}": rng.randbytes(500 * number) for number in range(6) for ext in ("bin", "dat")}
    files |= {f"{number}.json": json.dumps({"even": number % 2 == 0}).encode() for number in range(6)}
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, body in files.items():
                packed.writestr(name, body)
    else:
        out.write(gzip.compress(tar_of(files)))
    s3.put_object(Bucket="samples", Key=f"packed-{kind}/one.{kind}", Body=out.getvalue())
    source = {"kind": "shards", "samples": "archives", "prefix": f"packed-{kind}/"}
    make(daemon, kind, source | {"group": "json.even", "match": [".bin", ".json"]})
    found = names_in_order(s3, f"samples--{kind}")
    assert {key: sorted(names) for key, names in found.items()} == {
        "false/shard-000000.tar": [f"{n}.{ext}" for n in (1, 3, 5) for ext in ("bin", "json")],
        "true/shard-000000.tar": [f"{n}.{ext}" for n in (0, 2, 4) for ext in ("bin", "json")],
    }
    for key in found:
        shard = members(read(s3, f"samples--{kind}", key))
        assert shard == {name: files[name] for name in shard}


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_members_replaced_while_shards_are_read(daemon: Daemon, s3: Any, form: str) -> None:
    """A read gives a whole shard of members that were there, or fails; never a mixture within a member."""
    prefix = f"steady-{form}/"
    sizes = {number: (100, 100 * KIB, 400 * KIB)[number % 3] for number in range(9)}
    for number, size in sizes.items():
        s3.put_object(Bucket="samples", Key=f"{prefix}{number}.bin", Body=bytes([0]) * size)
    make(daemon, f"steady-{form}", {"kind": "shards", "prefix": prefix, "format": form})
    client, rng, turns = daemon.client(), random.Random(7), itertools.cycle(range(1, 256))

    def write(done: threading.Event) -> None:
        while not done.is_set():
            number = rng.randrange(9)
            size = sizes[number] + rng.choice((0, 0, 512))
            client.put_object(Bucket="samples", Key=f"{prefix}{number}.bin", Body=bytes([next(turns)]) * size)

    whole = 0
    with ThreadPoolExecutor(1) as pool:
        deadline = time.monotonic() + 60
        for turn in itertools.count():
            if whole == 20 or (whole and turn >= 60):
                break
            assert time.monotonic() < deadline, f"{turn} reads, none of a whole shard"
            done = threading.Event()
            # Beside every other read only: on a busy machine one takes long enough to meet a write each time.
            writing = pool.submit(write, done) if turn % 2 else None
            try:
                body = read(s3, f"samples--steady-{form}", f"shard-000000.{form}")
            except (ClientError, ResponseStreamingError, IncompleteReadError, ConnectionClosedError):
                continue
            finally:
                done.set()
                if writing is not None:
                    writing.result(60)
            whole += 1
            found = (
                list(members(body).values())
                if form == "tar"
                else [example(record)["bin"] for record in records(body)]
            )
            assert len(found) == 9
            assert all(len(set(content)) == 1 for content in found)
