"""Selecting, renaming, filtering and joining datasets over a running daemon, through the SDK."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import (
    AccessError,
    ConfigurationError,
    InvalidPlanError,
    NotFoundError,
    SnapshotChangedError,
)
from meshsdk.loader.epoch_iterator import FrameAddress
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

COUNT = 12


def a_tar(names: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return out.getvalue()


@pytest.fixture(scope="module", params=[1, 2])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon.start(workers=request.param) as daemon:
        s3 = daemon.client()
        for bucket in ("photos", "texts", "corpus"):
            s3.create_bucket(Bucket=bucket)
        for number in range(COUNT):
            kind = ("cat", "dog")[number % 2]
            meta = {"width": 100 * number, "tags": ["x"] if number < 3 else []}
            stem = f"train/{kind}/{number:03}"
            s3.put_object(Bucket="photos", Key=f"{stem}.jpg", Body=bytes([number]) * (number + 1))
            s3.put_object(Bucket="photos", Key=f"{stem}.json", Body=json.dumps(meta).encode())
        names = [f"{('cat', 'dog')[number % 2]}/{number:03}.txt" for number in range(3, 9)]
        s3.put_object(Bucket="texts", Key="captions/all.tar", Body=a_tar(names))
        for part in range(2):
            rows = [{"text": f"text {part}.{line}", "id": 10 * part + line} for line in range(5)]
            body = "\n".join(json.dumps(row) for row in rows).encode()
            s3.put_object(Bucket="corpus", Key=f"v1/{part}.jsonl", Body=body)
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


@pytest.fixture
def photos(client: Client) -> Dataset:
    fields = {"image": "jpg", "meta": "json", "label": "@class"}
    return mesh.open("s3://photos/train", fields=fields, client=client)


def numbers(ds: Dataset) -> list[int]:
    return [int(row["image"][0]) for row in ds.__getitems__(range(len(ds)))]


def test_fields_are_selected_and_renamed(photos: Dataset) -> None:
    ds = photos.map(ops.json("meta", "width", type="integer")).select("image", "meta")
    assert ds.fields == ("image", "meta")
    ds = ds.rename(meta="width")
    assert ds[1]["width"] == 200
    assert photos.select("image").ops == ()
    with pytest.raises(InvalidPlanError, match="did you mean 'image'"):
        photos.select("imag")


def test_classes_are_relabelled(photos: Dataset) -> None:
    ds = photos.relabel(label={"cat": None, "dog": "hound"})
    assert (ds.classes, len(ds), ds.snapshot.skipped) == (("hound",), 6, 6)
    assert numbers(ds.filter('label == "hound" and index < 2')) == [1, 3]
    with pytest.raises(InvalidPlanError, match=r"relabel\.label.*: expected an object"):
        photos.relabel(label={})


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ('label == "cat"', [0, 2, 4, 6, 8, 10]),
        ("image_size > 9", [10, 9, 11]),
        ("meta.width >= 300 and meta.width < 600", [4, 3, 5]),
        ('glob(key, "train/dog/*") and number(stem) < 4', [1, 3]),
        ("index % 5 == 0", [0, 10, 9]),
        ('meta.tags[0] == "x"', [0, 2, 1]),
        ('startswith(name, "dog/01")', [11]),
    ],
)
def test_a_filter_keeps_what_holds(photos: Dataset, expression: str, kept: list[int]) -> None:
    ds = photos.filter(expression)
    assert numbers(ds) == kept
    assert ds.snapshot.skipped == COUNT - len(kept)
    assert ds.snapshot.hash == photos.filter(expression).snapshot.hash
    with mesh.Loader(ds, global_batch=2, seed=3, output="numpy", tail="ragged") as loader:
        seen = [int(image[0]) for batch in loader for image in batch["image"]]
    assert sorted(seen) == sorted(kept)


def test_splits_are_disjoint_complete_and_stay_when_the_dataset_grows(photos: Dataset) -> None:
    parts = photos.split(train=0.5, val=0.3, test=0.2)
    found = {name: set(numbers(ds)) for name, ds in parts.items()}
    assert sorted(number for some in found.values() for number in some) == list(range(COUNT))
    few = photos.filter("index % 3 != 0")
    for name, ds in few.split({"train": 0.5, "val": 0.3}, test=0.2).items():
        assert set(numbers(ds)) <= found[name]
    assert found != {name: set(numbers(ds)) for name, ds in photos.split(train=0.5, val=0.5, seed=2).items()}


def test_what_belongs_together_stays_in_one_split(photos: Dataset) -> None:
    parts = photos.split(a=0.5, b=0.5, by='slice(stem, 0, 2) + ":" + text(floor(meta.width / 400))', seed=3)
    groups = [{(number // 10, number // 4) for number in numbers(ds)} for ds in parts.values()]
    assert not groups[0] & groups[1]
    assert len(photos.split(half=0.5)["half"]) < COUNT
    with pytest.raises(ConfigurationError, match=r"9 of 12 samples are in no split: 'meta\.tags\[0\]'"):
        photos.split(all=1.0, by="meta.tags[0]")
    with pytest.raises(ConfigurationError, match="their sum at most 1"):
        photos.split(a=0.7, b=0.4)


def test_a_filter_that_makes_no_sense_says_so(photos: Dataset) -> None:
    with pytest.raises(InvalidPlanError, match="labl"):
        photos.filter('labl == "cat"')
    with pytest.raises(NotFoundError, match="none of the 12 samples"):
        photos.filter("size < 0")
    with pytest.raises(NotFoundError, match="samples is left; for the first sample, label == 'cat'"):
        photos.filter("label == 0")
    with pytest.raises(NotFoundError, match=r"first sample, index == 0 and meta == '\{.* and stem == '000'"):
        photos.filter("index == -1 and stem == 0 and meta.width == '100'")
    with pytest.raises(NotFoundError, match="samples is left \\["):
        photos.filter("false")


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        (
            "label != 0",
            "is true for all 12 samples. label is a class name here, such as 'cat'. Text never equals",
        ),
        ("size >= 0", "is true for all 12 samples. Text never equals a number"),
        ("label != 'cat'", ""),
    ],
)
def test_a_filter_that_leaves_nothing_out_is_told(
    photos: Dataset, expression: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    photos.filter(expression)
    assert told in caplog.text
    assert len(caplog.records) == bool(told)


def test_a_split_without_samples_has_a_name(photos: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotFoundError, match=r"none of the 12 samples is in 'val' \(1e-05\), by 'name'"):
        photos.split(train=0.9, val=0.00001)
    with pytest.raises(
        ConfigurationError, match=r"^split: train=0.9, val=0.3: each fraction must be above 0"
    ):
        photos.split(train=0.9, val=0.3)
    assert len(photos.split(all=1.0)["all"]) == COUNT
    assert caplog.text == ""


def test_two_sources_are_joined_by_name(photos: Dataset, client: Client) -> None:
    captions = mesh.open("s3://texts/captions", fields={"caption": "txt"}, client=client)
    ds = photos.join(captions)
    assert (len(ds), ds.snapshot.skipped) == (6, 6)
    for row in ds.__getitems__(range(6)):
        number = int(row["image"][0])
        assert bytes(row["caption"]).decode() == f"{('cat', 'dog')[number % 2]}/{number:03}.txt"
        assert row["label"] == number % 2
    again = ds.filter('number(stem) > 5 and endswith(caption, "8.txt")').select("caption")
    assert bytes(again[0]["caption"]).decode() == "cat/008.txt"
    with mesh.Loader(ds, global_batch=4, output="numpy") as loader:
        assert sum(len(batch["label"]) for batch in loader) == 8


def test_lines_are_samples_and_joined_by_what_they_say(client: Client, photos: Dataset) -> None:
    lines = mesh.open("s3://corpus/v1", fields={"text": "jsonl", "id": "jsonl"}, kind="lines", client=client)
    assert len(lines) == 10
    ds = lines.map(ops.json("text", "text"), ops.json("id", "id", type="integer"))
    assert [int(row["id"]) for row in ds.__getitems__(range(10))] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert bytes(ds[6]["text"]).decode() == "text 1.1"
    few = lines.filter("id.id >= 3")
    assert len(few) == 7
    both = photos.join(few.map(ops.json("id", "id", type="integer")), on=("number(stem)", "id.id"))
    assert [(int(row["image"][0]), int(row["id"])) for row in both.__getitems__(range(len(both)))] == [
        (4, 4),
        (10, 10),
        (3, 3),
        (11, 11),
    ]


def test_samples_of_a_joined_dataset_come_as_a_tar(daemon: Daemon, client: Client, photos: Dataset) -> None:
    lines = mesh.open("s3://corpus/v1", fields={"text": "jsonl", "id": "jsonl"}, kind="lines", client=client)
    both = photos.join(lines, on=("number(stem)", "id.id"))
    answer = daemon.request("GET", f"/-/plans/{both.plan().hash}/0/0?batch=2&format=tar")
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        names = tar.getnames()
    assert [name for name in names if name.startswith("cat/000")] == [
        "cat/000.id",
        "cat/000.jpg",
        "cat/000.cls",
        "cat/000.json",
        "cat/000.text",
    ]


def test_both_sides_must_be_readable(daemon: Daemon, client: Client, photos: Dataset) -> None:
    captions = mesh.open("s3://texts/captions", fields={"caption": "txt"}, client=client)
    both = photos.join(captions)
    digest, plan = both.snapshot.hash, both.plan().hash
    allowed = ["arn:aws:s3:::photos", "arn:aws:s3:::photos/*"]
    statement = {"Effect": "Allow", "Action": "s3:*", "Resource": allowed}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    made = json.loads(daemon.request("POST", "/-/sts", json.dumps({"policy": policy}).encode()).body)
    keys: dict[str, Any] = {
        "access_key": made["AccessKeyId"],
        "secret_key": made["SecretAccessKey"],
        "session_token": made["SessionToken"],
    }
    with mesh.connect(daemon.endpoint, **keys) as narrow:
        mine = mesh.open("s3://photos/train", fields={"image": "jpg"}, client=narrow)
        assert len(mine.filter("size > 1")) == 11
        for snapshot in (digest, captions.snapshot.hash):
            with pytest.raises(AccessError):
                mesh.open("s3://photos", snapshot=snapshot, client=narrow)
        with pytest.raises(AccessError):
            mine.join(captions)
        with pytest.raises(AccessError):
            mesh.mix(mine, captions.rename(caption="image"))
        with pytest.raises(AccessError):
            narrow.transport.text(FrameAddress(plan, 0, 0, 0, 1, 2).request())


def test_a_filter_reads_what_was_pinned(daemon: Daemon, client: Client) -> None:
    s3 = daemon.client()
    s3.create_bucket(Bucket="changing")
    for number in range(3):
        s3.put_object(Bucket="changing", Key=f"{number}.json", Body=b'{"a": 1}')
    ds = mesh.open("s3://changing", fields={"meta": "json"}, client=client)
    s3.put_object(Bucket="changing", Key="1.json", Body=b'{"a": 2}')
    with pytest.raises(SnapshotChangedError, match=r"1\.json was replaced"):
        ds.filter("meta.a == 2")
    assert len(ds.filter("size > 0")) == 3
