"""Transform views over a running daemon: read by plain S3, computed once, gone with their source."""

from __future__ import annotations

import io
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from botocore.exceptions import ClientError
from PIL import Image

from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL = {
    "kind": "transform",
    "ops": [
        {"op": "decode"},
        {"op": "resize", "args": {"size": [32, 48]}},
        {"op": "encode", "args": {"format": "webp", "quality": 80}},
    ],
    "match": [".jpg", ".jpeg"],
    "suffix": ".webp",
    "content_type": "image/webp",
}


def photograph(seed: int, *, height: int = 96, width: int = 128) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(out, "JPEG", quality=92)
    return out.getvalue()


@pytest.fixture(scope="module", params=[1, 2])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon.start(workers=request.param) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="photos")
        for number in range(6):
            client.put_object(Bucket="photos", Key=f"a/{number}.jpg", Body=photograph(number))
        client.put_object(Bucket="photos", Key="a/broken.jpg", Body=photograph(9)[:300])
        client.put_object(Bucket="photos", Key="a/readme.txt", Body=b"no picture")
        client.put_object(Bucket="photos", Key="b/6.jpeg", Body=photograph(6))
        create(daemon, "photos", "small", SMALL)
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def create(daemon: Daemon, bucket: str, name: str, view: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps({"bucket": bucket, "name": name, "view": view}).encode()
    answer = daemon.request("POST", "/-/views", body)
    document = json.loads(answer.body)
    assert isinstance(document, dict)
    return document | {"status": answer.status}


def code(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_objects_are_transformed(s3: Any) -> None:
    got = s3.get_object(Bucket="photos--small", Key="a/1.webp")
    body = got["Body"].read()
    with Image.open(io.BytesIO(body)) as picture:
        assert (picture.format, picture.size) == ("WEBP", (48, 32))
    assert got["ContentType"] == "image/webp"
    head = s3.head_object(Bucket="photos--small", Key="a/1.webp")
    assert (head["ContentLength"], head["ETag"]) == (len(body), got["ETag"])
    part = s3.get_object(Bucket="photos--small", Key="a/1.webp", Range="bytes=5-20")
    assert part["Body"].read() == body[5:21]
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="photos--small", Key="a/1.webp", IfNoneMatch=got["ETag"])
    assert code(error)[0] == 304
    assert s3.get_object(Bucket="photos--small", Key="b/6.webp")["ContentLength"] > 0


def test_listings_have_true_sizes(s3: Any) -> None:
    listed = s3.list_objects_v2(Bucket="photos--small")
    keys = [entry["Key"] for entry in listed["Contents"]]
    assert keys == [*(f"a/{number}.webp" for number in range(6)), "b/6.webp"]
    for entry in listed["Contents"]:
        head = s3.head_object(Bucket="photos--small", Key=entry["Key"])
        assert (entry["Size"], entry["ETag"]) == (head["ContentLength"], head["ETag"])
    folders = s3.list_objects_v2(Bucket="photos--small", Delimiter="/")
    assert [prefix["Prefix"] for prefix in folders["CommonPrefixes"]] == ["a/", "b/"]
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="photos--small", PaginationConfig={"PageSize": 2}
    )
    assert [entry["Key"] for page in pages for entry in page.get("Contents", [])] == keys
    assert "photos--small" in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]


def test_what_cannot_be_transformed_is_refused_by_name(s3: Any) -> None:
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="photos--small", Key="a/broken.webp")
    assert code(error) == (422, "UnprocessableSource")
    assert "s3://photos/a/broken.jpg" in str(error.value)
    for key in ("a/readme.txt", "a/none.webp", "a/1.jpg"):
        with pytest.raises(ClientError) as error:
            s3.get_object(Bucket="photos--small", Key=key)
        assert code(error) == (404, "NoSuchKey")


def test_views_are_read_only(s3: Any) -> None:
    with pytest.raises(ClientError) as error:
        s3.put_object(Bucket="photos--small", Key="x.webp", Body=b"x")
    assert code(error) == (405, "MethodNotAllowed")
    with pytest.raises(ClientError) as error:
        s3.delete_object(Bucket="photos--small", Key="a/1.webp")
    assert code(error) == (405, "MethodNotAllowed")
    s3.head_bucket(Bucket="photos--small")
    s3.copy_object(
        Bucket="photos", Key="copied.webp", CopySource={"Bucket": "photos--small", "Key": "a/2.webp"}
    )
    copied = s3.get_object(Bucket="photos", Key="copied.webp")["Body"].read()
    assert copied == s3.get_object(Bucket="photos--small", Key="a/2.webp")["Body"].read()
    s3.delete_object(Bucket="photos", Key="copied.webp")


def test_a_new_source_makes_a_new_result(s3: Any) -> None:
    s3.put_object(Bucket="photos", Key="c/x.jpg", Body=photograph(20))
    before = s3.get_object(Bucket="photos--small", Key="c/x.webp")["Body"].read()
    s3.put_object(Bucket="photos", Key="c/x.jpg", Body=photograph(21))
    after = s3.get_object(Bucket="photos--small", Key="c/x.webp")["Body"].read()
    assert before != after
    s3.delete_object(Bucket="photos", Key="c/x.jpg")
    with pytest.raises(ClientError) as error:
        s3.get_object(Bucket="photos--small", Key="c/x.webp")
    assert code(error) == (404, "NoSuchKey")


def test_many_ask_and_one_computes(daemon: Daemon) -> None:
    client = daemon.client()
    client.put_object(Bucket="photos", Key="big.jpg", Body=photograph(30, height=2000, width=3000))
    bodies: list[bytes] = []

    def read() -> None:
        bodies.append(daemon.client().get_object(Bucket="photos--small", Key="big.webp")["Body"].read())

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        await_end(reader)
    assert len(set(bodies)) == 1
    assert len(bodies) == 8
    client.delete_object(Bucket="photos", Key="big.jpg")


def test_definitions(daemon: Daemon, s3: Any) -> None:
    again = create(daemon, "photos", "small", SMALL)
    assert again["status"] == 200
    assert all(op["version"] for op in again["view"]["ops"])
    other = create(daemon, "photos", "small", SMALL | {"suffix": ".gif"})
    assert (other["status"], other["error"]["code"]) == (409, "ViewExists")
    for view, path in (
        (SMALL | {"ops": []}, "ops"),
        (SMALL | {"ops": SMALL["ops"][:2]}, "ops"),
        (SMALL | {"ops": [{"op": "decod"}]}, "ops[0].op"),
        (SMALL | {"kind": "mystery"}, "kind"),
        (SMALL | {"matsch": []}, ""),
    ):
        refused = create(daemon, "photos", "other", view)
        assert refused["status"] == 400
        assert refused["error"]["detail"].get("path", "").startswith(path)
    assert create(daemon, "none", "small", SMALL)["status"] == 404
    assert create(daemon, "photos--small", "again", SMALL)["status"] == 400
    listed = json.loads(daemon.request("GET", "/-/views?bucket=photos").body)["views"]
    assert [view["name"] for view in listed] == ["photos--small"]
    assert json.loads(daemon.request("GET", "/-/views/photos--small").body)["bucket"] == "photos"
    create(daemon, "photos", "gone", SMALL)
    s3.delete_bucket(Bucket="photos--gone")
    assert daemon.request("GET", "/-/views/photos--gone").status == 404


def test_the_command(mesh: Callable[..., str]) -> None:
    make = ["view", "create", "photos--tiny", "--match", ".jpg", "--suffix", ".png", "--op", "decode"]
    mesh(*make, "--op", "resize size=[8,8]", "--op", "encode format=png")
    assert "photos--tiny" in mesh("view", "ls", "photos")
    document = json.loads(mesh("view", "show", "photos--tiny"))
    assert document["content_type"] == "image/png"
    assert "a/0.png" in mesh("ls", "-r", "s3://photos--tiny/a/")
    assert "is not a view name" in mesh("view", "create", "photos", "--op", "decode", code=2)
    assert "did you mean 'resize'" in mesh(
        *make[:2], "photos--x", "--op", "decode", "--op", "resise size=3", code=1
    )
    assert "no view" in mesh("view", "rm", "photos", code=3)
    assert mesh("view", "rm", "photos--tiny") == "removed photos--tiny\n"
