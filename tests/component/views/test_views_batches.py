"""Batches views over a running daemon: a plan's frames as `.safetensors` objects, by plain S3."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from botocore.exceptions import ClientError
from PIL import Image

from meshwire.frame import tensor_frame
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, BATCH, WORLD, EPOCHS = 50, 16, 3, 11
STEPS = -(-SAMPLES // BATCH)
RESIZED: list[dict[str, Any]] = [
    {"op": "decode", "field": "image"},
    {"op": "random_resized_crop", "field": "image", "args": {"size": 8}},
]
FIELDS = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}


def picture(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (10 + seed % 5, 12, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="photos")
        client.create_bucket(Bucket="others")
        for number in range(SAMPLES):
            client.put_object(
                Bucket="photos", Key=f"train/class{number % 3}/{number:04}.png", Body=picture(number)
            )
        create(daemon, "train", plan_of(daemon, RESIZED), epochs=EPOCHS)
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def post(daemon: Daemon, path: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = daemon.request("POST", path, json.dumps(document).encode())
    found = json.loads(answer.body)
    assert isinstance(found, dict)
    return found | {"status": answer.status}


def plan_of(daemon: Daemon, ops: list[dict[str, Any]], source: str = "photos/train/", **spec: Any) -> str:
    snapshot = post(daemon, "/-/snapshots", {"source": f"s3://{source}", "fields": FIELDS})
    made = post(
        daemon, "/-/plans", {"snapshot": snapshot["snapshot"], "spec": {"ops": ops, "seed": 7} | spec}
    )
    return str(made["plan"])


def create(daemon: Daemon, name: str, plan: str, bucket: str = "photos", **view: Any) -> dict[str, Any]:
    document = {"kind": "batches", "plan": plan, "batch": BATCH, "world": WORLD} | view
    return post(daemon, "/-/views", {"bucket": bucket, "name": name, "view": document})


def native(daemon: Daemon, plan: str, epoch: int, step: int, rank: int) -> bytes:
    answer = daemon.request("GET", f"/-/plans/{plan}/{epoch}/{step}?batch={BATCH}&rank={rank}&world={WORLD}")
    assert answer.status == 200, answer.body
    return answer.body


def keys_of(s3: Any, bucket: str, **options: Any) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, **options)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def test_an_object_is_the_native_frame(daemon: Daemon, s3: Any) -> None:
    plan = plan_of(daemon, RESIZED)
    for epoch, step, rank in ((0, 0, 0), (10, 3, 2), (3, 1, 1)):
        key = f"epoch={epoch}/step={step:06d}/rank={rank}-of-{WORLD}.safetensors"
        got = s3.get_object(Bucket="photos--train", Key=key)
        body = got["Body"].read()
        assert body == native(daemon, plan, epoch, step, rank)
        head = s3.head_object(Bucket="photos--train", Key=key)
        assert (head["ContentLength"], head["ETag"]) == (len(body), got["ETag"])
        assert head["ContentType"] == tensor_frame.CONTENT_TYPE
        tensors = safetensors.numpy.load(body)
        assert tensors["image"].shape == (len(tensors["__pos"]), 8, 8, 3)
        part = s3.get_object(Bucket="photos--train", Key=key, Range="bytes=100-5000")
        assert part["Body"].read() == body[100:5001]
        with pytest.raises(ClientError) as error:
            s3.get_object(Bucket="photos--train", Key=key, IfNoneMatch=got["ETag"])
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 304


def test_listings_are_whole_sorted_and_true(s3: Any) -> None:
    wanted = sorted(
        f"epoch={epoch}/step={step:06d}/rank={rank}-of-{WORLD}.safetensors"
        for epoch in range(EPOCHS)
        for step in range(STEPS)
        for rank in range(WORLD)
    )
    assert keys_of(s3, "photos--train") == wanted
    assert keys_of(s3, "photos--train", PaginationConfig={"PageSize": 7}) == wanted
    assert keys_of(s3, "photos--train", Prefix="epoch=1") == [k for k in wanted if k.startswith("epoch=1")]
    folders = s3.list_objects_v2(Bucket="photos--train", Delimiter="/", MaxKeys=4)
    assert [found["Prefix"] for found in folders["CommonPrefixes"]] == [
        "epoch=0/",
        "epoch=1/",
        "epoch=10/",
        "epoch=2/",
    ]
    assert folders["IsTruncated"]
    for entry in s3.list_objects_v2(Bucket="photos--train", Prefix="epoch=10/step=000003")["Contents"]:
        got = s3.get_object(Bucket="photos--train", Key=entry["Key"])
        assert (entry["Size"], entry["ETag"]) == (len(got["Body"].read()), got["ETag"])


@pytest.mark.parametrize(
    "key",
    [
        "epoch=11/step=000000/rank=0-of-3.safetensors",
        "epoch=0/step=000004/rank=0-of-3.safetensors",
        "epoch=0/step=000000/rank=3-of-3.safetensors",
        "epoch=0/step=000000/rank=0-of-8.safetensors",
        "epoch=00/step=000000/rank=0-of-3.safetensors",
        "epoch=0/step=0/rank=0-of-3.safetensors",
        "epoch=0/",
        "x",
    ],
)
def test_what_is_not_listed_is_not_there(s3: Any, key: str) -> None:
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="photos--train", Key=key)
    assert error.value.response["Error"]["Code"] == "NoSuchKey"


def test_sizes_of_ragged_batches_are_those_of_the_frames(daemon: Daemon, s3: Any) -> None:
    plan = plan_of(daemon, RESIZED[:1])
    assert create(daemon, "ragged", plan)["status"] == 200
    listed = {
        entry["Key"]: (entry["Size"], entry["ETag"])
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="photos--ragged")
        for entry in page["Contents"]
    }
    assert len(listed) == STEPS * WORLD
    for key, (size, etag) in listed.items():
        got = s3.get_object(Bucket="photos--ragged", Key=key)
        body = got["Body"].read()
        assert (len(body), got["ETag"]) == (size, etag)
        tensor_frame.verify_frame(body)


def test_batches_of_a_packed_plan(daemon: Daemon, s3: Any) -> None:
    s3.create_bucket(Bucket="tokens")
    for number in range(20):
        held = io.BytesIO()
        np.save(held, np.arange(number % 7 + 1, dtype=np.int32))
        s3.put_object(Bucket="tokens", Key=f"{number:02}.npy", Body=held.getvalue())
    snapshot = post(daemon, "/-/snapshots", {"source": "s3://tokens", "fields": {"ids": {"ext": ["npy"]}}})
    spec = {"ops": [{"op": "npy", "field": "ids"}], "pack": {"fields": ["ids"], "length": 16}}
    made = post(daemon, "/-/plans", {"snapshot": snapshot["snapshot"], "spec": spec, "batch": 2})
    assert made["status"] == 200, made
    assert create(daemon, "packed", made["plan"], bucket="tokens", batch=2, world=1)["status"] == 200
    listed = s3.list_objects_v2(Bucket="tokens--packed")["Contents"]
    assert len(listed) == made["steps"]
    for step, entry in enumerate(listed):
        body = s3.get_object(Bucket="tokens--packed", Key=entry["Key"])["Body"].read()
        assert len(body) == entry["Size"]
        assert body == daemon.request("GET", f"/-/plans/{made['plan']}/0/{step}?batch=2").body


def test_batches_are_copied(daemon: Daemon, s3: Any) -> None:
    key = "epoch=2/step=000001/rank=0-of-3.safetensors"
    s3.copy_object(
        Bucket="others", Key="kept.safetensors", CopySource={"Bucket": "photos--train", "Key": key}
    )
    kept = s3.get_object(Bucket="others", Key="kept.safetensors", ChecksumMode="ENABLED")
    assert kept["Body"].read() == native(daemon, plan_of(daemon, RESIZED), 2, 1, 0)
    assert kept["ContentType"] == tensor_frame.CONTENT_TYPE
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket="photos--train", Key=key, Body=b"")
    assert error.value.response["Error"]["Code"] == "MethodNotAllowed"


def test_a_bad_sample_and_a_replaced_one_are_named(daemon: Daemon, s3: Any) -> None:
    for number in range(8):
        s3.put_object(Bucket="others", Key=f"b/c/{number}.png", Body=picture(number))
    s3.put_object(Bucket="others", Key="b/c/5.png", Body=picture(5)[:60])
    spec = {"on_bad": "raise", "shuffle": {"kind": "none"}}
    plan = plan_of(daemon, RESIZED, "others/b/", **spec)
    assert create(daemon, "b", plan, bucket="others", batch=4, world=1)["status"] == 200
    first, second = keys_of(s3, "others--b")
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="others--b", Key=second)
    response = error.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (
        422,
        "UnprocessableSource",
    )
    assert "b/c/5" in response["Error"]["Message"]
    s3.put_object(Bucket="others", Key="b/c/0.png", Body=picture(30))
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="others--b", Key=first)
    response = error.value.response
    assert (response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]) == (
        409,
        "SourceChanged",
    )
    assert "b/c/0.png" in response["Error"]["Message"]


def test_definitions(daemon: Daemon) -> None:
    plan = plan_of(daemon, RESIZED)
    again = create(daemon, "train", plan, epochs=EPOCHS)
    assert again["status"] == 200
    assert again["view"]["plan"] == plan
    for changes, path in (
        ({"batch": 0}, "batch"),
        ({"world": 0}, "world"),
        ({"epochs": 0}, "epochs"),
        ({"plan": "x"}, "plan"),
        ({"steps": 3}, ""),
    ):
        refused = create(daemon, "wrong", changes.pop("plan", plan), **changes)  # type: ignore[arg-type]
        assert refused["status"] == 400
        assert refused["error"]["detail"].get("path", "").startswith(path)
    assert create(daemon, "wrong", plan, bucket="others")["error"]["detail"]["path"] == "plan"
    assert create(daemon, "wrong", "0" * 64)["error"]["code"] == "NoSuchPlan"
    drop = plan_of(daemon, RESIZED, tail="drop")
    assert create(daemon, "wrong", drop, batch=SAMPLES + 1)["error"]["detail"]["path"] == "batch"


def test_the_command(mesh: Callable[..., str], s3: Any) -> None:
    make = ["view", "create", "photos--by-hand", "--batches", "10", "--world", "2", "--epochs", "2"]
    ops = ["--op", "decode", "--op", "random_resized_crop size=8"]
    chosen = ["--prefix", "train", "--field", "image=png", "--field", "label=@class", "--shuffle", "3"]
    mesh(*make, *chosen, *ops)
    assert "10 rows for 2 ranks, 2 epochs" in mesh("view", "ls", "photos")
    assert len(keys_of(s3, "photos--by-hand")) == 2 * 5 * 2
    plan = json.loads(mesh("view", "show", "photos--by-hand"))["plan"]
    mesh("view", "create", "photos--same", "--batches", "10", "--world", "2", "--plan", plan)
    key = "epoch=0/step=000002/rank=1-of-2.safetensors"
    bodies = [s3.get_object(Bucket=f"photos--{name}", Key=key)["Body"].read() for name in ("same", "by-hand")]
    assert bodies[0] == bodies[1]
    assert "--plan can be combined only" in mesh(*make, "--plan", plan, *ops, code=2)
    assert "not both" in mesh(*make, "--zarr", code=2)
    assert "NAME=EXT" in mesh(*make, "--field", "image", code=2)
    assert "take samples by --field" in mesh(*make, "--match", ".png", code=2)
    assert "did you mean 'decode'" in mesh(*make, *chosen, "--op", "decod", code=1)
    assert "no field 'picture'" in mesh(*make, *chosen, "--op", "decode field=picture", code=2)
