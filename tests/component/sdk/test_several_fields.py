"""Ops over several fields on a real daemon: in plans and views, by name of a module, and what goes wrong."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.cli import run
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, ServerError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

COUNT = 24
SOURCE = b'''
import numpy as np
from meshsdk.userops import BYTES, BadSample, array, image, op

TWO = {"picture": image("h", "w", 3), "mask": image("h", "w", 1)}

@op(inputs=TWO, outputs={"picture": image("size", "size", 3), "mask": image("size", "size", 1)},
    memory=128 << 20)
def crop(picture, mask, *, random, size: int = 16):
    """A square of both that has something of the mask."""
    rows, columns = np.nonzero(mask[:, :, 0])
    if not len(rows):
        raise BadSample("the mask is empty")
    at = random.integer(len(rows))
    top = min(max(0, rows[at] - size // 2), picture.shape[0] - size)
    left = min(max(0, columns[at] - size // 2), picture.shape[1] - size)
    place = slice(top, top + size), slice(left, left + size)
    return {"mask": mask[place], "picture": picture[place]}

@op(inputs=TWO, outputs={"mask": array("int64", (2,))}, memory=128 << 20)
def counted(picture, mask):
    """How much of the picture is meant."""
    return {"mask": np.array([int((mask > 0).sum()), picture.shape[0] * picture.shape[1]])}

@op(inputs=TWO, outputs={"mask": image("h", "w", 1)}, memory=128 << 20)
def liar(picture, mask):
    """Not what it says."""
    return {"mask": mask.astype(np.float32)}

@op(inputs=TWO, outputs={"mask": image("h", "w", 1)}, memory=128 << 20)
def other(picture, mask):
    """Not under the name it said."""
    return {"picture": picture}

@op(input=image("h", "w", None), output=image("h", "w", 3), memory=128 << 20)
def alone(pixels):
    """One value."""
    return np.repeat(pixels[:, :, :1], 3, axis=2)
'''


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def mask_of(number: int) -> np.ndarray:
    """A bright square, elsewhere in each sample; none in the last."""
    mask = np.zeros((40, 50), np.uint8)
    if number < COUNT - 1:
        mask[number : number + 8, 2 * number % 40 : 2 * number % 40 + 8] = 200
    return mask


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with meshsdk.connect(
        daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key
    ) as connected:
        connected.create_bucket("seg")
        for number in range(COUNT):
            mask = mask_of(number)
            connected.put("seg", f"train/{number:03d}.png", png(np.stack([mask] * 3, axis=2)))
            connected.put("seg", f"train/{number:03d}.mask.png", png(mask))
        op_catalog.push_module(connected.transport, "segment", SOURCE)
        yield connected


@pytest.fixture
def signed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands ask the daemon, as root."""
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)


@pytest.fixture
def dataset(client: Client) -> meshsdk.Dataset:
    fields = {"image": "png", "mask": "mask.png"}
    return meshsdk.open("s3://seg/train", fields=fields, client=client).map(
        ops.decode("image"), ops.decode("mask", mode="gray")
    )


def test_one_op_is_done_to_both_alike(dataset: meshsdk.Dataset) -> None:
    pair = ("image", "mask")
    both = dataset.map(
        ops.over(pair, ops.random_resized_crop, 20, scale=(0.3, 1.0), each={"mask": {"filter": "nearest"}}),
        ops.over(pair, ops.hflip),
        ops.over(pair, ops.vflip),
    )
    batch = meshsdk.Loader(both, global_batch=16, seed=3).at(0)
    assert batch["image"].shape == (16, 20, 20, 3)
    assert set(np.unique(np.asarray(batch["mask"]))) <= {0, 200}
    bright = np.asarray(batch["image"])[..., :1] > 100
    assert (bright == (np.asarray(batch["mask"]) > 100)).mean() > 0.97
    again = meshsdk.Loader(both, global_batch=16, seed=3).at(0)
    np.testing.assert_array_equal(again["mask"], batch["mask"])


def test_an_op_of_ones_own_takes_and_gives_several(dataset: meshsdk.Dataset) -> None:
    cropped = dataset.map(ops.user("segment/crop", ("image", "mask"), size=12), ops.to_chw("image"))
    batch = meshsdk.Loader(cropped, global_batch=16, seed=3).at(0)
    assert batch["image"].shape == (16, 3, 12, 12)
    assert batch["mask"].shape == (16, 12, 12, 1)
    np.testing.assert_array_equal(np.asarray(batch["image"])[:, 0], np.asarray(batch["mask"])[..., 0])
    assert (np.asarray(batch["mask"]).reshape(16, -1) > 0).any(axis=1).all()


def test_what_it_does_not_give_stays(dataset: meshsdk.Dataset) -> None:
    rows = dataset.map(
        ops.user("segment/counted", ("image", "mask")),
        ops.resize("image", (8, 8)),
    )
    row = rows[5]
    assert row["mask"].tolist() == [64, 2000]
    assert row["image"].shape == (8, 8, 3)
    chained = dataset.map(
        ops.user("segment/crop", ("image", "mask"), size=16), ops.user("segment/counted", ("image", "mask"))
    )
    assert chained[5]["mask"][1] == 256


def test_a_bad_sample_names_the_op(dataset: meshsdk.Dataset) -> None:
    cropped = dataset.map(ops.user("segment/crop", ("image", "mask")))
    with pytest.raises(BadSampleError, match="segment/crop of 'image': the mask is empty") as caught:
        cropped[COUNT - 1]
    assert caught.value.detail["op"] == "segment/crop"
    batch = meshsdk.Loader(cropped, global_batch=COUNT, seed=3, max_bad=0.5).at(0)
    assert int((np.asarray(batch.status) != 0).sum()) == 1


@pytest.mark.parametrize("name", ["liar", "other"])
def test_a_lie_is_a_defect(dataset: meshsdk.Dataset, name: str) -> None:
    with pytest.raises(ServerError, match="declared") as caught:
        dataset.map(ops.user(f"segment/{name}", ("image", "mask")))[0]
    assert caught.value.code == "OpFailed"


def test_one_of_a_single_value_is_done_to_each(dataset: meshsdk.Dataset) -> None:
    row = dataset.map(ops.user("segment/alone", ("image", "mask")))[4]
    assert row["mask"].shape == row["image"].shape == (40, 50, 3)
    np.testing.assert_array_equal(row["mask"], row["image"])


def test_rows_are_joined_before_they_are_mixed(dataset: meshsdk.Dataset) -> None:
    mixed = dataset.map(
        ops.user("segment/crop", ("image", "mask"), size=12),
        ops.mixup("image", alpha=1.0, labels=[]),
    )
    batch = meshsdk.Loader(mixed, global_batch=8, seed=3).at(0)
    assert batch["image"].shape == (8, 12, 12, 3)
    assert batch["mask"].shape == (8, 12, 12, 1)
    with pytest.raises(InvalidPlanError, match="before they are mixed"):
        dataset.map(
            ops.user("segment/crop", ("image", "mask"), size=12),
            ops.mixup("image", alpha=1.0, labels=[]),
            ops.user("segment/counted", ("image", "mask")),
        )[0]


def test_what_does_not_fit_is_refused_before_a_byte_is_read(dataset: meshsdk.Dataset) -> None:
    with pytest.raises(InvalidPlanError, match="takes 2 fields"):
        dataset.map(ops.user("segment/crop", "image"))[0]
    with pytest.raises(InvalidPlanError, match="picture: axis 2 must have size 3, not 1"):
        dataset.map(ops.user("segment/crop", ("mask", "image")))[0]
    with pytest.raises(InvalidPlanError, match="must have"):
        dataset.map(ops.resize("image", (8, 8)), ops.resize("mask", (4, 4))).map(
            ops.user("segment/counted", ("image", "mask"))
        )[0]
    with pytest.raises(ConfigurationError, match="two or more different fields"):
        ops.user("segment/crop", ("image",))
    with pytest.raises(ConfigurationError, match="not one of the fields image, mask"):
        ops.over(("image", "mask"), ops.hflip, each={"label": {}})


def test_fields_are_selected_and_renamed_with_their_ops(dataset: meshsdk.Dataset) -> None:
    both = dataset.map(ops.over(("image", "mask"), ops.random_crop, 16))
    renamed = both.rename(mask="truth")
    np.testing.assert_array_equal(renamed[3]["truth"], both[3]["mask"])
    np.testing.assert_array_equal(both.select("mask")[3]["mask"], both[3]["mask"])
    with pytest.raises(ConfigurationError, match="select all of them"):
        dataset.map(ops.user("segment/crop", ("image", "mask"))).select("mask")


@pytest.mark.usefixtures("signed")
def test_the_op_is_shown_with_its_fields(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert op_catalog.show_op(client.transport, "segment/crop").inputs == ("picture", "mask")
    assert run(["op", "show", "segment/crop"]) == 0
    shown = capsys.readouterr().out
    assert "ops.user('segment/crop', ('picture', 'mask'))" in shown
    assert "in a view" not in shown


@pytest.mark.usefixtures("signed")
def test_batches_views_have_them_and_others_say_why_not(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ["--field", "image=png", "--field", "mask=mask.png", "--prefix", "train/"]
    decode = ["--op", "decode field=image", "--op", "decode field=mask mode=gray"]
    crop = ["--op", "random_crop field=image,mask size=16"]
    assert run(["view", "create", "seg--b", "--batches", "8", *fields, *decode, *crop]) == 0
    key = next(item.key for item in client.list("seg--b") if item.key.endswith(".safetensors"))
    assert len(client.get("seg--b", key)) > 8 * 16 * 16 * 4
    assert run(["view", "create", "seg--z", "--zarr", *fields, *decode, *crop]) != 0
    assert "each array is rendered on its own" in capsys.readouterr().err
    both = ["--op", "resize field=image,mask size=[16,16]"]
    assert run(["view", "create", "seg--z", "--zarr", *fields, *decode, *both]) == 0
