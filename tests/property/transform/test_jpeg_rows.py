"""A JPEG decoded as far down as is asked has the whole one's rows; damage above, or truncation, is bad."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshd.transform.builtin.image_codecs import (
    decode_jpeg,
    decode_jpeg_rows,
    find_height_offset,
    is_trailing_data_warning,
    read_jpeg_head,
)
from meshd.transform.builtin.resize import RandomResizedCrop
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from meshd.transform.builtin.image_codecs import Mode
    from meshd.transform.op_chain import OpChain

SETTINGS = settings(max_examples=40, deadline=None)
FORMS: list[dict[str, Any]] = [
    {},
    {"optimize": True, "comment": b"a comment"},
    {"subsampling": "4:4:4", "restart_marker_rows": 2},
    {"subsampling": "4:2:2", "restart_marker_blocks": 7},
    {"quality": 30, "exif": b"Exif\0\0" + bytes(200)},
    {"progressive": True},
]
SECOND_FRAME = b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x10\x01\x01\x11\x00"
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


def picture(height: int, width: int, seed: int) -> np.ndarray[Any, Any]:
    """Edges and colours at a scale of a few pixels, [h, w, 3] uint8."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def written(height: int, width: int, seed: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).save(buffer, "JPEG", **{"quality": 85, **options})
    return buffer.getvalue()


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    height, width, seed = draw(st.integers(24, 260)), draw(st.integers(24, 200)), draw(st.integers(0, 1000))
    if draw(st.booleans()):
        return written(height, width, seed, **draw(st.sampled_from(FORMS)))
    sampling = draw(st.sampled_from(SAMPLINGS))
    encoded: bytes = simplejpeg.encode_jpeg(picture(height, width, seed), 80, colorsubsampling=sampling)
    return encoded


@SETTINGS
@given(data=jpegs(), part=st.floats(0, 1), shrink=st.sampled_from([1, 1, 2, 4, 8]), gray=st.booleans())
def test_upper_rows_are_the_whole_images(data: bytes, part: float, shrink: int, gray: bool) -> None:
    head = read_jpeg_head(data)
    mode: Mode = "gray" if gray else "rgb"
    whole = decode_jpeg(data, head, mode, shrink)
    rows = max(1, round(part * whole.shape[0]))
    np.testing.assert_array_equal(decode_jpeg_rows(data, head, mode, rows, shrink)[:rows], whole[:rows])


@pytest.mark.parametrize("form", FORMS)
def test_less_is_decoded_where_rows_follow_each_other(form: dict[str, Any]) -> None:
    data = written(200, 120, 1, **form)
    got = decode_jpeg_rows(data, read_jpeg_head(data), "rgb", 40)
    assert got.shape[0] == (200 if form.get("progressive") else 42)


def test_a_file_that_is_cut_is_bad_however_little_is_asked_for() -> None:
    data = written(200, 120, 2)
    head = read_jpeg_head(data)
    for length in range(700, len(data), 61):
        with pytest.raises(BadSampleError, match="damaged"):
            decode_jpeg_rows(data[:length], head, "rgb", 8)


def cropping(version: str) -> OpChain:
    """decode and a random crop, fused."""
    ops = OpSpec("decode", "image", version=version), OpSpec("random_resized_crop", "image", {"size": 16})
    return compile_chain(list(enumerate(ops)))


def lower_edge(position: int, height: int, width: int) -> float:
    """Of that crop's window, as a part of the height."""
    crop = RandomResizedCrop((16, 16), (0.08, 1.0), (3 / 4, 4 / 3))
    window = crop.window(height, width, KeyedRandom(1, 0, position, 1))
    return window.rows(1) / height


@pytest.mark.parametrize(("at", "version"), [(0.1, "1"), (0.1, "2"), (0.9, "1")])
def test_damage_is_bad_where_it_is_looked_at(at: float, version: str) -> None:
    upper, lower, hurt, _ = _two_crops(at, version)
    assert upper(hurt) is None
    assert lower(hurt) is None


def test_damage_below_the_window_is_not_looked_at() -> None:
    upper, lower, hurt, data = _two_crops(0.9, "2")
    assert lower(hurt) is None
    np.testing.assert_array_equal(upper(hurt), upper(data))


def _two_crops(at: float, version: str) -> tuple[Any, Any, bytes, bytes]:
    """A crop of the upper half and one that reaches down, a file damaged at this part of it, and the file."""
    data, chain = written(300, 200, 3), cropping(version)
    edges = {position: lower_edge(position, 300, 200) for position in range(60)}
    positions = next(p for p in edges if edges[p] < 0.5), next(p for p in edges if edges[p] > 0.98)
    upper, lower = (partial(_outcome, chain, position) for position in positions)
    assert upper(data) is not None
    assert lower(data) is not None
    hurt = bytearray(data)
    place = int(at * len(data))
    hurt[place : place + 12] = b"\xff\xd5" * 6  # restarts that nobody announced
    return upper, lower, bytes(hurt), data


def _outcome(chain: OpChain, position: int, data: bytes) -> Any:
    try:
        return chain.render(data, partial(KeyedRandom, 1, 0, position))
    except BadSampleError:
        return None


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no scan", lambda data: data[: data.index(b"\xff\xda")]),
        ("a marker that is no table's", lambda data: data[:2] + b"\xff\x01" + data[2:]),
        (
            "two frames",
            lambda data: data[:2] + SECOND_FRAME + data[2:],
        ),
        ("fill bytes", lambda data: data[:2] + b"\xff" + data[2:]),
        ("nothing", lambda data: data[:2]),
    ],
)
def test_a_file_out_of_the_ordinary_is_left_whole(what: str, change: Any) -> None:
    data = written(64, 64, 4)
    assert find_height_offset(data) is not None
    assert find_height_offset(change(data)) is None, what


def test_of_warnings_only_that_of_what_is_left_over_passes() -> None:
    assert is_trailing_data_warning("Corrupt JPEG data: 54609 extraneous bytes before marker 0xd9")
    assert is_trailing_data_warning("Corrupt JPEG data: 9 extraneous bytes before marker 0xd3")
    for complaint in ("marker 0xda", "marker 0xd8", "marker 0xc4"):
        assert not is_trailing_data_warning(f"Corrupt JPEG data: 9 extraneous bytes before {complaint}")
    assert not is_trailing_data_warning("Corrupt JPEG data: bad Huffman code")
    assert not is_trailing_data_warning("Premature end of JPEG file")
