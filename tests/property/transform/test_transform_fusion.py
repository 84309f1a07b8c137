"""Fast path = slow path: fused decoding, writing in place, shrink-on-load."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshd.transform.builtin.geometry import mirror_into
from meshd.transform.builtin.image_codecs import decode_jpeg, read_jpeg_head
from meshd.transform.builtin.resample_window import ResampleWindow, resample_window
from meshd.transform.builtin.resize import RandomResizedCrop
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

SETTINGS = settings(max_examples=25, deadline=None)


def jpeg(height: int, width: int, seed: int) -> bytes:
    """A smooth random picture, as photographs are."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def chains(ops: list[tuple[str, dict[str, Any]]]) -> tuple[Any, Any]:
    specs = [(i, OpSpec(name, "image", args)) for i, (name, args) in enumerate(ops)]
    return compile_chain(specs), compile_chain(specs, fuse=False)


sides = st.integers(64, 400)


@SETTINGS
@given(height=sides, width=sides, size=st.integers(24, 64), position=st.integers(0, 1000), flip=st.booleans())
def test_a_fused_crop_is_the_documented_one(
    height: int, width: int, size: int, position: int, flip: bool
) -> None:
    ops: list[tuple[str, dict[str, Any]]] = [("decode", {}), ("random_resized_crop", {"size": size})]
    ops += [("hflip", {})] if flip else []
    ops.append(("to_chw", {}))
    fused, plain = chains(ops)
    data = jpeg(height, width, position)

    def draw(stream: int) -> KeyedRandom:
        return KeyedRandom(5, 1, position, stream)

    got = fused.render(data, draw)
    # in place = returned
    row = np.zeros_like(got)
    fused.render_into(data, draw, row)
    np.testing.assert_array_equal(row, got)
    # the definition, step by step
    window = RandomResizedCrop((size, size), (0.08, 1.0), (0.75, 1.3333333333333333)).window(
        height, width, draw(1)
    )
    shrink = window.shrink()
    wanted = resample_window(decode_jpeg(data, read_jpeg_head(data), "rgb", shrink), window, shrink)
    if flip and draw(2).chance(0.5):
        wanted = wanted[:, ::-1]
    np.testing.assert_array_equal(got, wanted.transpose(2, 0, 1))
    # and it is the picture that full decoding gives
    oracle = plain.render(data, draw)
    if shrink == 1:
        np.testing.assert_array_equal(got, oracle)
    else:
        assert np.abs(got.astype(int) - oracle).mean() < 10


@pytest.mark.parametrize("width", [40, 41])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("mode", ["rgb", "gray"])
def test_a_flip_on_the_way_into_the_row_is_the_flip(mode: str, dtype: str, width: int) -> None:
    ops: list[tuple[str, dict[str, Any]]] = [("decode", {"mode": mode}), ("hflip", {}), ("to_chw", {})]
    if dtype != "uint8":
        ops.insert(1, ("normalize", {"mean": 0.5, "std": 0.25}))
    fused, plain = chains(ops)
    data, flips = jpeg(37, width, 2), set()
    for position in range(8):
        draw = partial(KeyedRandom, 5, 1, position)
        wanted = plain.render(data, draw)
        row = np.zeros_like(wanted)
        fused.render_into(data, draw, row)
        np.testing.assert_array_equal(row, wanted)
        np.testing.assert_array_equal(fused.render(data, draw), wanted)
        flips.add(draw(len(ops) - 2).chance(0.5))
    assert flips == {False, True}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("width", [*range(1, 34), 224])
def test_planes_are_mirrored_whatever_their_width(width: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    planes = rng.integers(0, 256, (3, 5, width)).astype(dtype)
    before, row = planes.copy(), np.zeros_like(planes)
    mirror_into(planes, row)
    np.testing.assert_array_equal(row, before[:, :, ::-1])
    np.testing.assert_array_equal(planes, before)


@SETTINGS
@given(height=sides, width=sides, out=st.tuples(st.integers(24, 80), st.integers(24, 80)))
def test_a_fused_resize_is_close_to_the_plain_one(height: int, width: int, out: tuple[int, int]) -> None:
    data = jpeg(height, width, 1)
    fused, plain = chains([("decode", {}), ("resize", {"size": list(out), "filter": "fast"})])
    a, b = fused.render(data, KeyedRandom), plain.render(data, KeyedRandom)
    assert a.shape == b.shape == (*out, 3)
    assert np.abs(a.astype(int) - b).mean() < 10
    fused, plain = chains([("decode", {}), ("resize", {"size": list(out)})])
    np.testing.assert_array_equal(fused.render(data, KeyedRandom), plain.render(data, KeyedRandom))


@SETTINGS
@given(height=sides, width=sides, position=st.integers(0, 10**9))
def test_windows_lie_within_the_image(height: int, width: int, position: int) -> None:
    op = RandomResizedCrop((32, 32), (0.08, 1.0), (0.75, 1.3333333333333333))
    window = op.window(height, width, KeyedRandom(1, 2, position, 3))
    assert 0 <= window.top <= window.top + window.height <= height
    assert 0 <= window.left <= window.left + window.width <= width
    assert min(window.height, window.width) > 0


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_shrunk_decoding_covers_the_same_picture(shrink: int) -> None:
    data = jpeg(331, 257, 4)
    head = read_jpeg_head(data)
    whole, small = decode_jpeg(data, head, "rgb"), decode_jpeg(data, head, "rgb", shrink)
    assert small.shape == (-(-331 // shrink), -(-257 // shrink), 3)
    window = ResampleWindow(0, 0, 331, 257, 33, 26)
    full = resample_window(whole, window)
    assert np.abs(resample_window(small, window, shrink).astype(int) - full).mean() < 5
