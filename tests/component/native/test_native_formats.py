"""Datasets of tars, source bytes as samples and as tars, gathers."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from meshwire.frame.sample_frames import SampleFrame
from tests.support.native_fixtures import CROP, error, png

if TYPE_CHECKING:
    from tests.support.native_fixtures import Mesh


def shard(samples: range) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for sample in samples:
            for ext, body in (("png", png(sample)), ("cls", str(sample % 4).encode())):
                member = tarfile.TarInfo(f"part/{sample:05d}.{ext}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


TAR_FIELDS = {"image": ["png"], "label": ["cls"]}
TAR_OPS = [*CROP, {"op": "int_label", "field": "label"}]


def test_a_dataset_of_tars(mesh: Mesh, s3: Any, bucket: str) -> None:
    for number in range(3):
        s3.put_object(Bucket=bucket, Key=f"wds/{number}.tar", Body=shard(range(number * 8, number * 8 + 8)))
    got = mesh.snapshot(f"s3://{bucket}/wds", TAR_FIELDS)
    assert (got["kind"], got["samples"], got["shards"], got["objects"]) == ("tar", 24, 3, 3)
    plan = mesh.plan(got["snapshot"], TAR_OPS, shuffle={"kind": "blocks", "shards": 2})["plan"]
    batch = mesh.frame(plan, batch=24)
    seen = batch["image"][:, 0, 0, 0]
    assert sorted(seen.tolist()) == list(range(24))
    assert (batch["label"] == seen % 4).all()
    # as a tar again, with the same samples in the same order
    answer = mesh.raw(plan, batch=24, format="tar")
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        names = tar.getnames()
        first = tar.extractfile(names[0])
        assert first is not None
        assert first.read() == png(int(seen[0]))
    assert len(names) == 48
    assert names[0].endswith(f"part/{int(seen[0]):05d}.png")


def test_source_bytes(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"], shuffle={"kind": "none"})["plan"]
    answer = mesh.raw(plan, step=3, batch=16, format="samples")
    got = SampleFrame(answer.body)
    got.verify()
    assert got.metadata["fields"] == "image,label"
    assert len(got) == 32
    assert got.status.tolist() == [0] * 4 + [3] * 28
    assert got.name(0) == "train/dog/0045.png" or got.name(0).startswith("train/")  # type: ignore[union-attr]
    name = got.name(0) or ""
    assert bytes(got[0]) == png(int(name[-8:-4]))
    assert bytes(got[1]) in (b"0", b"1")
    answer = mesh.raw(plan, step=3, batch=16, format="tar")
    assert answer.headers["x-mesh-rows"] == "2"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        assert len(tar.getnames()) == 4


@pytest.mark.parametrize("damage", ["cut", "size", "checksum", "garbage"])
def test_tars_that_lie(mesh: Mesh, s3: Any, bucket: str, damage: str) -> None:
    body = bytearray(shard(range(4)))
    if damage == "cut":
        body = body[:1200]
    elif damage == "size":
        body[124:136] = b"77777777777\0"
        body[148:156] = b" " * 8
        body[148:156] = b"%06o\0 " % sum(body[:512])
    elif damage == "checksum":
        body[0:4] = b"zzzz"
    else:
        body = bytearray(b"\xff" * 4096)
    s3.put_object(Bucket=bucket, Key="lying.tar", Body=bytes(body))
    answer = mesh.post("/-/snapshots", {"source": f"s3://{bucket}/lying.tar", "fields": TAR_FIELDS})
    assert (answer.status, error(answer)["code"]) == (422, "BadSample")
    assert "lying.tar" in error(answer)["message"]


def test_gather_is_ordered_and_marks_what_fails(mesh: Mesh, s3: Any, bucket: str) -> None:
    big = bytes(range(256)) * 10_000
    s3.put_object(Bucket=bucket, Key="big", Body=big)
    s3.put_object(Bucket=bucket, Key="s.tar", Body=shard(range(3)))
    s3.put_object(Bucket=bucket, Key="empty", Body=b"")
    items = [
        {"bucket": bucket, "key": "big", "range": [300, 2_000_000], "tag": {"a": 1}},
        {"bucket": bucket, "key": "nothing"},
        {"bucket": bucket, "key": "s.tar", "member": "part/00002.png"},
        {"bucket": bucket, "key": "s.tar", "member": "part/00002.png", "range": [1, 3]},
        {"bucket": bucket, "key": "s.tar", "member": "part/00009.png"},
        {"bucket": "no-such-bucket", "key": "x"},
        {"bucket": bucket, "key": "empty"},
        {"bucket": bucket, "key": "big", "range": [5_000_000, 1]},
        {"bucket": bucket, "key": "big"},
    ]
    before = mesh.metric("meshd_gather_items_total", '{result="NoSuchKey"}')
    answer = mesh.post("/-/gather", {"items": items})
    assert mesh.metric("meshd_gather_items_total", '{result="NoSuchKey"}') == before + 2
    got = SampleFrame(answer.body)
    got.verify()
    assert got.status.tolist() == [0, 4, 0, 0, 4, 4, 0, 4, 0]
    assert bytes(got[0]) == big[300:2_000_300]
    assert bytes(got[2]) == png(2)
    assert bytes(got[3]) == png(2)[1:4]
    assert bytes(got[6]) == b""
    assert bytes(got[8]) == big
    errors = json.loads(got.metadata["errors"])
    assert errors == {"1": "NoSuchKey", "4": "NoSuchKey", "5": "NoSuchBucket", "7": "InvalidRange"}
    assert json.loads(got.metadata["tags"])[0] == {"a": 1}
    answer = mesh.post("/-/gather", {"items": items, "format": "tar"})
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        assert tar.getnames() == [
            "big", "nothing.error", "part/00002.png", "part/00002.png", "part/00009.png.error", "x.error",
            "empty", "big.error", "big",
        ]  # fmt: skip
        assert tar.getmembers()[8].size == len(big)
        tags = [json.loads(member.pax_headers.get("SHARDMESH.tag", "null")) for member in tar.getmembers()]
        assert tags == [{"a": 1}] + [None] * 8


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"items": []}', b'{"items": [{}]}', b'{"items": [{"bucket": "b", "key": ""}]}',
     b'{"items": [{"bucket": "b", "key": "k", "range": [1]}]}',
     b'{"items": [{"bucket": "b", "key": "k", "range": [-1, 2]}]}',
     b'{"items": [{"bucket": "b", "key": "k"}], "format": "zip"}'],
)  # fmt: skip
def test_gathers_refused(mesh: Mesh, body: bytes) -> None:
    answer = mesh.post("/-/gather", body)
    assert (answer.status, error(answer)["code"]) == (400, "InvalidPlan")
