"""Resizing and cropping give Pillow's pixels, and the crop of torchvision: to the bit, for any size."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "nearest": Image.Resampling.NEAREST,
}
SIDES = (16, 31, 64, 100, 224, 299, 512, 1024)


def picture(height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    """Slopes with noise, [h, w, channels] uint8."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(3).integers(-40, 40, (height, width, channels))
    slopes = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=2)[:, :, :channels]
    return np.clip(slopes + noise, 0, 255).astype(np.uint8)


def file_of(pixels: np.ndarray[Any, Any], form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(out, form)
    return out.getvalue()


def rendered(data: bytes, *ops: tuple[str, dict[str, Any]]) -> Any:
    chain = compile_chain([(index, OpSpec(op, "x", args)) for index, (op, args) in enumerate(ops)])
    return chain.render(data, lambda index: KeyedRandom(1, 0, 0, index))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("side", SIDES)
def test_up_and_down_between_16_and_1024(side: int, filter: str, channels: int) -> None:
    pixels = picture(side, side * 3 // 4, channels)
    whole = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    data, mode = file_of(pixels), "gray" if channels == 1 else "rgb"
    for target in SIDES:
        size = (target, target * 5 // 4)
        found = rendered(data, ("decode", {"mode": mode}), ("resize", {"size": list(size), "filter": filter}))
        wanted = np.asarray(whole.resize(size[::-1], FILTERS[filter]))
        np.testing.assert_array_equal(found.squeeze(), wanted, err_msg=f"{side} → {target}")


@settings(max_examples=25, deadline=None)
@given(st.integers(16, 300), st.integers(16, 300), st.integers(1, 200))
def test_the_shorter_side_is_torchvisions(height: int, width: int, side: int) -> None:
    """`torchvision.transforms.Resize(side)`: the other side is int(side · longer / shorter)."""
    found = rendered(file_of(picture(height, width, 3)), ("decode", {}), ("resize", {"size": side}))
    other = int(side * max(height, width) / min(height, width))
    assert found.shape[:2] == ((side, other) if height <= width else (other, side))


@settings(max_examples=30, deadline=None)
@given(st.integers(16, 400), st.integers(16, 400), st.integers(1, 16), st.integers(1, 16))
def test_the_crop_is_torchvisions(height: int, width: int, rows: int, columns: int) -> None:
    """`torchvision.transforms.functional.center_crop`: int(round((height - rows) / 2.0)), half to even."""
    pixels = picture(height, width, 3)
    found = rendered(file_of(pixels), ("decode", {}), ("center_crop", {"size": [rows, columns]}))
    top, left = int(round((height - rows) / 2.0)), int(round((width - columns) / 2.0))  # noqa: RUF046
    np.testing.assert_array_equal(found, pixels[top : top + rows, left : left + columns])


def test_299_to_224_begins_at_38() -> None:
    pixels = picture(299, 299, 3)
    for version, at in (("1", 37), ("2", 38)):
        chain = compile_chain(
            [(0, OpSpec("decode", "x")), (1, OpSpec("center_crop", "x", {"size": 224}, version))]
        )
        found = chain.render(file_of(pixels), lambda index: KeyedRandom(1, 0, 0, index))
        np.testing.assert_array_equal(found, pixels[at : at + 224, at : at + 224])


def test_a_jpeg_is_not_shrunk_while_it_is_decoded() -> None:
    pixels = picture(600, 800, 3)
    data = file_of(pixels, "JPEG")
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    for size in ((64, 64), (128, 200), (37, 50)):
        found = rendered(data, ("decode", {}), ("resize", {"size": list(size)}))
        np.testing.assert_array_equal(found, np.asarray(whole.resize(size[::-1], Image.Resampling.BILINEAR)))


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int32"])
@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "box"])
def test_other_numbers_are_resized_as_pillow_does(dtype: str, filter: str) -> None:
    array = (picture(50, 60, 1)[:, :, 0].astype(np.float64) * 250.7).astype(dtype)
    out = io.BytesIO()
    Image.fromarray(array).save(out, "TIFF")
    decode = {"mode": "unchanged", "dtype": dtype, "channels": 1}
    found = rendered(out.getvalue(), ("decode", decode), ("resize", {"size": [31, 90], "filter": filter}))
    wide = array if dtype != "uint16" else array.astype(np.float32)
    wanted = np.asarray(Image.fromarray(wide).resize((90, 31), FILTERS[filter]))
    if dtype == "uint16":
        wanted = np.clip(np.floor(wanted + 0.5), 0, 65535)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[:, :, 0], wanted)


def test_channels_beyond_three_are_independent() -> None:
    pixels = np.dstack([picture(40, 50, 3), picture(40, 50, 1)])
    decode = {"mode": "unchanged", "dtype": "uint8", "channels": 4}
    found = rendered(file_of(pixels), ("decode", decode), ("resize", {"size": [17, 23]}))
    for channel in range(4):
        plane = Image.fromarray(pixels[:, :, channel]).resize((23, 17), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(found[:, :, channel], np.asarray(plane))
