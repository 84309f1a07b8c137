"""Hostile and damaged images: a bad sample or the whole, right image; bounded time and memory, no traces."""

from __future__ import annotations

import io
import re
import resource
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshd.transform.builtin.image_codecs import MAX_SCANS, decode, read_jpeg_head
from meshd.transform.errors import BadSampleError
from tests.support.hostile_images import encoded, hostile_images, jpeg_scanned, tiff_of

HOSTILE = hostile_images()
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": ("JPEG", {}),
    "progressive": ("JPEG", {"progressive": True}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {}),
    "webp-lossless": ("WEBP", {"lossless": True}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "tiff-lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "tiff-deflate": ("TIFF", {"compression": "tiff_deflate"}),
}


def test_the_makers_make_files_that_are_right_when_nothing_is_changed() -> None:
    assert decode(tiff_of(), "rgb").shape == (8, 8, 3)
    assert decode(jpeg_scanned(encoded("JPEG", progressive=True), 0), "rgb").shape == (48, 64, 3)


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_in_bounded_time_and_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(BadSampleError) as caught:
        decode(HOSTILE[name], "rgb")
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB
    assert not re.search(r"0x[0-9a-f]{6,}|BytesIO|Traceback", str(caught.value))


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_is_cut_is_never_half_an_image(name: str) -> None:
    form, options = FORMS[name]
    data = encoded(form, 24, 16, **options)
    whole = decode(data, "rgb")
    for length in range(0, len(data), 3):
        try:
            found = decode(data[:length], "rgb")
        except BadSampleError:
            continue
        np.testing.assert_array_equal(found, whole, err_msg=f"{length} of {len(data)} bytes")


def test_no_byte_of_a_png_can_change_unseen() -> None:
    data = encoded("PNG", 12, 10)
    for at in range(len(data)):
        changed = data[:at] + bytes((data[at] ^ 0x40,)) + data[at + 1 :]
        with pytest.raises(BadSampleError):
            decode(changed, "rgb")


def test_animations_give_their_first_image_and_no_other_is_decoded() -> None:
    frames = [Image.new("RGB", (64, 64), (number % 256, 0, 0)) for number in range(300)]
    for form in ("GIF", "WEBP", "PNG"):
        data = encoded_animation(form, frames)
        began = time.process_time()
        assert not decode(data, "rgb").any()
        assert time.process_time() - began < 0.5


def encoded_animation(form: str, frames: list[Image.Image]) -> bytes:
    out = io.BytesIO()
    frames[0].save(out, form, save_all=True, append_images=frames[1:], **lossless(form))
    return out.getvalue()


def lossless(form: str) -> dict[str, bool]:
    return {"lossless": True} if form == "WEBP" else {}


def test_a_photograph_may_have_many_scans() -> None:
    data = encoded("JPEG", 200, 150, progressive=True)
    assert data.count(b"\xff\xda") > 1
    np.testing.assert_array_equal(decode(data, "rgb"), decode(jpeg_scanned(data, 0), "rgb"))


def test_out_of_memory_is_no_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the op knows what may be taken, and says so."""

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", full)
    with pytest.raises(MemoryError):
        decode(encoded("PNG"), "rgb")


def test_rows_that_are_all_there_are_not_scanned_again() -> None:
    """A scan of all components is the last one that a decoder takes: so nobody counts those behind it."""
    data = encoded("JPEG")
    head = read_jpeg_head(data)
    assert head.rows_at is not None
    scan = data[data.index(b"\xff\xda") : -2]
    again = data[:-2] + scan * 2 * MAX_SCANS + data[-2:]
    with pytest.raises(BadSampleError, match="more than one scan"):
        decode(again, "rgb")
