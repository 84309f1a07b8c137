"""Frames: global batches, epochs, metadata, chosen rows, ragged fields."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.frame import tensor_frame
from meshwire.frame.sample_frames import ragged_rows
from tests.support.bounded_wait import await_end, await_true
from tests.support.native_fixtures import CROP, png

if TYPE_CHECKING:
    from tests.support.native_fixtures import Mesh
    from tests.support.s3_raw import Answer


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
    assert answer.headers["content-type"] == tensor_frame.CONTENT_TYPE
    assert answer.headers["x-mesh-rows"] == "4"
    header = tensor_frame.parse_frame_header(answer.body)
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
    np.testing.assert_array_equal(loaded["image"], tensor_frame.tensor_views(answer.body)["image"])


def test_a_range_of_a_frame_is_a_part_of_it(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    whole = mesh.raw(plan, 0, 0, batch=8).body
    size = len(whole)
    for wanted, start, end in ("100-199", 100, 200), ("-50", size - 50, size), (f"9-{2 * size}", 9, size):
        answer = mesh.call("GET", f"/-/plans/{plan}/0/0?batch=8", headers={"Range": f"bytes={wanted}"})
        assert (answer.status, answer.body) == (206, whole[start:end])
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    for wanted in f"{size}-", "1-2,4-5", "nonsense":
        answer = mesh.call("GET", f"/-/plans/{plan}/0/0?batch=8", headers={"Range": f"bytes={wanted}"})
        assert (answer.status, answer.body) == (200, whole)


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
        await_end(asker)
    assert len({answer.body for answer in answers}) == 1
    again = mesh.raw(plan, 0, 0, batch=48)
    assert again.headers["x-mesh-frame"] == "hit"
    assert again.body == answers[0].body
    assert mesh.metric("meshd_transform_samples_total") - before == 48
    await_true(lambda: mesh.metric("meshd_batch_rows_served_total") >= 5 * 48)  # counted when it is sent
    assert sorted({answer.headers["x-mesh-frame"] for answer in answers}) != ["miss"]


def test_chosen_rows(mesh: Mesh, pictures: str) -> None:
    plan = mesh.plan(mesh.snapshot(f"s3://{pictures}/train")["snapshot"])["plan"]
    answer = mesh.post(f"/-/plans/{plan}/rows?epoch=3", {"samples": [40, 2, 40]})
    got = tensor_frame.tensor_views(answer.body)
    assert got["__pos"].tolist() == [40, 2, 40]
    np.testing.assert_array_equal(got["image"][0], got["image"][2])
    alone = tensor_frame.tensor_views(mesh.post(f"/-/plans/{plan}/rows?epoch=3", {"samples": [2]}).body)
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
    assert plan["fields"]["image"] == {"dtype": "uint8", "ragged": True, "decoded": "rgb"}
    got = mesh.frame(plan["plan"], batch=40)
    assert [bytes(row) for row in ragged_rows(got, "text")] == texts
    assert got["image.shapes"].tolist() == [[10, 12, 3]] * 40
    assert len(ragged_rows(got, "image")[3]) == 360
    fixed = mesh.plan(snapshot, CROP, shuffle={"kind": "none"})["plan"]
    mixed = mesh.frame(fixed, batch=40)
    assert mixed["image"][:, 0, 0, 0].tolist() == list(range(40))
    assert [bytes(row) for row in ragged_rows(mixed, "text")] == texts
