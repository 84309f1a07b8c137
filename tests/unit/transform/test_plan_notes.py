"""Notes on plans: what decoding loses, filters that mix class numbers, draws that move one of two images."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshd.transform.compiler import complete_spec
from meshd.transform.plan_notes import decode_mode, plan_notes
from meshwire.plan.plan_spec import parse_spec

RNG = np.random.default_rng(5)
NOISE = RNG.integers(0, 256, (40, 50), dtype=np.uint8)
VOC = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, *[value % 256 for value in range(756)]]
GRAYS = [value // 3 for value in range(768)]


def file_of(image: Image.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def with_palette(numbers: Any, palette: list[int]) -> bytes:
    image = Image.frombytes("P", numbers.shape[::-1], np.ascontiguousarray(numbers).tobytes())
    image.putpalette(palette)
    return file_of(image)


def array_of(shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros(shape, "float32"))
    return out.getvalue()


FILES = {
    "photo": file_of(Image.fromarray(np.dstack([NOISE] * 3)), "JPEG"),
    "gray": file_of(Image.fromarray(NOISE)),
    "few_colors": with_palette(NOISE, GRAYS),
    "voc": with_palette(NOISE, VOC),
    "flat": with_palette(np.kron(NOISE[:4, :5], np.ones((40, 40), np.uint8)), GRAYS),
    "mask_of_it": with_palette(NOISE, GRAYS),
    "depth": file_of(Image.fromarray(NOISE.astype(np.uint16) * 200)),
    "height": file_of(Image.fromarray(NOISE.astype(np.float32) / 255), "TIFF"),
    "bit": file_of(Image.fromarray(NOISE > 100)),
    "text": b"not an image",
    "shares": b"0 0.5 0.5 0.25 1.0001\n",
    "pixels": b"0 0.5 0.5 0.25 0.5\n1 320 200 40 60\n",
    "talk": b'[{"role": "user", "content": "hi"}]',
    "sharegpt": b'{"conversations": [{"from": "human", "value": "hi"}]}',
    "renamed": b'{"messages": [{"from": "human", "value": "hi"}], "id": 1}',
    "no_talk": b'{"messages": [], "text": "hi"}',
    "mask_array": array_of((40, 50)),
    "flow_array": array_of((40, 50, 2)),
    "vector_array": array_of((50,)),
    "other_array": array_of((41, 50)),
}


def notes(*ops: dict[str, Any]) -> tuple[str, ...]:
    def first(field: str) -> bytes:
        return FILES[field]

    return plan_notes(complete_spec(parse_spec({"ops": list(ops)}), first), first)


def op(name: str, *fields: str, version: str = "", each: Any = None, **args: Any) -> dict[str, Any]:
    where: dict[str, Any] = {"field": fields[0]} if len(fields) == 1 else {"fields": list(fields)}
    more = ({"version": version} if version else {}) | ({"each": each} if each else {})
    return {"op": name, "args": args, **where, **more}


@pytest.mark.parametrize(
    ("field", "mode", "told"),
    [
        ("photo", "rgb", ""),
        ("photo", "gray", ""),
        ("gray", "gray", ""),
        ("text", "rgb", ""),
        ("few_colors", "rgb", ""),
        ("few_colors", "gray", r"has a palette.*keep them with ops\.decode\('few_colors', mode='index'\)"),
        ("voc", "rgb", r"its indices become colors\. If they are class numbers"),
        ("flat", "rgb", "its indices become colors"),
        ("mask_of_it", "rgb", "its indices become colors"),
        ("voc", "index", ""),
        ("depth", "gray", r"16 bits a value, of which the upper 8 are kept.*'depth', mode='unchanged'"),
        ("depth", "rgb", "16 bits a value"),
        ("depth", "unchanged", ""),
        ("bit", "gray", r"values 0…1, which are scaled to 0…255.*'bit', mode='index'"),
        ("height", "unchanged", ""),
    ],
)
def test_what_decoding_loses(field: str, mode: str, told: str) -> None:
    found = notes(op("decode", field, mode=mode))
    assert len(found) == bool(told), found
    for note in found:
        assert note.startswith(f"{field!r}, decoded as {mode}: the first sample has ")
        assert re.search(told, note), note


def test_the_mode_is_rgb_unless_said() -> None:
    spec = parse_spec({"ops": [op("decode", "a"), op("decode", "b", "c", each={"c": {"mode": "index"}})]})
    assert [decode_mode(spec, name) for name in "abcd"] == ["rgb", "rgb", "index", ""]
    assert len(notes(op("decode", "voc"))) == 1


def test_an_earlier_version_that_clips_says_so() -> None:
    (note,) = notes(op("decode", "height", version="2"))
    assert "float32, which version 2 of decode clips to 0…255" in note
    assert notes(op("decode", "height")) == (), "it is refused, with the same advice"


@pytest.mark.parametrize(
    ("ops", "told"),
    [
        ([op("resize", "voc", size=8, filter="nearest"), op("hflip", "voc")], ""),
        ([op("resize", "voc", size=8)], "resize of 'voc' computes new numbers.*pass filter='nearest'"),
        ([op("random_resized_crop", "voc", size=8)], "random_resized_crop of 'voc'"),
        ([op("rotate", "voc", degrees=8)], "rotate of 'voc'"),
        ([op("rotate", "voc", degrees=8, version="1")], "rotate of 'voc'"),
        ([op("rotate", "voc", degrees=8, filter="nearest")], ""),
        ([op("resize", "photo", "voc", size=8)], r"pass each=\{'voc': \{'filter': 'nearest'\}\}"),
        ([op("resize", "photo", "voc", size=8, each={"voc": {"filter": "nearest"}})], ""),
    ],
)
def test_filters_that_mix_class_numbers(ops: list[dict[str, Any]], told: str) -> None:
    both = any("fields" in each for each in ops)
    found = notes(op("decode", "voc", mode="index"), *([op("decode", "photo")] if both else []), *ops)
    assert len(found) == bool(told), found
    assert all(re.search(told, note) for note in found), found


PAIR = [op("decode", "photo"), op("decode", "voc", mode="index")]


@pytest.mark.parametrize(
    "ops",
    [
        [op("random_resized_crop", "photo", size=8)],
        [op("hflip", "photo")],
        [op("vflip", "voc")],
        [op("random_crop", "photo", size=8), op("random_crop", "voc", size=8)],
        [op("rotate", "photo", degrees=9)],
        [op("rand_augment", "photo")],
    ],
)
def test_a_draw_for_one_of_two_images_is_noted(ops: list[dict[str, Any]]) -> None:
    (note,) = notes(*PAIR, *ops)
    assert note.startswith("draws of their own: ")
    for each in ops:
        assert f"{each['op']} of {each['field']!r}" in note
    assert re.search(r"If 'photo' and 'voc' show the same scene.*ops\.over\(\('photo', 'voc'\), ops\.", note)


@pytest.mark.parametrize(
    "ops",
    [
        [op("random_resized_crop", "photo", "voc", size=8, each={"voc": {"filter": "nearest"}})],
        [op("hflip", "photo", "voc"), op("color_jitter", "photo", brightness=0.3)],
        [op("hflip", "photo", p=0)],
        [op("center_crop", "photo", size=8)],
    ],
)
def test_shared_draws_and_what_does_not_move_is_not(ops: list[dict[str, Any]]) -> None:
    assert notes(*PAIR, *ops) == ()


def test_arrays_of_the_size_of_an_image_that_moves_alone() -> None:
    """A mask in an `.npy` file is as spatial as one in a PNG."""
    read = [op("npy", name) for name in ("mask_array", "flow_array", "vector_array", "other_array")]
    (note,) = notes(op("decode", "photo"), *read, op("hflip", "photo"))
    assert note.startswith(
        "draws of their own: hflip of 'photo'. If 'photo' and 'mask_array' and 'flow_array' show"
    )
    assert note.endswith(
        "ops.over(('photo', 'mask_array', 'flow_array'), ops.hflip, …) draws once for all of them, "
        "after ops.as_image('mask_array') and ops.as_image('flow_array')"
    )
    assert notes(op("decode", "photo"), *read) == ()
    assert notes(op("decode", "photo"), *read[2:], op("hflip", "photo")) == ()
    assert notes(op("npy", "mask_array"), op("decode", "photo"), op("center_crop", "photo", size=8)) == ()


def test_what_is_made_an_image_counts_as_one() -> None:
    made = [op("decode", "photo"), op("npy", "mask_array"), op("as_image", "mask_array")]
    assert "hflip of 'photo'" in notes(*made, op("hflip", "photo"))[0]
    assert notes(*made, op("hflip", "photo", "mask_array")) == ()


def test_one_image_alone_may_move() -> None:
    assert notes(op("decode", "photo"), op("hflip", "photo")) == ()


def test_windows_of_two_arrays() -> None:
    arrays = [op("npy", name, dtype="float32", shape=[9, 9]) for name in ("x", "y")]
    own = [op("window", name, extents=[3, 3]) for name in ("x", "y")]
    (note,) = notes(*arrays, *own)
    assert "window of 'x'; window of 'y'" in note
    assert notes(*arrays, op("window", "x", "y", extents=[3, 3])) == ()
    assert notes(*arrays, *(each | {"args": {"extents": [3, 3], "at": "center"}} for each in own)) == ()


BOXED = [op("boxes", "voc", "photo", source="voc"), op("decode", "photo")]


def test_boxes_that_do_not_follow_their_image() -> None:
    (note,) = notes(*BOXED, op("resize", "photo", size=8))
    assert note == (
        "resize moves 'photo', but not 'voc', which belongs to it: ops.over(('photo', 'voc'), ops.resize, …) "
        "moves both"
    )
    assert "hflip moves 'voc', but not 'photo'" in notes(*BOXED, op("hflip", "voc"))[0]
    assert "'voc', which cannot follow" in notes(*BOXED, op("rand_augment", "photo"))[0]
    assert "does not mix 'voc'" in notes(*BOXED, op("mixup", "photo"))[0]
    followed = [op("hflip", "photo", "voc"), op("color_jitter", "photo", brightness=0.3)]
    assert notes(*BOXED, *followed, op("keep_boxes", "voc")) == ()


def test_boxes_of_yolo_in_pixels() -> None:
    def found(field: str) -> tuple[str, ...]:
        return notes(op("boxes", field, "photo", source="yolo"), op("decode", "photo"))

    (note,) = found("pixels")
    assert note.startswith("'pixels': the first sample has 320, but the numbers of YOLO are shares")
    assert found("shares") == found("text") == ()


def test_labels_that_do_not_lose_the_rows_of_their_boxes() -> None:
    labels = op("box_labels", "text", source="voc", classes=["a", "b"])
    (note,) = notes(*BOXED, labels, op("keep_boxes", "voc"))
    assert "but not of 'text'" in note
    assert "ops.keep_boxes('voc', 'text', …)" in note
    assert notes(*BOXED, labels, op("keep_boxes", "voc", "text")) == ()


def test_conversations_whose_messages_have_no_roles() -> None:
    """A template of Jinja renders what a message lacks as nothing, so their tokens would be empty turns."""

    def found(field: str, *before: dict[str, Any]) -> tuple[str, ...]:
        files = {"file": f"sha256:{'0' * 64}", "config": f"sha256:{'1' * 64}"}
        masks = op("tokenize_chat", field, output="answer_mask", **files)
        return notes(*before, op("tokenize_chat", field, **files)) or notes(*before, masks)

    (note,) = found("renamed")
    assert note.startswith("'renamed': the messages of the first sample have 'from', 'value', but no 'role'.")
    assert found("sharegpt", op("json", "sharegpt", path="conversations", type="json"))
    for field in ("talk", "sharegpt", "no_talk", "text", "photo"):
        assert found(field) == ()
    assert found("renamed", op("utf8", "renamed")) == ()
