"""The native protocol against a daemon: snapshots, plans, frames, formats, bad samples, gather, refusals."""

from __future__ import annotations

import io
import json
import re
import signal
import tarfile
import threading
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from PIL import Image

from meshd.testing.daemons import Daemon
from meshwire import frames
from meshwire.sampleframes import SampleFrame, ragged_rows
from meshwire.snapshots import Snapshot
from tests.component.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.component.s3_raw import Answer

SIDE = 12
CROP: list[dict[str, Any]] = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "random_resized_crop", "field": "image", "args": {"size": SIDE}},
    {"op": "hflip", "field": "image", "args": {}},
    {"op": "to_chw", "field": "image", "args": {}},
]
FIELDS = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}


class Mesh(Wire):
    """Requests of the native protocol."""

    def post(self, target: str, document: Any) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.call("POST", target, body)

    def snapshot(self, source: str, fields: Any = None, **more: Any) -> dict[str, Any]:
        return self.ok(self.post("/-/snapshots", {"source": source, "fields": fields or FIELDS, **more}))

    def plan(self, snapshot: str, ops: Any = CROP, batch: int | None = None, **spec: Any) -> dict[str, Any]:
        document = {"snapshot": snapshot, "spec": {"ops": ops, "seed": 7, **spec}}
        return self.ok(self.post("/-/plans", document if batch is None else {**document, "batch": batch}))

    def ok(self, answer: Answer) -> dict[str, Any]:
        assert answer.status == 200, answer.body
        document: dict[str, Any] = json.loads(answer.body)
        return document

    def frame(
        self, plan: str, epoch: int = 0, step: int = 0, **query: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        answer = self.raw(plan, epoch, step, **query)
        assert answer.status == 200, answer.body
        assert int(answer.headers["content-length"]) == len(answer.body)
        frames.verify(answer.body)
        return frames.views(answer.body)

    def raw(self, plan: str, epoch: int = 0, step: int = 0, **query: Any) -> Answer:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return self.call("GET", f"/-/plans/{plan}/{epoch}/{step}" + (f"?{text}" if text else ""))

    def metric(self, name: str, labels: str = "") -> float:
        text = self.exchange(
            f"GET /metrics HTTP/1.1\r\nHost: {self.host}\r\n\r\n".encode(), method="GET"
        ).body
        found = re.findall(
            rf"^{name}{re.escape(labels)}(?:\{{[^}}]*\}})? (\S+)$", text.decode(), re.MULTILINE
        )
        return sum(float(value) for value in found)


def error(answer: Answer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(document) >= {"code", "message", "request_id"}
    assert "Traceback" not in answer.body.decode()
    return document


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two transform processes and a second user."""
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    entry = {"user_id": "eve", "display_name": "Eve", "email": "eve@example.org"}
    users.write_text(yaml.safe_dump([{**entry, "access_key": "EVEKEY", "secret_key": "evesecret"}]))
    with Daemon.start(args=["--users", str(users), "--transforms", "2"], workers=2) as running:
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture
def mesh(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, node.access_key, node.secret_key)
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def s3(node: Daemon) -> Any:
    return node.client()


def png(sample: int) -> bytes:
    """A picture that tells which sample it is."""
    y, x = np.mgrid[0:20, 0:24]
    image = np.stack([np.full_like(x, sample % 256), x * 10, y * 12], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def fill(s3: Any, bucket: str, count: int, bad: tuple[int, ...] = ()) -> None:
    for sample in range(count):
        body = png(sample)[:60] if sample in bad else png(sample)
        s3.put_object(
            Bucket=bucket, Key=f"train/{'cat' if sample % 3 else 'dog'}/{sample:04d}.png", Body=body
        )


@pytest.fixture(scope="module")
def pictures(s3: Any) -> str:
    """A bucket of 50 pictures in two classes. Read only."""
    name = f"pictures-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=name)
    fill(s3, name, 50)
    return name


# --- datasets -------------------------------------------------------------------------------------------


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
        "image": {"dtype": "uint8", "shape": [4, 5, 3]},
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


# --- plans ----------------------------------------------------------------------------------------------


def test_a_plan(mesh: Mesh, pictures: str) -> None:
    snapshot = mesh.snapshot(f"s3://{pictures}/train")["snapshot"]
    got = mesh.plan(snapshot, batch=16)
    assert got["fields"]["image"] == {"dtype": "uint8", "shape": [3, SIDE, SIDE]}
    assert (got["positions"], got["samples"], got["steps"]) == (50, 50, 4)
    assert [op["version"] for op in got["ops"]] == ["1"] * 4
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


# --- frames ---------------------------------------------------------------------------------------------


def test_a_global_batch_is_the_same_for_every_world(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    for step in (0, 3):
        whole = mesh.frame(plan, 2, step, batch=16)
        for world in (2, 3, 5):
            parts = [mesh.frame(plan, 2, step, batch=16, world=world, rank=rank) for rank in range(world)]
            for name, tensor in whole.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), tensor)
    assert whole["__status"].tolist() == [0, 0] + [3] * 14
    assert whole["__pos"].tolist() == [48, 49, *range(14)]


def test_an_epoch_has_every_sample_once_and_resumes_anywhere(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"], tail="ragged")["plan"]
    steps = [mesh.frame(plan, 1, step, batch=16) for step in range(4)]
    whole = np.concatenate([step["image"] for step in steps])
    assert sorted(whole[:, 0, 0, 0].tolist()) == list(range(50))
    labels = np.concatenate([step["label"] for step in steps])
    assert (labels == (whole[:, 0, 0, 0] % 3 == 0)).all()
    resumed = [mesh.frame(plan, 1, step, batch=10, origin=7) for step in range(5)]
    np.testing.assert_array_equal(np.concatenate([step["image"] for step in resumed]), whole[7:])
    assert mesh.raw(plan, 1, 4, batch=16).status == 400


def test_metadata_and_stock_safetensors(mesh: Mesh, pictures: str) -> None:
    import safetensors.numpy

    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    answer = mesh.raw(plan, 4, 1, batch=8, rank=1, world=2)
    assert answer.headers["content-type"] == frames.CONTENT_TYPE
    assert answer.headers["x-mesh-rows"] == "4"
    header = frames.parse_header(answer.body)
    known = {
        name: header.metadata[name] for name in ("epoch", "step", "rank", "world", "batch", "origin", "plan")
    }
    assert known == {
        "epoch": "4",
        "step": "1",
        "rank": "1",
        "world": "2",
        "batch": "8",
        "origin": "0",
        "plan": plan,
    }
    assert header.body % 4096 == 0
    loaded = safetensors.numpy.load(answer.body)
    np.testing.assert_array_equal(loaded["image"], frames.views(answer.body)["image"])


def test_a_frame_is_decoded_once_for_all_who_ask(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"], seed=99)["plan"]
    before = mesh.metric("meshd_transform_samples_total")
    answers: list[Answer] = []
    askers = [
        threading.Thread(target=lambda: answers.append(mesh.raw(plan, 0, 0, batch=48))) for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len({answer.body for answer in answers}) == 1
    again = mesh.raw(plan, 0, 0, batch=48)
    assert again.headers["x-mesh-frame"] == "hit"
    assert again.body == answers[0].body
    assert mesh.metric("meshd_transform_samples_total") - before == 48
    assert mesh.metric("meshd_batch_rows_served_total") >= 5 * 48
    assert sorted({answer.headers["x-mesh-frame"] for answer in answers}) != ["miss"]


def test_chosen_rows(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    answer = mesh.post(f"/-/plans/{plan}/rows?epoch=3", {"samples": [40, 2, 40]})
    got = frames.views(answer.body)
    assert got["__pos"].tolist() == [40, 2, 40]
    np.testing.assert_array_equal(got["image"][0], got["image"][2])
    alone = frames.views(mesh.post(f"/-/plans/{plan}/rows?epoch=3", {"samples": [2]}).body)
    np.testing.assert_array_equal(alone["image"][0], got["image"][1])
    for samples in ([], [50], [-1], "1", [1.5], None):
        assert mesh.post(f"/-/plans/{plan}/rows", {"samples": samples}).status == 400


def test_ragged_fields(mesh: Mesh, s3: Any, bucket: str) -> None:
    texts = [bytes([65 + i]) * i for i in range(40)]
    for number, text in enumerate(texts):
        s3.put_object(Bucket=bucket, Key=f"{number:03d}.txt", Body=text)
        s3.put_object(Bucket=bucket, Key=f"{number:03d}.png", Body=png(number))
    snapshot = mesh.snapshot(f"s3://{bucket}/", {"image": "png", "text": "txt"})["snapshot"]
    ops = [{"op": "decode", "field": "image"}, {"op": "resize", "field": "image", "args": {"size": 10}}]
    plan = mesh.plan(snapshot, ops, shuffle={"kind": "none"})
    assert plan["fields"]["text"] == {"dtype": "uint8", "ragged": True}
    assert plan["fields"]["image"] == {"dtype": "uint8", "ragged": True}
    got = mesh.frame(plan["plan"], batch=40)
    assert [bytes(row) for row in ragged_rows(got, "text")] == texts
    assert got["image.shapes"].tolist() == [[10, 12, 3]] * 40
    assert len(ragged_rows(got, "image")[3]) == 360
    fixed = mesh.plan(snapshot, CROP, shuffle={"kind": "none"})["plan"]
    mixed = mesh.frame(fixed, batch=40)
    assert mixed["image"][:, 0, 0, 0].tolist() == list(range(40))
    assert [bytes(row) for row in ragged_rows(mixed, "text")] == texts


# --- bad samples ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoilt(s3: Any) -> str:
    """A bucket of 40 pictures of which 5 and 17 are cut short. Read only."""
    name = f"spoilt-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=name)
    fill(s3, name, 40, bad=(5, 17))
    return name


def spoilt_plan(mesh: Mesh, spoilt: str, on_bad: str, **spec: Any) -> str:
    snapshot = mesh.snapshot(f"s3://{spoilt}/train")["snapshot"]
    options = {"on_bad": on_bad, "max_bad": 0.5, "tail": "ragged", **spec}
    return str(mesh.plan(snapshot, **options)["plan"])


def test_substitutes_are_flagged_and_the_same_for_every_world(mesh: Mesh, spoilt: str) -> None:
    plan = spoilt_plan(mesh, spoilt, "substitute")
    whole = mesh.frame(plan, batch=40)
    assert whole["__status"].tolist().count(1) == 2
    assert sorted(whole["__pos"].tolist()) == list(range(40))
    seen = whole["image"][:, 0, 0, 0].tolist()
    assert not {5, 17} & set(seen)
    assert ((np.array(seen) % 3 == 0) == whole["label"]).all()
    parts = [mesh.frame(plan, batch=40, world=3, rank=rank) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in parts]), whole["image"])
    ledger = json.loads(mesh.call("GET", f"/-/plans/{plan}/bad").body)
    assert {entry["key"] for entry in ledger} == {"train/cat/0005", "train/cat/0017"}
    assert all(entry["op"].startswith("decode") and entry["times"] >= 1 for entry in ledger)


def test_masked_rows_are_zeros(mesh: Mesh, spoilt: str) -> None:
    got = mesh.frame(spoilt_plan(mesh, spoilt, "mask"), batch=40)
    masked = np.flatnonzero(got["__status"] == 2)
    assert masked.size == 2
    assert not got["image"][masked].any()
    assert not got["label"][masked].any()


def test_dropped_rows_make_smaller_batches_not_fewer(mesh: Mesh, spoilt: str) -> None:
    plan = spoilt_plan(mesh, spoilt, "drop")
    got = [mesh.frame(plan, step=step, batch=10) for step in range(4)]
    seen = np.concatenate([step["image"] for step in got])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == sorted(set(range(40)) - {5, 17})
    assert all((step["__status"] == 0).all() for step in got)


def test_raise_names_the_sample_and_how_to_replay_it(mesh: Mesh, spoilt: str) -> None:
    answer = mesh.raw(spoilt_plan(mesh, spoilt, "raise"), batch=40)
    assert answer.status == 422
    got = error(answer)
    assert got["code"] == "BadSample"
    assert got["detail"]["key"] in {"train/cat/0005", "train/cat/0017"}
    assert got["detail"]["node"]
    assert "decode" in got["detail"]["op"]
    replayed = mesh.call("GET", got["detail"]["replay"].removeprefix("GET "))
    assert (replayed.status, error(replayed)["detail"]["key"]) == (422, got["detail"]["key"])


def test_too_many_bad_samples_always_raise(mesh: Mesh, spoilt: str) -> None:
    answer = mesh.raw(spoilt_plan(mesh, spoilt, "substitute", max_bad=0.01), batch=40)
    assert answer.status == 422
    assert "2 bad rows of 40, 1 allowed" in error(answer)["message"]


def test_a_dataset_of_bad_samples_raises_rather_than_searching_for_ever(
    mesh: Mesh, s3: Any, bucket: str
) -> None:
    fill(s3, bucket, 4, bad=(0, 1, 2, 3))
    plan = mesh.plan(mesh.snapshot(f"s3://{bucket}/train")["snapshot"], max_bad=1.0)["plan"]
    answer = mesh.raw(plan, batch=4)
    assert (answer.status, error(answer)["code"]) == (422, "BadSample")


# --- tars, samples, tar format --------------------------------------------------------------------------


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


# --- gather ---------------------------------------------------------------------------------------------


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


# --- who, and what else ---------------------------------------------------------------------------------


def test_others_see_nothing(node: Daemon, mesh: Mesh, pictures: str) -> None:
    snapshot = mesh.snapshot(f"s3://{pictures}/train")["snapshot"]
    plan = mesh.plan(snapshot)["plan"]
    mesh.frame(plan, batch=4)
    eve = Mesh(node.endpoint, "EVEKEY", "evesecret")
    answers = [
        eve.post("/-/snapshots", {"source": f"s3://{pictures}/train", "fields": FIELDS}),
        eve.call("GET", f"/-/snapshots/{snapshot}"),
        eve.post("/-/plans", {"snapshot": snapshot, "spec": {"ops": []}}),
        eve.call("GET", f"/-/plans/{plan}"),
        eve.raw(plan, batch=4),
        eve.raw(plan, batch=4, format="samples"),
        eve.raw(plan, batch=4, format="tar"),
        eve.call("GET", f"/-/plans/{plan}/bad"),
        eve.post(f"/-/plans/{plan}/rows", {"samples": [1]}),
    ]
    assert [(answer.status, error(answer)["code"]) for answer in answers] == [(403, "AccessDenied")] * 9
    gathered = eve.post("/-/gather", {"items": [{"bucket": pictures, "key": "train/dog/0000.png"}]})
    assert SampleFrame(gathered.body).status.tolist() == [4]
    eve.close()


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("batch=0", 400), ("batch=-1", 400), ("batch=x", 400), ("batch=99999999999999999999", 400),
        ("world=0", 400), ("rank=1", 400), ("rank=2&world=2", 400), ("origin=51", 400), ("format=xml", 400),
        ("bach=4", 400), ("batch=4&batch=4", 400), ("batch=%ff", 400), ("a=1&" * 200, 400),
        ("batch=16777216&format=tar", 413),
        ("batch=16777216", 413),
    ],
)  # fmt: skip
def test_addresses_refused(mesh: Mesh, pictures: str, query: str, status: int) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    answer = mesh.call("GET", f"/-/plans/{plan}/0/0?{query}")
    assert answer.status == status, answer.body
    error(answer)


@pytest.mark.parametrize(
    "target",
    ["/-/plans/", "/-/plans/abc", "/-/plans/abc/0/0", "/-/plans/%00/0/0", "/-/snapshots/..%2f..%2fetc"],
)
def test_paths_refused(mesh: Mesh, target: str) -> None:
    answer = mesh.call("GET", target)
    assert answer.status in (400, 404)
    error(answer)


def test_steps_and_epochs_that_are_no_numbers(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    for place in ("x/0", "0/x", "-1/0", "0/-1", "0/0/0", "0/9999", "1e3/0"):
        assert mesh.call("GET", f"/-/plans/{plan}/{place}").status in (400, 404)


def test_unsigned_requests_are_refused(mesh: Mesh) -> None:
    request = f"GET /-/plans/{'0' * 64} HTTP/1.1\r\nHost: {mesh.host}\r\n\r\n".encode()
    assert mesh.exchange(request, method="GET").status == 403


def test_a_transform_process_that_dies_costs_nothing_but_time(
    node: Daemon, mesh: Mesh, pictures: str
) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"], seed=123)["plan"]
    wanted = mesh.frame(plan, 5, 0, batch=48)
    for name in ("transform-0", "transform-1"):
        node.signal_child(name, signal.SIGKILL)
    got = mesh.frame(plan, 5, 0, batch=48, origin=0, rank=0, world=1)
    np.testing.assert_array_equal(got["image"], wanted["image"])
    other = [mesh.frame(plan, 5, 0, batch=48, rank=rank, world=2) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in other]), wanted["image"])
    assert not np.concatenate([part["__status"] for part in other]).any()


def test_a_process_that_dies_in_the_middle_loses_nothing(s3: Any, tmp_path: Path) -> None:
    env = {"MESHD_FAILPOINTS": "transform.row=kill:after 30"}
    with Daemon.start(tmp_path / "data", env=env) as node:
        client = node.client()
        client.create_bucket(Bucket="crashing")
        fill(client, "crashing", 40)
        mesh = Mesh(node.endpoint, node.access_key, node.secret_key)
        plan = mesh.plan(mesh.snapshot("s3://crashing/train")["snapshot"], max_bad=1.0)["plan"]
        got = mesh.frame(plan, batch=40)
        mesh.close()
        # The process dies at its 31st row, and its successor serves the rest: nothing is lost.
        assert sorted(got["image"][:, 0, 0, 0].tolist()) == list(range(40))
        assert not got["__status"].any()
