"""Masks with a palette, 16-bit depth and float heights: kept as stored, or a note says what is lost."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import PreflightError, StateMismatchError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

COUNT = 12
SIZE = (40, 52)
FIELDS = {"image": "jpg", "mask": "png", "depth": "depth.png", "height": "tif"}


def file_of(image: Image.Image, form: str) -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def classes(number: int) -> Any:
    """Class numbers 0…20 in blocks; a border of 255."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    found = ((x // 8 + y // 8 + number) % 21).astype(np.uint8)
    found[0], found[:, 0] = 255, 255
    return found


def with_palette(numbers: Any) -> Image.Image:
    image = Image.frombytes("P", numbers.shape[::-1], numbers.tobytes())
    image.putpalette([value * 11 % 256 for value in range(768)])
    return image


def deep(number: int) -> Any:
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    return (x * 1000 + y + number).astype(np.uint16)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(workers=1, args=("--transform-workers", "1")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("scenes")
        for number in range(COUNT):
            bright = np.repeat(classes(number)[:, :, None], 3, axis=2)
            client.put("scenes", f"a/{number:03}.jpg", file_of(Image.fromarray(bright), "JPEG"))
            client.put("scenes", f"a/{number:03}.png", file_of(with_palette(classes(number)), "PNG"))
            client.put("scenes", f"a/{number:03}.depth.png", file_of(Image.fromarray(deep(number)), "PNG"))
            heights = Image.fromarray((deep(number) / 65535).astype(np.float32))
            client.put("scenes", f"a/{number:03}.tif", file_of(heights, "TIFF"))
        yield client


def scenes(client: Client, *fields: str) -> mesh.Dataset:
    chosen = {name: FIELDS[name] for name in fields}
    return mesh.open("s3://scenes/a", fields=chosen, client=client)


def test_values_come_as_they_are_stored(client: Client) -> None:
    ds = scenes(client, "mask", "depth", "height").map(
        ops.decode("mask", mode="index"),
        ops.over(("depth", "height"), ops.decode, mode="unchanged"),
        ops.over(("mask", "depth", "height"), ops.center_crop, 32),
    )
    told = {name: str(field) for name, field in ds.schema().items()}
    assert told == {
        "depth": "uint16 [32, 32, 1], decoded as unchanged",
        "height": "float32 [32, 32, 1], decoded as unchanged",
        "mask": "uint8 [32, 32, 1], decoded as index",
    }
    assert ds.preflight().notes == ()
    batch = mesh.Loader(ds, global_batch=COUNT, output="numpy", shuffle=False).at(0)
    for number in range(COUNT):
        place = slice(4, 36), slice(10, 42)
        np.testing.assert_array_equal(batch["mask"][number, :, :, 0], classes(number)[place])
        np.testing.assert_array_equal(batch["depth"][number, :, :, 0], deep(number)[place])
        np.testing.assert_array_equal(
            batch["height"][number, :, :, 0], (deep(number) / 65535).astype(np.float32)[place]
        )


def test_what_is_lost_is_noted_and_logged_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    ds = scenes(client, "mask", "depth").map(
        ops.decode("mask", mode="gray"), ops.decode("depth", mode="gray")
    )
    with caplog.at_level(logging.WARNING, "meshsdk"):
        notes = ds.preflight().notes
        assert [record.message for record in caplog.records] == []
        ds.schema()
        mesh.Loader(ds.map(ops.over(("mask", "depth"), ops.center_crop, 8)), global_batch=4).close()
    mask, depth = (note for note in notes if "decoded as gray" in note)
    assert "ops.decode('mask', mode='index')" in mask
    assert "16 bits a value" in depth
    assert "ops.decode('depth', mode='unchanged')" in depth
    assert [record.message for record in caplog.records] == [mask, depth]


def test_a_pinned_version_is_another_plan_with_the_earlier_pixels(client: Client) -> None:
    """What a job that began with an earlier release resumes with."""
    image = scenes(client, "image")
    now = image.map(ops.decode("image"), ops.resize("image", [9, 11]), ops.center_crop("image", [4, 6]))
    before = image.map(
        ops.pin(ops.decode("image"), "2"),
        ops.pin(ops.resize("image", [9, 11]), "1"),
        ops.pin(ops.center_crop("image", [4, 6]), "1"),
    )
    assert now.plan().ops == (("decode", "3"), ("resize", "2"), ("center_crop", "2"))
    assert before.plan().ops == (("decode", "2"), ("resize", "1"), ("center_crop", "1"))
    assert before.plan().hash != now.plan().hash
    assert not np.array_equal(before[0]["image"], now[0]["image"])
    loader = mesh.Loader(before, global_batch=4)
    with pytest.raises(StateMismatchError, match=r"ops\.pin\(op, VERSION\)"):
        mesh.Loader(now, global_batch=4).load_state_dict(loader.state_dict())


def test_floats_are_refused_with_the_way_out(client: Client) -> None:
    with pytest.raises(PreflightError, match=r"an image of float32 has no range .* mode \"unchanged\""):
        scenes(client, "height").map(ops.decode("height", mode="gray")).preflight()


def test_pairs_that_move_apart_are_noted_and_over_keeps_them_together(client: Client) -> None:
    pair = ("image", "mask")
    decoded = scenes(client, *pair).map(ops.decode("image"), ops.decode("mask", mode="index"))
    nearest = {"mask": {"filter": "nearest"}}
    apart = decoded.map(
        ops.random_resized_crop("image", 24), ops.random_resized_crop("mask", 24, filter="nearest")
    )
    (note,) = apart.preflight().notes
    assert "random_resized_crop of 'image'; random_resized_crop of 'mask'" in note
    assert "ops.over(('image', 'mask'), ops.random_resized_crop, …)" in note
    together = decoded.map(ops.over(pair, ops.random_resized_crop, 24, each=nearest))
    assert together.preflight().notes == ()
    batch = mesh.Loader(together, global_batch=COUNT, output="numpy", seed=3).at(0)
    assert set(np.unique(batch["mask"])) <= {*range(21), 255}
    apart_batch = mesh.Loader(apart, global_batch=COUNT, output="numpy", seed=3).at(0)

    def distance(found: Any) -> float:
        return float(np.abs(found["image"][..., 0].astype(int) - found["mask"][..., 0]).mean())

    assert distance(batch) < distance(apart_batch) / 2
