"""Descriptions of rows: they say what the ops do, tested by the pixels that a program makes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from meshd.batches.row_descriptions import describe_row
from meshd.transform.compiler import compile_program
from meshwire.plan.plan_spec import parse_spec

HEIGHT, WIDTH, EPOCH = 40, 56, 3


def described(ops: list[dict[str, Any]], position: int) -> tuple[dict[str, Any], Any, Any]:
    """The description of a row, its pixels, and those of its source, which tell where they are from."""
    source = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    source[..., 0], source[..., 1] = np.arange(HEIGHT)[:, None], np.arange(WIDTH)
    out = io.BytesIO()
    Image.fromarray(source).save(out, "PNG")
    spec = parse_spec({"ops": [{"field": "image", **op} for op in ops], "seed": 5})
    program = compile_program(spec, ["image"])
    made = program.chains["image"].render(out.getvalue(), program.draw(EPOCH, position))
    return describe_row(spec, {"image": (HEIGHT, WIDTH)}, EPOCH, position), made, source


@pytest.mark.parametrize("position", range(12))
def test_the_corners_are_where_the_pixels_come_from(position: int) -> None:
    ops: list[dict[str, Any]] = [
        {"op": "decode"},
        {"op": "pad", "args": {"border": 3}},
        {"op": "random_crop", "args": {"size": 24}},
        {"op": "hflip"},
        {"op": "vflip"},
        {"op": "rotate90"},
        {"op": "to_chw"},
    ]
    found, made, _ = described(ops, position)
    image = found["images"]["image"]
    (x0, y0), (x1, y1), _, (x3, y3) = image["corners"]
    # The middle of each pixel of the result, in the source.
    at = (np.arange(24) + 0.5) / 24
    x = x0 + at[None, :] * (x1 - x0) + at[:, None] * (x3 - x0)
    y = y0 + at[None, :] * (y1 - y0) + at[:, None] * (y3 - y0)
    inside = (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT)
    assert np.array_equal(made[0][inside], np.floor(y[inside]))
    assert np.array_equal(made[1][inside], np.floor(x[inside]))
    assert not made[:, ~inside].any()
    assert [op["op"] for op in found["ops"]] == ["pad", "random_crop", "hflip", "vflip", "rotate90"]


def test_what_the_pixels_do_not_show_is_named() -> None:
    ops: list[dict[str, Any]] = [
        {"op": "decode"},
        {"op": "random_resized_crop", "args": {"size": 24}},
        {"op": "grayscale", "args": {"p": 0.5}},
        {"op": "color_jitter", "args": {"brightness": 0.4, "hue": 0.1}},
        {"op": "rand_augment", "args": {"count": 3}},
    ]
    applied = set()
    for position in range(16):
        found, made, _ = described(ops[:3], position)
        (gray,) = (op["drawn"] for op in found["ops"] if op["op"] == "grayscale")
        assert gray["applied"] == bool((made[..., 0] == made[..., 1]).all())
        applied.add(gray["applied"])
    assert applied == {True, False}
    found, _, _ = described(ops, 0)
    jitter, augment = (op for op in found["ops"] if op["op"] in ("color_jitter", "rand_augment"))
    assert set(jitter["drawn"]) == {"brightness", "hue"}
    assert 0.6 <= jitter["drawn"]["brightness"] <= 1.4
    assert len(augment["drawn"]["changes"]) == 3
    assert augment["note"] == "it may move the content, too"
    assert found["images"] == {}  # where the content is now is not known


def test_what_cannot_be_described_is_said() -> None:
    spec = parse_spec(
        {
            "ops": [
                {"op": "decode", "field": "image"},
                {"op": "random_crop", "field": "image", "args": {"size": 64}},
                {"op": "mine/op", "field": "image"},
                {"op": "hflip", "field": "image"},
                {"op": "rotate", "field": "other", "args": {"degrees": 10}},
            ]
        }
    )
    found = describe_row(spec, {"image": (HEIGHT, WIDTH)}, 0, 0)
    assert [op["note"] for op in found["ops"]] == [
        "an image of 56×40 is smaller than the crop of 64×64",
        "the code of users is not run for a description",
        "the size of its input is not known",
        "the size of its input is not known",
    ]
