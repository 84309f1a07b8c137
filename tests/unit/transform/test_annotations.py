"""Boxes and keypoints: as torchvision v2 and Albumentations move them, what is dropped, hostile files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meshd.transform import registry
from meshd.transform.builtin.annotation_files import read_objects
from meshd.transform.builtin.resample_window import ResampleWindow
from meshd.transform.compiler import compile_program, complete_spec
from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import (
    AnnotationMotion,
    Motion,
    make_boxes,
    make_points,
    move_boxes,
    move_points,
)
from meshd.transform.messages import OpStats
from meshd.transform.multi_field_ops import RowInputs
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec, parse_spec
from meshwire.strict_json import PlanError
from tests.golden.annotation_peers import BOXES, CASES, HEIGHT, POINTS, WIDTH

if TYPE_CHECKING:
    from collections.abc import Mapping

PEERS = json.loads((Path(__file__).parents[2] / "golden" / "ops" / "annotation_peers.json").read_text())
CANVAS = HEIGHT, WIDTH
RANDOM = KeyedRandom(1, 2, 3)
OPS: dict[str, tuple[str, dict[str, Any]]] = {
    "hflip": ("hflip", {"p": 1.0}),
    "vflip": ("vflip", {"p": 1.0}),
    "resize": ("resize", {"size": CASES["resize"]}),
    "enlarge": ("resize", {"size": CASES["enlarge"]}),
    "center_crop": ("center_crop", {"size": CASES["center_crop"]}),
    "pad": ("pad", {"border": CASES["pad"]}),
    "rotate90": ("rotate90", {"turns": 1}),
    "rotate180": ("rotate90", {"turns": 2}),
    "rotate270": ("rotate90", {"turns": 3}),
    "rotate": ("rotate", {"degrees": [30.0, 30.0]}),
}
IDLE = OpStats(lambda: 0.0)


def motion(case: str) -> Motion:
    """The motion of a case of the peers, made by the op itself."""
    if case == "resized_crop":  # random_resized_crop with this draw
        return ResampleWindow(*CASES[case]).motion()
    name, args = OPS[case]
    operation: Any = registry.build(OpSpec(name, "image", args), "")[1]
    found = operation.motion(*CANVAS, RANDOM)
    assert isinstance(found, Motion)
    return found


def boxes(*corners: list[float]) -> Any:
    return make_boxes(np.array(corners or BOXES, np.float64).reshape(-1, 4), CANVAS)


def points(*given: list[float], swap: tuple[int, ...] | None = None) -> Any:
    """One object; every keypoint is visible."""
    found = np.array([[*each, 2.0] for each in given or POINTS])[None]
    return make_points(found, CANVAS, swap)


# --- as others move them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_boxes_are_where_torchvision_has_them(case: str) -> None:
    found = move_boxes(boxes(), motion(case))
    assert np.abs(found - np.array(PEERS["torchvision"]["moved"][case]["boxes"])).max() < 2e-5
    assert found.canvas == motion(case)[:2]


@pytest.mark.parametrize(
    ("peer", "case"),
    [
        (peer, case)
        for peer in PEERS
        for case in PEERS[peer]["moved"]
        if peer != "torchvision" or not case.startswith("rotate")
    ],
)
def test_keypoints_are_where_the_others_have_them(peer: str, case: str) -> None:
    """But for torchvision's rotations, which do not number pixels as its flips do: (79, 59) goes to (59,
    1).
    """
    found = move_points(points(), motion(case))[0]
    height, width = motion(case)[:2]
    for mine, (x, y) in zip(found, PEERS[peer]["moved"][case]["points"], strict=True):
        inside = 0 <= x < width and 0 <= y < height
        assert np.abs(mine - ([x, y, 2.0] if inside else [0, 0, 0])).max() < 2e-5


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("rotate")])
def test_boxes_are_where_albumentations_has_them(case: str) -> None:
    there = PEERS["albumentations"]["moved"][case]
    found = kept(move_boxes(boxes(), motion(case)), min_size=1e-3)
    assert found[1].tolist() == there["labels"]
    assert np.abs(found[0] - np.array(there["boxes"])).max() < 2e-5


def kept(of: Any, **rules: float) -> tuple[Any, Any]:
    """The boxes and labels that keep_boxes leaves."""
    operation: Any = registry.build(OpSpec("keep_boxes", "boxes", rules), "")[1]
    left, labels = operation.apply_all([of, np.arange(len(of))], RANDOM)
    return left, labels


def test_boxes_are_dropped_by_the_rules_of_both() -> None:
    cropped = move_boxes(boxes(), motion("resized_crop"))
    assert kept(cropped, min_size=10, min_area=500)[1].tolist() == PEERS["torchvision"]["kept"]
    for least, labels in PEERS["albumentations"]["kept"].items():
        found = kept(cropped, min_visibility=float(least))[1].tolist()
        assert found == labels


def test_what_is_visible_is_a_share_of_the_box_before_all_crops() -> None:
    """And a box that was never cropped has all of it, whatever was done to it."""
    half = Motion(HEIGHT, 40, x0=-20.0)
    box = boxes([0.0, 10.0, 40.0, 20.0], [30.0, 10.0, 50.0, 20.0])
    once = move_boxes(box, half)
    twice = move_boxes(once, Motion(HEIGHT, 30, x0=-10.0))
    assert (once.seen.tolist(), twice.seen.tolist()) == ([0.5, 1.0], [0.25, 1.0])
    turned = move_boxes(move_boxes(box, motion("hflip")), motion("rotate90"))
    assert kept(boxes(), min_visibility=1.0)[1].tolist() == [0, 1, 2, 3]
    assert turned.seen.tolist() == [1.0, 1.0]
    assert kept(twice, min_visibility=0.5)[0].seen.tolist() == [1.0]


def test_dropped_rows_go_from_every_field() -> None:
    operation: Any = registry.build(OpSpec("keep_boxes", "boxes", {"min_size": 10.0}), "")[1]
    skeletons = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    left, labels, found = operation.apply_all([boxes(), np.array([4, 5, 6, 7]), skeletons], RANDOM)
    assert labels.tolist() == [4, 6]
    assert (found == skeletons[[0, 2]]).all()
    assert left.canvas == CANVAS
    with pytest.raises(BadSampleError, match="4 boxes, but a field with 3 rows"):
        operation.apply_all([boxes(), np.arange(3)], RANDOM)
    strict: Any = registry.build(OpSpec("keep_boxes", "boxes", {"min_area": 1e6, "at_least": 1}), "")[1]
    with pytest.raises(BadSampleError, match="0 boxes are left"):
        strict.apply_all([boxes()], RANDOM)


def test_a_mirror_exchanges_left_and_right() -> None:
    eyes = points([10.0, 5.0], [30.0, 5.0], [20.0, 9.0], swap=(1, 0, 2))
    mirrored = move_points(eyes, motion("hflip"))
    assert mirrored[0, :, 0].tolist() == [49.0, 69.0, 59.0]  # the left eye is the one that is now on the left
    assert move_points(eyes, motion("rotate180"))[0, :, 0].tolist() == [69.0, 49.0, 59.0]
    assert (move_points(mirrored, motion("hflip")) == eyes).all()


# --- pixels and annotations by the same draws -------------------------------------------------------------


def image_file(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def array_file(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(array))
    return out.getvalue()


READ: list[dict[str, Any]] = [
    {"op": "npy", "field": "boxes", "args": {"dtype": "float32", "shape": [None, 4]}},
    {"op": "boxes", "fields": ["boxes", "image"]},
    {"op": "decode", "field": "image"},
]


def rendered(ops: list[dict[str, Any]], files: Mapping[str, bytes], position: int = 0) -> dict[str, Any]:
    names = sorted(files)
    spec = complete_spec(parse_spec({"seed": 5, "ops": ops}), lambda field: files[field])
    made = compile_program(spec, names)
    draw = made.draw(0, position)
    sources = [((number,),) for number in range(len(names))]
    row = RowInputs(made.joints, sources, lambda pieces: files[names[pieces[0][0]]], draw, IDLE)
    values = {}
    for number, (name, chain) in enumerate(made.chains.items()):
        value, done = row.begin_chain(number, chain)
        values[name] = chain.render(value, draw, IDLE, done)
    return values


@pytest.mark.parametrize(
    "op",
    [
        {"op": "random_resized_crop", "args": {"size": [50, 40], "scale": [0.5, 1.0]}},
        {"op": "random_crop", "args": {"size": [50, 60]}},
        {"op": "rotate90", "args": {"turns": 1}},
        {"op": "rotate90", "args": {"turns": 3}},
        {"op": "rotate", "args": {"degrees": 90.0}},
        {"op": "hflip"},
        {"op": "vflip"},
        {"op": "pad", "args": {"border": [9, 3, 1, 5]}},
        {"op": "resize", "args": {"size": 40}},
    ],
    ids=lambda op: str(op["op"]),
)
def test_the_box_is_around_the_pixels(op: dict[str, Any]) -> None:
    """An oracle of its own: the pixels themselves. A box around a turned rectangle is larger than it."""
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[20:44, 30:60] = 255
    files = {"image": image_file(pixels), "boxes": array_file(np.array([[30, 20, 60, 44]], np.float32))}
    seen = set()
    for position in range(8):
        both = {**op, "fields": ["image", "boxes"]}
        got = rendered([*READ, both], files, position)
        alone = rendered([*READ, {**op, "field": "image"}], files, position)
        assert (got["image"] == alone["image"]).all()
        rows, columns = np.nonzero(got["image"][:, :, 0] > 127)
        around = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert np.abs(got["boxes"][0] - around).max() <= 1.0
        seen.add(got["boxes"].tobytes())
    assert len(seen) == {"random_resized_crop": 8, "random_crop": 8, "hflip": 2, "vflip": 2}.get(
        op["op"], 8 if op["op"] == "rotate" else 1
    )


def test_an_image_keeps_its_chain() -> None:
    """Boxes read the size from the file: decoding stays fused, so pixels do not depend on having boxes."""
    spec = complete_spec(
        parse_spec({"ops": [*READ, {"op": "resize", "fields": ["image", "boxes"], "args": {"size": 20}}]}),
        lambda field: array_file(np.zeros((1, 4), np.float32)),
    )
    made = compile_program(spec, ["boxes", "image"])
    assert "decode+resize" in repr(made.chains["image"])
    assert dict(made.first_chains)[1] is made.chains["image"]
    late = [READ[0], READ[2], {"op": "resize", "field": "image", "args": {"size": 20}}, READ[1]]
    with pytest.raises(PlanError, match="move it before resize"):
        compile_program(complete_spec(parse_spec({"ops": late}), lambda _: b""), ["boxes", "image"])


@given(
    st.lists(
        st.tuples(*[st.floats(0, 80), st.floats(0, 60), st.floats(0, 40), st.floats(0, 30)]), max_size=6
    ),
    st.sampled_from(sorted(OPS)),
    st.sampled_from(sorted(OPS)),
)
@settings(max_examples=25, deadline=None)
def test_boxes_stay_ordered_and_inside(given: list[Any], first: str, second: str) -> None:
    found = (
        boxes(*[[x, y, x + w, y + h] for x, y, w, h in given])
        if given
        else make_boxes(np.zeros((0, 4)), CANVAS)
    )
    for case in (first, second):
        name, args = OPS[case]
        operation: Any = registry.build(OpSpec(name, "image", args), "")[1]
        try:
            found = AnnotationMotion(operation).apply(found, RANDOM)
        except BadSampleError:  # the crop is larger than what the first op left
            return
    height, width = found.canvas
    assert len(found) == len(given) == len(found.seen)
    assert (found[:, :2] <= found[:, 2:]).all()
    assert (found >= 0).all()
    assert (found <= [width, height, width, height]).all()
    assert ((found.seen >= 0) & (found.seen <= 1)).all()


# --- files ------------------------------------------------------------------------------------------------

VOC = b"""<?xml version="1.0"?><annotation><filename>a.jpg</filename><size><width>9</width></size>
<object><name>dog</name><difficult>0</difficult><bndbox><xmin>11</xmin><ymin>21</ymin><xmax>50</xmax><ymax>45
</ymax></bndbox><part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>
<object><name>cat</name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>8</xmax><ymax>6</ymax>
</bndbox></object></annotation>"""
YOLO = b"0 0.375 0.5416666666666666 0.5 0.4166666666666667\n1 0.05 0.05 0.1 0.1\n"
COCO = json.dumps(
    {
        "annotations": [
            {
                "category_id": 18,
                "category": "dog",
                "bbox": [10, 20, 40, 25],
                "keypoints": [20, 30, 2, 0, 0, 0],
            },
            {"category_id": 1, "bbox": [0, 0, 8, 6], "iscrowd": 1, "keypoints": [1, 1, 1, 2, 2, 1]},
        ]
    }
).encode()


def read(source: str, data: bytes, **more: Any) -> dict[str, Any]:
    files = {"image": image_file(np.zeros((60, 80, 3), np.uint8)), "boxes": data, "labels": data}
    return rendered(
        [
            {"op": "boxes", "fields": ["boxes", "image"], "args": {"source": source, "difficult": True}},
            {"op": "box_labels", "field": "labels", "args": {"source": source, "difficult": True, **more}},
        ],
        files,
    )


@pytest.mark.parametrize(
    ("source", "data", "more", "labels"),
    [
        ("voc", VOC, {"classes": ["cat", "dog"]}, [1, 0]),
        ("yolo", YOLO, {}, [0, 1]),
        ("coco", COCO, {}, [18, 1]),
        ("coco", COCO, {"classes": ["1", "dog"]}, [1, 0]),
    ],
)
def test_formats_say_the_same(source: str, data: bytes, more: dict[str, Any], labels: list[int]) -> None:
    got = read(source, data, **more)
    assert np.abs(got["boxes"] - [[10, 20, 50, 45], [0, 0, 8, 6]]).max() < 1e-5
    assert got["labels"].tolist() == labels


def test_hard_objects_and_keypoints_of_coco() -> None:
    files = {"image": image_file(np.zeros((60, 80, 3), np.uint8)), "points": COCO, "voc": VOC}
    got = rendered(
        [
            {"op": "keypoints", "fields": ["points", "image"], "args": {"source": "coco", "count": 2}},
            {"op": "boxes", "fields": ["voc", "image"], "args": {"source": "voc"}},
        ],
        files,
    )
    assert got["points"].tolist() == [[[20, 30, 2], [0, 0, 0]]]
    assert got["voc"].tolist() == [[10, 20, 50, 45]]


BOMB = b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 50 + b'"><!ENTITY c "' + b"&b;" * 50 + b'">]>'


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("voc", BOMB + b"<annotation>&c;</annotation>"),
        ("voc", b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>'),
        ("voc", b"<annotation>" + b"<object>" * 50),
        ("voc", b"<annotation>&amp;" + b"<object/>" * 3 + b"</annotation>"),
        ("voc", VOC.replace(b"<xmin>11</xmin>", b"<xmin>1e999</xmin>")),
        ("voc", VOC.replace(b"<xmin>11</xmin>", b"<xmin>70</xmin>")),
        ("voc", b"\xff\xfe"),
        ("yolo", b"0 0.5 0.5 0.1\n"),
        ("yolo", b"0 nan 0.5 0.1 0.1\n"),
        ("yolo", b"-1 0.5 0.5 0.1 0.1\n"),
        ("yolo", b"0 0.5 0.5 0.1 0.1\n" * 16_385),
        ("coco", b"[" * 100_000),
        ("coco", b'{"annotations": [{"bbox": [1, 2, NaN, 4], "category_id": 1}]}'),
        ("coco", b'{"annotations": [{"bbox": [1, 2, -3, 4], "category_id": 1}]}'),
        ("coco", b'{"annotations": [{"bbox": [1, 2, 3, 1e400], "category_id": 1}]}'),
        ("coco", b'{"annotations": [7]}'),
        ("coco", b'{"annotations": [{"bbox": [1, 2, 3, 4], "category_id": %d}]}' % 10**30),
        ("coco", b" " * (4 << 20) + b"[]"),
    ],
)
def test_hostile_files_are_bad_samples(source: str, data: bytes) -> None:
    with pytest.raises(BadSampleError):
        read(source, data, classes=["cat", "dog"])


@given(st.binary(max_size=60), st.sampled_from(["voc", "yolo", "coco"]))
@settings(max_examples=75, deadline=None)
def test_any_bytes_are_objects_or_a_bad_sample(data: bytes, form: Any) -> None:
    for each in (data, b"<annotation><object>" + data, b'{"annotations":[{"bbox":' + data, b"0 " + data):
        try:
            found = read_objects(each, form, difficult=True)
        except BadSampleError:
            continue
        assert found.corners.shape == (len(found.classes), 4)


def test_numbers_as_json() -> None:
    """As a line of JSONL has them, after `ops.json(…, type="json")`."""
    files = {
        "image": image_file(np.zeros((60, 80, 3), np.uint8)),
        "boxes": b"[[1,2,3.5,4]]",
        "points": b"[[1,2],[3,4]]",
    }
    ops: list[dict[str, Any]] = [
        {"op": "boxes", "fields": ["boxes", "image"]},
        {"op": "keypoints", "fields": ["points", "image"], "args": {"count": 2}},
    ]
    got = rendered(ops, files)
    assert got["boxes"].tolist() == [[1, 2, 3.5, 4]]
    assert got["points"].tolist() == [[[1, 2, 2], [3, 4, 2]]]
    assert rendered(ops, {**files, "boxes": b"[]", "points": b"[]"})["points"].shape == (0, 2, 3)
    for bad in (b"[[1,2],[3]]", b"[[1,2,3,4],5]", b"[[[[1]]]]", b"7", b"[1e300,0,0,0]", b'["a"]'):
        with pytest.raises(BadSampleError):
            rendered(ops, {**files, "points": bad})


def test_formats_of_arrays_and_back() -> None:
    pixels = image_file(np.zeros((60, 80, 3), np.uint8))
    given: dict[str, list[float]] = {
        "xywh": [10, 20, 40, 25],
        "cxcywh": [30, 32.5, 40, 25],
        "xyxy": [10, 20, 50, 45],
    }
    for form, numbers in given.items():
        shares = (np.array([numbers]) / [80, 60, 80, 60]).astype(np.float64)
        got = rendered(
            [
                {"op": "npy", "field": "boxes", "args": {"dtype": "float64", "shape": [None, 4]}},
                {"op": "boxes", "fields": ["boxes", "image"], "args": {"format": form, "normalized": True}},
                {"op": "convert_boxes", "field": "boxes", "args": {"format": form}},
                {"op": "pad_to", "field": "boxes", "args": {"length": 3, "value": -1}},
            ],
            {"image": pixels, "boxes": array_file(shares)},
        )
        assert np.allclose(got["boxes"], np.array([numbers, [-1] * 4, [-1] * 4]), atol=1e-5)
