"""Zarr views over a running daemon, opened as they are by zarr-python, tensorstore and xarray."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
import threading
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from botocore.exceptions import ClientError
from obstore.store import S3Store
from PIL import Image
from zarr.storage import ObjectStore

from meshwire.frame import tensor_frame
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, CHUNK, SIDE = 37, 5, 8
FIELDS: dict[str, Any] = {"image": {"ext": ["png"]}, "size": {"ext": ["txt"]}, "label": {"class": "prefix"}}
OPS: list[dict[str, Any]] = [
    {"op": "decode", "field": "image"},
    {"op": "resize", "field": "image", "args": {"size": [SIDE, SIDE + 2]}},
    {"op": "int_label", "field": "size"},
]
VIEW: dict[str, Any] = {"kind": "zarr", "prefix": "train/", "fields": FIELDS, "ops": OPS, "chunk": CHUNK}
FOLLOWING = VIEW | {"follow": True}


def picture(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (10 + seed % 5, 12, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as daemon:
        fill(daemon, "photos")
        create(daemon, "photos", "z", VIEW)
        create(daemon, "photos", "sharded", VIEW | {"shard": 3})
        yield daemon


def fill(daemon: Daemon, bucket: str, samples: int = SAMPLES, seed: int = 0) -> None:
    client = daemon.client()
    client.create_bucket(Bucket=bucket)
    for number in range(samples):
        stem = f"train/class{number % 3}/{number:04}"
        client.put_object(Bucket=bucket, Key=f"{stem}.png", Body=picture(seed + number))
        client.put_object(Bucket=bucket, Key=f"{stem}.txt", Body=str(number * 7).encode())


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def post(daemon: Daemon, path: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = daemon.request("POST", path, json.dumps(document).encode())
    found = json.loads(answer.body)
    assert isinstance(found, dict)
    return found | {"status": answer.status}


def create(daemon: Daemon, bucket: str, name: str, view: dict[str, Any]) -> dict[str, Any]:
    return post(daemon, "/-/views", {"bucket": bucket, "name": name, "view": view})


def oracle(daemon: Daemon, bucket: str = "photos", samples: int = SAMPLES) -> dict[str, Any]:
    """The same samples as a native frame gives them, in stored order."""
    pinned = post(daemon, "/-/snapshots", {"source": f"s3://{bucket}/train/", "fields": FIELDS})
    assert pinned["samples"] == samples
    spec = {"ops": OPS, "shuffle": {"kind": "none"}, "tail": "ragged"}
    plan = post(daemon, "/-/plans", {"snapshot": pinned["snapshot"], "spec": spec})["plan"]
    answer = daemon.request("GET", f"/-/plans/{plan}/0/0?batch={samples}")
    assert answer.status == 200, answer.body
    return {name: np.asarray(tensor) for name, tensor in tensor_frame.tensor_views(answer.body).items()}


def store_of(daemon: Daemon, bucket: str) -> ObjectStore[S3Store]:
    return ObjectStore(
        S3Store(
            bucket,
            endpoint=daemon.endpoint,
            access_key_id=daemon.access_key,
            secret_access_key=daemon.secret_key,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        ),
        read_only=True,
    )


def rendered(daemon: Daemon) -> float:
    """Rows the node has rendered so far."""
    with urlopen(f"{daemon.endpoint}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r'^meshd_transform_samples_total{op="row"} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def body_of(s3: Any, bucket: str, key: str, **options: Any) -> bytes:
    body = s3.get_object(Bucket=bucket, Key=key, **options)["Body"].read()
    assert isinstance(body, bytes)
    return body


def refused(s3: Any, bucket: str, key: str) -> tuple[int, str, str]:
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket=bucket, Key=key)
    response = error.value.response
    return (
        response["ResponseMetadata"]["HTTPStatusCode"],
        response["Error"]["Code"],
        response["Error"]["Message"],
    )


BUCKETS = pytest.mark.parametrize("bucket", ["photos--z", "photos--sharded"])


@BUCKETS
def test_zarr_python_reads_it(daemon: Daemon, bucket: str) -> None:
    group = zarr.open_group(store_of(daemon, bucket), mode="r", zarr_format=3)
    assert group.metadata.consolidated_metadata is not None
    assert sorted(name for name, _ in group.members()) == ["image", "label", "size"]
    for name, wanted in oracle(daemon).items():
        if not name.startswith("__"):
            array: Any = group[name]
            np.testing.assert_array_equal(array[:], wanted)
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(array[11:33:4], wanted[11:33:4])
    assert group["label"].attrs["classes"] == ["class0", "class1", "class2"]


@BUCKETS
def test_tensorstore_reads_it(daemon: Daemon, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    place = {"driver": "s3", "bucket": bucket, "endpoint": daemon.endpoint, "aws_region": "us-east-1"}
    wanted = oracle(daemon)
    for name in ("image", "size", "label"):
        spec = {"driver": "zarr3", "kvstore": place | {"path": f"{name}/"}}
        array = tensorstore.open(spec, open=True, read=True).result(timeout=60)
        np.testing.assert_array_equal(array.read().result(timeout=60), wanted[name])
        np.testing.assert_array_equal(array[7:29].read().result(timeout=60), wanted[name][7:29])


@BUCKETS
def test_xarray_reads_it(daemon: Daemon, bucket: str) -> None:
    dataset = xarray.open_zarr(store_of(daemon, bucket), consolidated=True, zarr_format=3, chunks=None)
    wanted = oracle(daemon)
    assert dict(dataset.sizes) == {
        "sample": SAMPLES,
        "image_y": SIDE,
        "image_x": SIDE + 2,
        "image_channel": 3,
    }
    chosen = dataset.isel(sample=slice(20, 37))
    np.testing.assert_array_equal(chosen["image"].values, wanted["image"][20:])
    np.testing.assert_array_equal(chosen["label"].values, wanted["label"][20:])


@BUCKETS
def test_what_is_listed_is_what_is_read(s3: Any, bucket: str) -> None:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, PaginationConfig={"PageSize": 4})
    entries = [entry for page in pages for entry in page["Contents"]]
    keys = [entry["Key"] for entry in entries]
    assert keys == sorted(keys)
    chunks = 8 if bucket == "photos--z" else 3
    assert len([key for key in keys if key.startswith("image/c/")]) == chunks
    for entry in entries:
        got = s3.get_object(Bucket=bucket, Key=entry["Key"])
        head = s3.head_object(Bucket=bucket, Key=entry["Key"])
        assert len(got["Body"].read()) == entry["Size"] == head["ContentLength"]
        assert got["ETag"] == entry["ETag"] == head["ETag"]
    folders = s3.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [found["Prefix"] for found in folders["CommonPrefixes"]] == ["image/", "label/", "size/"]
    assert [found["Key"] for found in folders["Contents"]] == ["zarr.json"]
    last = entries[chunks - 1]
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket=bucket, Key=last["Key"], IfNoneMatch=last["ETag"])
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 304


def test_attributes_of_what_is_put_together(s3: Any) -> None:
    asked = {"Bucket": "photos--sharded", "Key": "image/c/1/0/0/0"}
    head = s3.head_object(**asked)
    told = s3.get_object_attributes(**asked, ObjectAttributes=["ETag", "ObjectSize"])
    assert (told["ETag"], told["ObjectSize"]) == (head["ETag"].strip('"'), head["ContentLength"])


@BUCKETS
def test_windows(s3: Any, bucket: str) -> None:
    """Over chunk boundaries, the fill value and a shard's index."""
    key = "image/c/7/0/0/0" if bucket == "photos--z" else "image/c/2/0/0/0"
    whole = body_of(s3, bucket, key)
    rng = random.Random(3)
    for _ in range(25):
        first = rng.randrange(len(whole))
        last = rng.randrange(first, len(whole))
        assert body_of(s3, bucket, key, Range=f"bytes={first}-{last}") == whole[first : last + 1]
    row = SIDE * (SIDE + 2) * 3
    chunk = whole[: CHUNK * row] if bucket == "photos--z" else whole[CHUNK * row : 2 * CHUNK * row]
    assert chunk[: 2 * row].strip(b"\0")
    assert chunk[2 * row :] == bytes(3 * row)  # samples 37 to 39 are not there


@pytest.mark.parametrize(
    "key",
    [
        "image/c/8/0/0/0",
        "image/c/0",
        "image/c/00/0/0/0",
        "image/c/0/0/0/1",
        "image",
        "label/c/1",
        "none/zarr.json",
        "c/0",
    ],
)
def test_what_is_not_listed_is_not_there(s3: Any, key: str) -> None:
    assert refused(s3, "photos--z", key)[:2] == (404, "NoSuchKey")


def test_nothing_is_made_before_it_is_read_and_then_once(daemon: Daemon, s3: Any) -> None:
    fill(daemon, "lazy", seed=1000)
    assert create(daemon, "lazy", "z", FOLLOWING)["status"] == 200
    before = rendered(daemon)
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="lazy--z")["Contents"]]
    for key in keys:
        s3.head_object(Bucket="lazy--z", Key=key)
    body_of(s3, "lazy--z", "label/c/0")
    assert rendered(daemon) == before
    found: list[bytes] = []

    def read() -> None:
        found.append(body_of(daemon.client(), "lazy--z", "image/c/3/0/0/0"))

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        await_end(reader)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert rendered(daemon) == before + CHUNK
    s3.put_object(Bucket="lazy", Key="train/class1/0001.png", Body=picture(99))  # in another chunk
    assert body_of(s3, "lazy--z", "image/c/3/0/0/0") == found[0]
    assert rendered(daemon) == before + CHUNK


def test_a_replaced_object_changes_its_chunk_alone(daemon: Daemon, s3: Any) -> None:
    fill(daemon, "changing", 20)
    assert create(daemon, "changing", "z", FOLLOWING)["status"] == 200

    def state() -> dict[str, tuple[str, bytes]]:
        keys = [f"image/c/{number}/0/0/0" for number in range(4)]
        got = {key: s3.get_object(Bucket="changing--z", Key=key) for key in keys}
        return {key: (answer["ETag"], answer["Body"].read()) for key, answer in got.items()}

    before = state()
    s3.put_object(Bucket="changing", Key="train/class0/0006.png", Body=picture(77))  # row 2
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    assert changed == ["image/c/0/0/0/0"]
    np.testing.assert_array_equal(
        zarr.open_group(store_of(daemon, "changing--z"), mode="r", zarr_format=3)["image"][:],
        oracle(daemon, "changing", 20)["image"],
    )


def test_new_samples_are_new_rows_and_none_is_nothing(daemon: Daemon, s3: Any) -> None:
    fill(daemon, "growing", 3)
    assert create(daemon, "growing", "z", FOLLOWING)["status"] == 200
    path = "size/zarr.json"
    assert json.loads(body_of(s3, "growing--z", path))["shape"] == [3]
    s3.put_object(Bucket="growing", Key="train/class3/x.png", Body=picture(5))
    s3.put_object(Bucket="growing", Key="train/class3/x.txt", Body=b"5")
    wait_until(lambda: json.loads(body_of(s3, "growing--z", path))["shape"] == [4])
    for entry in s3.list_objects_v2(Bucket="growing")["Contents"]:
        s3.delete_object(Bucket="growing", Key=entry["Key"])
    wait_until(lambda: not s3.list_objects_v2(Bucket="growing--z").get("Contents"))
    wait_until(lambda: refused(s3, "growing--z", "zarr.json")[1] == "NoSuchKey")
    assert refused(s3, "growing--z", "image/c/0/0/0/0")[:2] == (409, "SourceChanged")  # not zeros


def test_what_was_pinned_stays_or_is_refused(daemon: Daemon, s3: Any) -> None:
    fill(daemon, "pinned", 12)
    made = create(daemon, "pinned", "z", VIEW)
    assert made["status"] == 200
    assert len(made["view"]["snapshot"]) == 64
    before = body_of(s3, "pinned--z", "image/c/0/0/0/0")
    s3.put_object(Bucket="pinned", Key="train/class0/0000a.png", Body=picture(40))
    s3.put_object(Bucket="pinned", Key="train/class0/0000a.txt", Body=b"40")
    assert json.loads(body_of(s3, "pinned--z", "image/zarr.json"))["shape"][0] == 12
    assert body_of(s3, "pinned--z", "image/c/0/0/0/0") == before
    s3.put_object(Bucket="pinned", Key="train/class0/0003.png", Body=picture(41))  # row 1
    status, code, message = refused(s3, "pinned--z", "image/c/0/0/0/0")
    assert (status, code) == (409, "SourceChanged")
    assert "train/class0/0003.png" in message
    assert refused(s3, "pinned--z", "image/c/3/0/0/0")[:2] == (404, "NoSuchKey")
    assert len(body_of(s3, "pinned--z", "size/c/0")) == 8 * CHUNK
    assert len(body_of(s3, "pinned--z", "image/c/1/0/0/0")) == len(before)
    by_hash = {"kind": "zarr", "snapshot": made["view"]["snapshot"], "ops": OPS, "chunk": 4}
    assert create(daemon, "pinned", "other", by_hash)["status"] == 200
    array: Any = zarr.open_group(store_of(daemon, "pinned--other"), mode="r", zarr_format=3)["size"]
    assert (array.chunks, array[:4].tolist()) == ((4,), [0, 21, 42, 63])


def wait_until(holds: Callable[[], bool]) -> None:
    """A scan is repeated after ten times its time; asking is what makes that pass."""
    for _ in range(6000):
        try:
            if holds():
                return
        except ClientError:
            pass
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to hold")


def test_bad_samples_are_named_or_masked(daemon: Daemon, s3: Any) -> None:
    fill(daemon, "broken", 9)
    s3.put_object(Bucket="broken", Key="train/class1/0004.png", Body=picture(4)[:70])  # row 4
    assert create(daemon, "broken", "strict", VIEW)["status"] == 200
    assert create(daemon, "broken", "masked", VIEW | {"on_bad": "mask"})["status"] == 200
    status, code, message = refused(s3, "broken--strict", "image/c/0/0/0/0")
    assert (status, code) == (422, "UnprocessableSource")
    assert "train/class1/0004" in message
    assert len(body_of(s3, "broken--strict", "image/c/1/0/0/0")) == CHUNK * SIDE * (SIDE + 2) * 3
    group: Any = zarr.open_group(store_of(daemon, "broken--masked"), mode="r", zarr_format=3)
    assert sorted(name for name, _ in group.members()) == [
        "image",
        "image_status",
        "label",
        "size",
        "size_status",
    ]
    status_array = group["image_status"][:]
    assert status_array.tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert not group["image"][4].any()
    assert group["image"][5].any()
    assert group["size"][4] == 28


def test_shards_of_the_source_are_read_too(daemon: Daemon, s3: Any) -> None:
    s3.create_bucket(Bucket="tars")
    for shard in range(2):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in range(4):
                data = np.full((2, 3), shard * 10 + number, np.float32)
                held = io.BytesIO()
                np.save(held, data)
                member = tarfile.TarInfo(f"{number:03}.npy")
                member.size = len(held.getvalue())
                tar.addfile(member, io.BytesIO(held.getvalue()))
        s3.put_object(Bucket="tars", Key=f"d/{shard}.tar", Body=file.getvalue())
    view = {
        "kind": "zarr",
        "prefix": "d/",
        "fields": {"x": {"ext": ["npy"]}},
        "ops": [{"op": "npy", "field": "x", "args": {"dtype": "float32", "shape": [2, 3]}}],
        "chunk": 3,
        "shard": 2,
    }
    assert create(daemon, "tars", "z", view)["status"] == 200
    array: Any = zarr.open_group(store_of(daemon, "tars--z"), mode="r", zarr_format=3)["x"]
    assert (array.shape, array.chunks, array.shards) == ((8, 2, 3), (3, 2, 3), (6, 2, 3))
    assert array[:, 0, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert array[:, 1, 2].tolist() == array[:, 0, 0].tolist()


def test_two_buckets_joined_are_one_group(daemon: Daemon, s3: Any) -> None:
    for bucket, ext in (("left", "png"), ("right", "txt")):
        s3.create_bucket(Bucket=bucket)
        for number in range(7):
            body = picture(number) if ext == "png" else str(number * 3).encode()
            s3.put_object(Bucket=bucket, Key=f"{number}.{ext}", Body=body)
    sides = [
        post(daemon, "/-/snapshots", {"source": f"s3://{bucket}", "fields": {name: {"ext": [ext]}}})
        for bucket, name, ext in (("left", "image", "png"), ("right", "size", "txt"))
    ]
    both = post(daemon, "/-/snapshots", {"from": sides[0]["snapshot"], "join": sides[1]["snapshot"]})
    view = {"kind": "zarr", "snapshot": both["snapshot"], "ops": OPS, "chunk": 3}
    made = create(daemon, "left", "both", view)
    assert (made["status"], made["view"]["also"]) == (200, ["right"])
    group: Any = zarr.open_group(store_of(daemon, "left--both"), mode="r", zarr_format=3)
    assert group["size"][:].tolist() == [number * 3 for number in range(7)]
    assert group["image"].shape == (7, SIDE, SIDE + 2, 3)
    s3.put_object(Bucket="right", Key="4.txt", Body=b"5")
    assert "s3://right/4.txt" in refused(s3, "left--both", "size/c/1")[2]
    assert len(body_of(s3, "left--both", "image/c/1/0/0/0")) == 3 * SIDE * (SIDE + 2) * 3
    for number in range(7):
        s3.delete_object(Bucket="right", Key=f"{number}.txt")
    s3.delete_bucket(Bucket="right")
    assert refused(s3, "left--both", "image/c/1/0/0/0")[:2] == (409, "SourceChanged")


@BUCKETS
def test_an_array_written_out_is_a_source_again(daemon: Daemon, s3: Any, bucket: str) -> None:
    written = bucket.replace("--", "-written-")
    s3.create_bucket(Bucket=written)
    for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]:
        source = {"Bucket": bucket, "Key": entry["Key"]}
        s3.copy_object(Bucket=written, Key=f"a/{entry['Key']}", CopySource=source)
    rows = {"op": "zarr", "field": "x", "args": {"metadata": f"s3://{written}/a/image/zarr.json"}}
    view = {
        "kind": "zarr",
        "samples": "zarr",
        "prefix": "a/",
        "fields": {"x": {"array": "image"}},
        "ops": [rows],
        "chunk": 9,
    }
    made = create(daemon, written, "again", view)
    assert made["status"] == 200, made
    array: Any = zarr.open_group(store_of(daemon, f"{written}--again"), mode="r", zarr_format=3)["x"]
    np.testing.assert_array_equal(array[:], oracle(daemon)["image"])


def test_lines_are_rows(daemon: Daemon, s3: Any) -> None:
    s3.create_bucket(Bucket="lines")
    s3.put_object(Bucket="lines", Key="d/a.txt", Body=b"5\n7\n")
    s3.put_object(Bucket="lines", Key="d/b.txt", Body=b"1\n2\n3\n")
    view = {
        "kind": "zarr",
        "samples": "lines",
        "prefix": "d/",
        "fields": {"n": {"ext": ["txt"]}},
        "ops": [{"op": "int_label", "field": "n"}],
        "chunk": 2,
    }
    assert create(daemon, "lines", "z", view)["status"] == 200
    array: Any = zarr.open_group(store_of(daemon, "lines--z"), mode="r", zarr_format=3)["n"]
    assert array[:].tolist() == [5, 7, 1, 2, 3]


def test_copies(s3: Any) -> None:
    s3.create_bucket(Bucket="copies")
    source = {"Bucket": "photos--sharded", "Key": "image/c/1/0/0/0"}
    s3.copy_object(Bucket="copies", Key="c", CopySource=source)
    assert body_of(s3, "copies", "c") == body_of(s3, "photos--sharded", "image/c/1/0/0/0")


def test_what_was_made_survives_a_kill() -> None:
    with Daemon.start(workers=2) as daemon:
        fill(daemon, "photos")
        create(daemon, "photos", "z", VIEW | {"shard": 2})
        keys = [f"image/c/{number}/0/0/0" for number in range(4)]
        before = [body_of(daemon.client(), "photos--z", key) for key in keys[:2]]
        assert rendered(daemon) == 4 * CHUNK
        daemon.kill()
        daemon.up()
        again = [body_of(daemon.client(), "photos--z", key) for key in keys]
        assert again[:2] == before
        assert rendered(daemon) == SAMPLES - 4 * CHUNK


def test_definitions(daemon: Daemon) -> None:
    again = create(daemon, "photos", "z", VIEW)
    assert again["status"] == 200
    assert all(op["version"] for op in again["view"]["ops"])
    for changes, path in (
        ({"chunk": 0}, "chunk"),
        ({"shard": -1}, "shard"),
        ({"prefix": "train"}, "prefix"),
        ({"on_bad": "substitute"}, "on_bad"),
        ({"fields": {}}, "fields"),
        ({"fields": {"image": "png", "image_status": "txt"}, "ops": OPS[:2]}, "fields.image_status"),
        ({"fields": {"image": "tiff"}}, "source"),
        ({"ops": OPS[1:]}, "ops"),
        ({"ops": OPS[:1]}, "fields."),
        ({"ops": [*OPS, {"op": "resise", "field": "image"}]}, "ops[3].op"),
        ({"ops": [*OPS, {"op": "mixup", "field": "image"}]}, "ops"),
        ({"snapshot": "x"}, "snapshot"),
        ({"snapshot": "0" * 64, "follow": True}, "follow"),
        ({"chunk": 1 << 14, "shard": 1 << 12}, "shard"),
        ({"chunks": 3}, ""),
    ):
        answer = create(daemon, "photos", "wrong", VIEW | changes)
        assert answer["status"] == 400, (changes, answer)
        assert answer["error"]["detail"].get("path", "").startswith(path), (changes, answer)
    other = create(daemon, "photos", "z", VIEW | {"chunk": 6})
    assert (other["status"], other["error"]["code"]) == (409, "ViewExists")


def test_the_command(daemon: Daemon, mesh: Callable[..., str]) -> None:
    make = ["view", "create", "photos--by-hand", "--zarr", "--prefix", "train", "--chunk", "10"]
    ops = [
        "--op",
        "decode field=image",
        "--op",
        "resize field=image size=[8, 8]",
        "--op",
        "int_label field=txt",
    ]
    mesh(*make, "--shard-chunks", "2", *ops)  # fields by the first keys: image, txt, label
    assert "image, label, txt; 10 samples per chunk" in mesh("view", "ls", "photos")
    group: Any = zarr.open_group(store_of(daemon, "photos--by-hand"), mode="r", zarr_format=3)
    assert (group["image"].shape, group["image"].shards) == ((SAMPLES, 8, 8, 3), (20, 8, 8, 3))
    assert group["txt"][:].tolist() == oracle(daemon)["size"].tolist()
    assert "name the field" in mesh(*make, "--field", "a=png", "--field", "b=txt", "--op", "decode", code=2)
    assert "differ in shape" in mesh(*make, "--field", "image=png", "--op", "decode", code=1)
    assert "samples in order" in mesh(*make, *ops, "--shuffle", "1", code=2)
