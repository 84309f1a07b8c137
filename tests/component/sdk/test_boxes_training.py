"""Boxes, masks, depth and keypoints of images on a real daemon, cropped and flipped, into a training loop."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
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
