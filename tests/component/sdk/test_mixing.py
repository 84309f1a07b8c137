"""Mixup and cutmix over a real daemon: what a row becomes is its pair's business alone."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import views
from meshsdk.cli import run
from meshsdk.client.s3_client import connect
from meshsdk.errors import BadSampleError, MeshError
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec
from tests.component.store.test_integrity_copies import damage
from tests.support.daemons import Daemon
from tests.support.native_fixtures import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, SIDE, SEED, EPOCH = 41, 16, 7, 1
BROKEN = 17


def picture(number: int, width: int = 24) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (20, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def one_hot(number: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.eye(3, dtype=np.float32)[number])
    return out.getvalue()


@pytest.fixture(scope="module")
def environment(daemon: Daemon) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MESH_ENDPOINT", daemon.endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    patch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    client = daemon.client()
    for bucket in ("mixed", "broken", "sided"):
        client.create_bucket(Bucket=bucket)
    for number in range(SAMPLES):
        key = f"train/{'abc'[number % 3]}/{number:04d}.png"
        client.put_object(Bucket="mixed", Key=key, Body=picture(number))
        body = picture(number)[:-30] if number == BROKEN else picture(number)
        client.put_object(Bucket="broken", Key=key, Body=body)
        client.put_object(Bucket="sided", Key=f"{number:04d}.png", Body=picture(number))
        client.put_object(Bucket="sided", Key=f"{number:04d}.cls", Body=str(100 + number).encode())
        client.put_object(Bucket="sided", Key=f"{number:04d}.npy", Body=one_hot(number % 3))
    yield
    patch.undo()


def dataset(*more: Any, bucket: str = "mixed") -> Any:
    ds = mesh.open(f"s3://{bucket}/train", fields={"image": "png", "label": "@class"})
    return ds.map(ops.decode("image"), ops.random_resized_crop("image", SIDE), *more)


def epoch(ds: Any, batch: int = SAMPLES, world: int = 1, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All positions of an epoch, as batches of this size on so many ranks deliver them."""
    parts: list[Any] = []
    with_options = {"seed": SEED, "tail": "ragged", **options}
    loaders = [mesh.Loader(ds, global_batch=batch, rank=r, world=world, **with_options) for r in range(world)]
    try:
        for step in range(-(-SAMPLES // batch)):
            for loader in loaders:
                part = loader.at(step, EPOCH)
                found = {name: np.asarray(part[name]).copy() for name in part}
                parts.append(found | {"position": part.positions, "status": part.status})
    finally:
        for loader in loaders:
            loader.close()
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.usefixtures("environment")
def test_mixup_blends_each_pair_by_one_weight() -> None:
    plain, mixed = epoch(dataset()), epoch(dataset(ops.mixup("image", alpha=0.8)))
    assert np.array_equal(mixed["position"], np.arange(SAMPLES))
    weights = mixed["image.weight"]
    assert weights.dtype == np.float32
    assert len(np.unique(weights)) > 10
    for position in range(SAMPLES - 1):
        other, weight = position ^ 1, float(weights[position])
        own = plain["image"][position].astype(np.float64)
        expected = np.rint(weight * own + (1 - weight) * plain["image"][other])
        np.testing.assert_array_equal(mixed["image"][position], expected)
        assert weight == weights[other]
        random = KeyedRandom(SEED, EPOCH, position & ~1, 2)  # the op's place in the plan
        random.chance(1.0)
        assert abs(random.symmetric_beta(0.8) - weight) <= 1 / 512
        assert mixed["label.other"][position] == plain["label"][other if weight < 1 else position]
    np.testing.assert_array_equal(mixed["label"], plain["label"])


@pytest.mark.usefixtures("environment")
def test_the_last_of_an_odd_epoch_stands_alone() -> None:
    plain, mixed = epoch(dataset()), epoch(dataset(ops.cutmix("image")))
    assert mixed["image.weight"][-1] == 1.0
    np.testing.assert_array_equal(mixed["image"][-1], plain["image"][-1])
    assert mixed["label.other"][-1] == plain["label"][-1]


@pytest.mark.usefixtures("environment")
def test_cutmix_pastes_a_rectangle_and_tells_its_share() -> None:
    plain, mixed = epoch(dataset()), epoch(dataset(ops.cutmix("image", alpha=1.0)))
    pasted = 0
    for position in range(SAMPLES - 1):
        theirs = (mixed["image"][position] == plain["image"][position ^ 1]).all(axis=2)
        ours = (mixed["image"][position] == plain["image"][position]).all(axis=2)
        assert (theirs | ours).all()
        area = 1 - float(mixed["image.weight"][position])
        assert theirs.sum() == pytest.approx(area * SIDE * SIDE, abs=0.01)
        rows, columns = np.nonzero(theirs)
        if rows.size:
            pasted += 1
            assert theirs[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
    assert pasted > SAMPLES // 2


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("batch", "world"), [(1, 1), (7, 1), (8, 3), (SAMPLES, 4)])
def test_content_does_not_depend_on_batch_or_world_size(batch: int, world: int) -> None:
    ds = dataset(ops.mixup_or_cutmix("image"), ops.to_chw("image"))
    whole, parts = epoch(ds), epoch(ds, batch, world)
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)


@pytest.mark.usefixtures("environment")
def test_a_batch_of_pairs_prepares_each_sample_once(daemon: Daemon) -> None:
    def calls(op: str) -> float:
        with contextlib.closing(daemon.connect()) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return sum(
            map(float, re.findall(rf'^meshd_op_calls_total\{{op="{re.escape(op)}"\}} (\S+)$', text, re.M))
        )

    def prepared(seed: int) -> float:
        """How many samples a batch of new pairs took."""
        before = calls("decode+random_resized_crop"), calls("mixup")
        with mesh.Loader(dataset(ops.mixup("image", alpha=3.0)), global_batch=24, seed=seed) as loader:
            loader.at(0)
        assert calls("mixup") - before[1] == 24
        return calls("decode+random_resized_crop") - before[0]

    # A slice that takes long ends early, and may cut a pair: that costs a row. Where other things keep the
    # cores busy each may; then it is tried again.
    found = next((each for each in map(prepared, range(SEED + 1, SEED + 9)) if each <= 28), None)
    assert found is not None
    assert found >= 24


@pytest.mark.usefixtures("environment")
def test_what_follows_is_done_to_the_mixed_value() -> None:
    mixed = epoch(dataset(ops.mixup("image")))
    after = epoch(dataset(ops.mixup("image"), ops.normalize("image", 0.5, 0.25), ops.to_chw("image")))
    expected = (mixed["image"].astype(np.float32) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(after["image"], expected.transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.usefixtures("environment")
def test_with_p_0_nothing_is_mixed() -> None:
    plain, mixed = epoch(dataset()), epoch(dataset(ops.mixup("image", p=0)))
    np.testing.assert_array_equal(plain["image"], mixed["image"])
    assert (mixed["image.weight"] == 1).all()
    np.testing.assert_array_equal(mixed["label.other"], plain["label"])


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("on_bad", ["substitute", "mask"])
def test_the_neighbour_of_a_bad_sample_stands_alone(on_bad: Any) -> None:
    mixing = ops.mixup("image", alpha=5.0)
    whole = epoch(dataset(mixing, bucket="broken"), on_bad=on_bad, max_bad=1.0)
    (bad,) = np.nonzero(whole["status"])[0]
    plain = epoch(dataset(bucket="broken"), on_bad=on_bad, max_bad=1.0)
    np.testing.assert_array_equal(whole["image"][bad ^ 1], plain["image"][bad ^ 1])
    assert whole["image.weight"][bad ^ 1] == 1
    weight = float(whole["image.weight"][bad])
    if on_bad == "mask":
        assert weight == whole["label.other"][bad] == 0
        assert not whole["image"][bad].any()
    else:  # the stand-in is mixed with the neighbour
        expected = np.rint(weight * plain["image"][bad] + (1 - weight) * plain["image"][bad ^ 1])
        assert 0 < weight < 1
        np.testing.assert_array_equal(whole["image"][bad], expected)
        assert whole["label.other"][bad] == plain["label"][bad ^ 1]
    parts = epoch(dataset(mixing, bucket="broken"), 3, on_bad=on_bad, max_bad=1.0)
    np.testing.assert_array_equal(whole["image"], parts["image"])
    with pytest.raises(BadSampleError, match=f"{BROKEN:04d}"):
        epoch(dataset(mixing, bucket="broken"), on_bad="raise")


def test_a_pair_whose_fields_differ_in_size_is_judged_alike_wherever_a_slice_begins(
    daemon: Daemon, bucket: str
) -> None:
    """A row whose picture was prepared for the one before it had its mask cut without a look at that."""
    count, unlike = 8, (2, 5)
    with connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        for number in range(count):
            client.put(bucket, f"{number}.png", picture(number))
            client.put(bucket, f"{number}.mask.png", picture(number, 25 if number in unlike else 24))
        ds = mesh.open(f"s3://{bucket}/", fields={"image": "png", "mask": "mask.png"}, client=client)
        both = ops.over(("image", "mask"), ops.random_resized_crop, SIDE, scale=(0.2, 1.0))
        ds = ds.map(ops.decode("image"), ops.decode("mask"), both, ops.mixup("image"))
        for batch in (count, 3, 1):
            with mesh.Loader(ds, batch, shuffle=False, on_bad="mask", max_bad=1.0, tail="ragged") as loader:
                found = [status for each in loader for status in each.status.tolist()]
            assert [number for number, status in enumerate(found) if status == 2] == list(unlike)


def test_what_is_damaged_of_a_pair_is_named() -> None:
    """Not the row that it is mixed with, which a node would have looked at instead, again and again."""
    texts = [str(10**9 + 7 * number).encode() for number in range(6)]
    with (
        Daemon.start(workers=1) as node,
        contextlib.closing(Mesh(node.endpoint, node.access_key, node.secret_key)) as wire,
    ):
        client = node.client()
        client.create_bucket(Bucket="pairs")
        for number, text in enumerate(texts):
            client.put_object(Bucket="pairs", Key=f"{number}.png", Body=picture(number))
            client.put_object(Bucket="pairs", Key=f"{number}.cls", Body=text)
        client.close()
        fields = {"image": {"ext": "png"}, "number": {"ext": "cls"}}
        done = [
            {"op": "decode", "field": "image"},
            {"op": "resize", "field": "image", "args": {"size": [SIDE, SIDE]}},
            {"op": "mixup", "field": "image"},
            {"op": "int_label", "field": "number"},
        ]
        snapshot = wire.snapshot("s3://pairs/", fields)["snapshot"]
        plan = wire.plan(snapshot, done, shuffle={"kind": "none"})["plan"]
        damage(node, picture(1))
        damage(node, texts[2])
        answers = [wire.raw(plan, batch=6, rank=rank, world=6) for rank in range(6)]
        told = [json.loads(answer.body)["error"] if answer.status == 500 else None for answer in answers]
        assert [error and (error["code"], error["detail"]["url"]) for error in told] == [
            ("CorruptData", "s3://pairs/1.png"),
            ("CorruptData", "s3://pairs/1.png"),
            ("CorruptData", "s3://pairs/2.cls"),
            ("CorruptData", "s3://pairs/2.cls"),
            None,
            None,
        ]


@pytest.mark.usefixtures("environment")
def test_labels_that_are_files_go_along() -> None:
    ds = mesh.open("s3://sided", fields={"image": "png", "number": "cls"})
    ds = ds.map(ops.int_label("number"), ops.decode("image"), ops.resize("image", [8, 8]))
    plain, mixed = epoch(ds), epoch(ds.map(ops.cutmix("image")))
    for position in range(SAMPLES - 1):
        alone = mixed["image.weight"][position] == 1
        expected = plain["number"][position if alone else position ^ 1]
        assert mixed["number.other"][position] == expected
    row = ds.map(ops.cutmix("image"))[4]
    assert {"image", "image.weight", "number", "number.other"} <= set(row)


@pytest.mark.usefixtures("environment")
def test_soft_labels_are_mixed_by_the_same_weight() -> None:
    ds = mesh.open("s3://sided", fields={"image": "png", "target": "npy"})
    npy = OpSpec("npy", "target", {"dtype": "float32", "shape": [3]})
    ds = ds.map(npy, ops.decode("image"), ops.resize("image", [8, 8]))
    plain, mixed = epoch(ds), epoch(ds.map(ops.mixup("image", alpha=1.0, labels=["target"])))
    weights = mixed["image.weight"][:-1, None]
    others = plain["target"][np.arange(SAMPLES - 1) ^ 1]
    np.testing.assert_array_equal(
        mixed["target"][:-1], plain["target"][:-1] * weights + others * (1 - weights)
    )
    assert (mixed["target"].sum(axis=1) == 1).all()
    assert "target.other" not in mixed


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([ops.mixup("image"), ops.cutmix("image")], r"ops\[3\].*once"),
        ([ops.to_chw("image"), ops.cutmix("image")], "before to_chw"),
        ([ops.mixup("image", labels=["lable"])], "did you mean 'label'"),
        ([ops.mixup("image", labels=["image"])], "a label is an int64"),
        ([ops.mixup("image", alpha=0)], r"args.alpha"),
    ],
)
def test_what_cannot_be_mixed_is_said_when_the_plan_is_made(more: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        dataset(*more).plan()


@pytest.mark.usefixtures("environment")
def test_images_of_many_sizes_and_views_are_refused(daemon: Daemon) -> None:
    ds = mesh.open("s3://mixed/train", fields={"image": "png", "label": "@class"})
    with pytest.raises(MeshError, match="the same shape"):
        ds.map(ops.decode("image"), ops.mixup("image")).plan()
    chain: list[dict[str, Any]] = [
        {"op": "decode"},
        {"op": "resize", "args": {"size": [8, 8]}},
        {"op": "mixup"},
    ]
    document = views.transform_view([*chain, {"op": "encode", "args": {"format": "png"}}])
    with connect() as client, pytest.raises(MeshError, match="one object at a time"):
        views.create_view(client.transport, "mixed", "blend", document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        arguments = ["--before", "decode", "--before", "resize size=[8,8]", "s3://mixed/train/a/0000.png"]
        assert run(["op", "test", "mixup", *arguments]) == 1
