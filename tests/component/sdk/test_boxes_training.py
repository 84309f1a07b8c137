"""Boxes, masks, depth and keypoints of images on a real daemon, cropped and flipped, into a training loop."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import ConfigurationError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

COUNT = 24
FIELDS = {"image": "jpg", "boxes": "npy", "labels": "labels.npy"}


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def scene(number: int) -> tuple[np.ndarray, np.ndarray]:
    """A bright rectangle and its box; of each second scene, one more in the upper left corner."""
    chance = np.random.default_rng(number)
    pixels = np.zeros((90, 120, 3), np.uint8)
    left, top = chance.integers(30, 70), chance.integers(20, 50)
    right, bottom = left + chance.integers(20, 40), top + chance.integers(16, 36)
    pixels[top:bottom, left:right] = 250
    boxes = [[left, top, right, bottom], [1, 1, 5, 4]]
    return pixels, np.array(boxes[: 1 + number % 2], np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(workers=1, args=("--transform-workers", "1")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("boxed")
        for number in range(COUNT):
            pixels, boxes = scene(number)
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "JPEG", quality=95)
            client.put("boxed", f"a/{number:03}.jpg", out.getvalue())
            client.put("boxed", f"a/{number:03}.npy", saved(boxes))
            client.put("boxed", f"a/{number:03}.labels.npy", saved(np.arange(len(boxes)) + 7))
        yield client


def detection(client: Client) -> mesh.Dataset:
    both = ("image", "boxes")
    return mesh.open("s3://boxed/a", FIELDS, client=client).map(
        ops.npy("boxes", dtype="float32", shape=[None, 4]),
        ops.npy("labels", dtype="int64", shape=[None]),
        ops.boxes("boxes", "image"),
        ops.decode("image"),
        ops.over(both, ops.random_resized_crop, 64, scale=(0.4, 1.0)),
        ops.over(both, ops.hflip),
        ops.over(both, ops.rotate90),
        ops.keep_boxes("boxes", "labels", min_size=2, min_visibility=0.2),
    )


def test_boxes_stay_around_what_they_mark(client: Client) -> None:
    loader = mesh.Loader(detection(client), global_batch=8, seed=3, output="numpy")
    seen = set()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            for pixels, boxes, labels in zip(batch["image"], batch["boxes"], batch["labels"], strict=True):
                assert len(boxes) == len(labels)
                rows, columns = np.nonzero(pixels[:, :, 0] > 128)
                marked = [box for box, label in zip(boxes, labels, strict=True) if label == 7]
                if len(marked):
                    around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                    assert np.abs(marked[0] - around).max() <= 2.5
                    seen.add(tuple(marked[0].tolist()))
    assert len(seen) > COUNT


def test_a_batch_is_the_same_for_every_world_and_after_a_resume(client: Client) -> None:
    def rows(loader: mesh.Loader) -> dict[int, Any]:
        return {
            int(position): (pixels.tobytes(), boxes.tolist(), labels.tolist())
            for batch in loader
            for position, pixels, boxes, labels in zip(
                batch.positions, batch["image"], batch["boxes"], batch["labels"], strict=True
            )
        }

    ds = detection(client)
    whole = rows(mesh.Loader(ds, global_batch=8, seed=3, output="numpy"))
    parts = [mesh.Loader(ds, global_batch=8, seed=3, output="numpy", rank=rank, world=3) for rank in range(3)]
    assert {at: row for part in parts for at, row in rows(part).items()} == whole
    begun = mesh.Loader(ds, global_batch=8, seed=3, output="numpy")
    next(iter(begun))
    resumed = mesh.Loader(ds, global_batch=4, seed=3, output="numpy")
    resumed.load_state_dict(begun.state_dict())
    left = rows(resumed)
    assert len(left) == COUNT - 8
    assert all(whole[at] == row for at, row in left.items())


def test_a_training_loop_takes_them_padded(client: Client) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    steps = 0
    for batch in mesh.Loader(detection(client), global_batch=8, seed=3):
        boxes, counts = batch["boxes"].padded()
        labels, _ = batch["labels"].padded(-1)
        assert boxes.shape == (8, labels.shape[1], 4)
        assert ((labels >= 0).sum(1) == counts).all()
        loss = (model(batch["image"].float())[:, None] - boxes).abs()[labels >= 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    assert steps == COUNT // 8
    assert torch.isfinite(loss)


# --- formats ----------------------------------------------------------------------------------------------

XML = (
    "<annotation><object><name>{name}</name><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{right}</xmax>"
    "<ymax>{bottom}</ymax></bndbox></object></annotation>"
)


@pytest.fixture(scope="module")
def formats(client: Client) -> Client:
    """The scenes of one box each, as COCO, VOC and YOLO; one image without a file, one without an object."""
    client.create_bucket("formats")
    images, annotations = [], []
    for number in range(0, 12, 2):
        pixels, ((left, top, right, bottom),) = scene(number)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        client.put("formats", f"images/{number}.png", out.getvalue())
        wide, high = right - left, bottom - top
        images.append({"id": 100 + number, "file_name": f"{number}.png", "width": 120, "height": 90})
        if number == 10:
            continue
        skeleton = [float(left), float(top), 2, float(right), float(top), 1]
        annotations.append(
            {
                "image_id": 100 + number,
                "category_id": 18,
                "bbox": [float(left), float(top), float(wide), float(high)],
                "keypoints": skeleton,
            }
        )
        told = XML.format(name="dog", x1=left + 1, y1=top + 1, right=right, bottom=bottom)
        client.put("formats", f"xml/{number}.xml", told.encode())
        line = f"16 {(left + right) / 240} {(top + bottom) / 180} {wide / 120} {high / 90}\n"
        client.put("formats", f"txt/{number}.txt", line.encode())
    client.put("formats", "txt/10.txt", b"")
    document = {"images": images, "annotations": annotations, "categories": [{"id": 18, "name": "dog"}]}
    client.put("formats", "coco/instances.json", json.dumps(document).encode())
    return client


def test_coco_voc_and_yolo_are_the_same_data(formats: Client) -> None:
    both = ("image", "boxes")
    opened = {
        "voc": mesh.open_voc("s3://formats/images", "s3://formats/xml", ["cat", "dog"], client=formats),
        "yolo": mesh.open_yolo("s3://formats/images", "s3://formats/txt", client=formats),
        "coco": mesh.open_coco("s3://formats/images", "s3://formats/coco/instances.json", client=formats),
    }
    rows = {}
    for name, ds in opened.items():
        moved = ds.map(ops.decode("image"), ops.over(both, ops.resize, 45), ops.over(both, ops.hflip, p=1.0))
        rows[name] = [moved[number] for number in range(len(moved))]
    assert [len(found) for found in rows.values()] == [5, 6, 6]
    assert {name: int(found[0]["labels"][0]) for name, found in rows.items()} == {
        "voc": 1,
        "yolo": 16,
        "coco": 18,
    }
    empty = [
        [row["boxes"].shape for row in rows[name] if not len(row["labels"])] for name in ("yolo", "coco")
    ]
    assert empty == [[(0, 4)], [(0, 4)]]
    filled = {name: [row for row in found if len(row["labels"])] for name, found in rows.items()}
    for voc, yolo, coco in zip(*filled.values(), strict=True):
        assert (voc["boxes"] == coco["boxes"]).all()
        assert np.abs(voc["boxes"] - yolo["boxes"]).max() < 1e-4
        lit = np.nonzero(voc["image"][:, :, 0] > 125)
        assert (
            np.abs(voc["boxes"][0] - [lit[1].min(), lit[0].min(), lit[1].max() + 1, lit[0].max() + 1]).max()
            < 1
        )


def test_names_of_coco_in_another_folder(formats: Client) -> None:
    document = json.loads(formats.get("formats", "coco/instances.json"))
    for image in document["images"]:
        image["file_name"] = f"val/{image['file_name']}"
    formats.put("formats", "other/instances.json", json.dumps(document).encode())
    with pytest.raises(
        ConfigurationError, match=r"have no key in common.*'val/.*`images` must be the folder"
    ):
        mesh.open_coco("s3://formats/images", "s3://formats/other/instances.json", client=formats)


def test_coco_is_stored_by_image_once_and_has_keypoints(formats: Client) -> None:
    def opened() -> mesh.Dataset:
        return mesh.open_coco(
            "s3://formats/images",
            "s3://formats/coco/instances.json",
            classes=["dog"],
            keypoints=2,
            swap=[(0, 1)],
            client=formats,
        )

    ds = opened().map(ops.decode("image"), ops.over(("image", "boxes", "keypoints"), ops.hflip, p=1.0))
    row = ds[0]
    left, _, right, _ = row["boxes"][0].tolist()
    first, second = row["keypoints"][0].tolist()
    assert (first[0], second[0]) == (left - 1, right - 1)  # of a mirrored dog, what was right is left
    assert (first[2], second[2], row["labels"].tolist()) == (1, 2, [0])
    before = [entry.key for entry in formats.list("formats", "coco/")]
    assert len(before) == 2
    assert opened().snapshot.hash == ds.snapshot.hash
    assert [entry.key for entry in formats.list("formats", "coco/")] == before


def test_a_hostile_file_is_a_bad_sample_on_the_node(formats: Client) -> None:
    bomb = b'<!DOCTYPE a [<!ENTITY b "boom">]><annotation><object><name>&b;</name></object></annotation>'
    formats.put("formats", "hostile/0.xml", bomb)
    formats.put("formats", "hostile/2.xml", formats.get("formats", "xml/2.xml"))
    ds = mesh.open_voc("s3://formats/images", "s3://formats/hostile", ["dog"], client=formats)
    loader = mesh.Loader(ds.map(ops.decode("image")), global_batch=2, seed=1, max_bad=0.9, output="numpy")
    (batch,) = loader
    assert sorted(batch.status.tolist()) == [0, 1]
    assert [box.shape for box in batch["boxes"]] == [(1, 4), (1, 4)]
    assert all("DOCTYPE" in bad.error for bad in loader.bad())


def test_a_dataset_can_lose_its_boxes(client: Client) -> None:
    ds = detection(client)
    with pytest.raises(mesh.errors.ConfigurationError, match="keep_boxes takes the fields boxes, labels"):
        ds.select("image", "labels")
    assert ds.select("image", "boxes")[0]["boxes"].shape[1:] == (4,)
    image = ds.select("image")
    assert [op.op for op in image.ops] == ["decode", "random_resized_crop", "hflip", "rotate90"]
    assert image[0]["image"].shape == (64, 64, 3)
