"""Datasets and plans by the native protocol: made, refused, changed under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from meshwire.dataset.build_snapshot import Snapshot
from tests.support.native_fixtures import SIDE, error, fill, png

if TYPE_CHECKING:
    from tests.support.native_fixtures import Mesh


def test_a_snapshot_of_objects(mesh: Mesh, pictures: str) -> None:
    got = mesh.snapshot(f"s3://{pictures}/train")
    assert (got["samples"], got["objects"], got["shards"], got["skipped"]) == (50, 50, 1, 0)
    assert got["fields"] == {
        "image": {"kind": "bytes"},
        "label": {"kind": "label", "classes": ["cat", "dog"]},
    }
    assert mesh.snapshot(f"s3://{pictures}/train/")["snapshot"] == got["snapshot"]
    document = mesh.call("GET", f"/-/snapshots/{got['snapshot']}")
    assert Snapshot.from_bytes(document.body).hash == got["snapshot"]


def test_samples_with_a_missing_field_are_left_out(mesh: Mesh, s3: Any, bucket: str) -> None:
    for key, body in [
        ("a.png", png(1)),
        ("a.cls", b"4"),
        ("b.png", png(2)),
        ("c.cls", b"5"),
        ("notes.txt", b""),
    ]:
        s3.put_object(Bucket=bucket, Key=key, Body=body)
    got = mesh.snapshot(f"s3://{bucket}/", {"image": "png", "label": "cls"})
    assert (got["samples"], got["skipped"]) == (1, 2)
    plan = mesh.plan(
        got["snapshot"],
        [{"op": "decode", "field": "image"}, {"op": "resize", "field": "image", "args": {"size": [4, 5]}},
         {"op": "int_label", "field": "label"}],
    )  # fmt: skip
    assert plan["fields"] == {
        "image": {"dtype": "uint8", "shape": [4, 5, 3], "decoded": "rgb"},
        "label": {"dtype": "int64", "shape": []},
    }
    assert mesh.frame(plan["plan"], batch=1)["label"].tolist() == [4]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "InvalidPlan"),
        (b"[]", 400, "InvalidPlan"),
        (b"{" * 5000, 400, "InvalidPlan"),
        (b'{"source": "s3://BUCKET/train", "fields": {"image": "png"}, "kindd": "tar"}', 400, "InvalidPlan"),
        (b'{"source": "s3://BUCKET/train", "fields": {"image": "png"}, "kind": "zip"}', 400, "InvalidPlan"),
        (b'{"source": "BUCKET/train", "fields": {"image": "png"}}', 400, "InvalidPlan"),
        (b'{"source": "s3://BUCKET/train", "fields": {}}', 400, "InvalidPlan"),
        (b'{"source": "s3://BUCKET/nowhere", "fields": {"image": "png"}}', 404, "NoSuchKey"),
        (b'{"source": "s3://BUCKET/train", "fields": {"image": "jpg"}}', 404, "NoSuchKey"),
        (b'{"source": "s3://no-such-bucket-here/", "fields": {"image": "png"}}', 404, "NoSuchBucket"),
        (b'{"source": "s3://-mesh-/", "fields": {"image": "png"}}', 404, "NoSuchBucket"),
    ],
)
def test_snapshots_refused(mesh: Mesh, pictures: str, body: bytes, status: int, code: str) -> None:
    answer = mesh.post("/-/snapshots", body.replace(b"BUCKET", pictures.encode()))
    assert (answer.status, error(answer)["code"]) == (status, code)


def test_a_plan(mesh: Mesh, pictures: str) -> None:
    snapshot = mesh.snapshot(f"s3://{pictures}/train")["snapshot"]
    got = mesh.plan(snapshot, batch=16)
    assert got["fields"]["image"] == {"dtype": "uint8", "shape": [3, SIDE, SIDE], "decoded": "rgb"}
    assert (got["positions"], got["samples"], got["steps"]) == (50, 50, 4)
    assert [op["version"] for op in got["ops"]] == ["3", "2", "1", "1"]  # decode looks no further than a crop
    assert mesh.plan(snapshot, batch=7)["plan"] == got["plan"]
    assert mesh.plan(snapshot, seed=8)["plan"] != got["plan"]
    spec = mesh.ok(mesh.call("GET", f"/-/plans/{got['plan']}"))["spec"]
    assert mesh.ok(mesh.post("/-/plans", {"snapshot": snapshot, "spec": spec}))["plan"] == got["plan"]


@pytest.mark.parametrize(
    ("spec", "status", "code", "path"),
    [
        ({"ops": [{"op": "decoed", "field": "image"}]}, 400, "UnknownOp", "ops[0].op"),
        ({"ops": [{"op": "decode", "field": "imag"}]}, 400, "InvalidPlan", "ops[0].field"),
        ({"ops": [{"op": "decode", "field": "label"}]}, 400, "InvalidPlan", "ops[0].field"),
        (
            {"ops": [{"op": "decode", "field": "image", "version": "9"}]},
            410,
            "UnknownOpBuild",
            "ops[0].version",
        ),
        ({"ops": [{"op": "resize", "field": "image", "args": {"size": 9}}]}, 400, "InvalidPlan", "ops[0]"),
        ({"ops": [], "seed": -1}, 400, "InvalidPlan", "seed"),
        ({"ops": [], "shuffle": {"kind": "blocks"}}, 400, "InvalidPlan", "shuffle.shards"),
        ({"ops": [], "max_bad": 2}, 400, "InvalidPlan", "max_bad"),
        ([], 400, "InvalidPlan", "spec"),
    ],
)
def test_plans_refused(mesh: Mesh, pictures: str, spec: Any, status: int, code: str, path: str) -> None:
    snapshot = mesh.snapshot(f"s3://{pictures}/train")["snapshot"]
    answer = mesh.post("/-/plans", {"snapshot": snapshot, "spec": spec})
    assert (answer.status, error(answer)["code"], error(answer)["detail"]["path"]) == (status, code, path)


def test_plans_of_nothing(mesh: Mesh) -> None:
    nothing = "0" * 64
    assert error(mesh.post("/-/plans", {"snapshot": nothing, "spec": {}}))["code"] == "NoSuchSnapshot"
    for target in (f"/-/plans/{nothing}", f"/-/plans/{nothing}/0/0", f"/-/plans/{nothing}/bad"):
        answer = mesh.call("GET", target)
        assert (answer.status, error(answer)["code"]) == (404, "NoSuchPlan")
    assert mesh.call("GET", f"/-/snapshots/{nothing}").status == 404


def test_changed_objects_are_named(mesh: Mesh, s3: Any, bucket: str) -> None:
    fill(s3, bucket, 6)
    snapshot = mesh.snapshot(f"s3://{bucket}/train")["snapshot"]
    plan = mesh.plan(snapshot)["plan"]
    s3.put_object(Bucket=bucket, Key="train/cat/0001.png", Body=png(77))
    answer = mesh.raw(plan, batch=6)
    assert (answer.status, error(answer)["code"]) == (409, "SnapshotChanged")
    assert error(answer)["detail"]["key"] == "train/cat/0001.png"
    assert mesh.post("/-/plans", {"snapshot": snapshot, "spec": {"ops": []}}).status == 409
    s3.delete_object(Bucket=bucket, Key="train/cat/0001.png")
    answer = mesh.raw(plan, batch=6)
    assert "deleted" in error(answer)["message"]
