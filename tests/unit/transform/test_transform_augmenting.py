"""Ops on pixels against Pillow and plain arithmetic: the same numbers, the same draws, the types promised."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from meshd.transform import registry
from meshd.transform.builtin.augmentation import CHANGES, turn_hue
from meshd.transform.builtin.geometry import affine
from meshd.transform.errors import BadSampleError
from meshd.transform.op_chain import compile_chain
from meshd.transform.op_types import BYTES, FieldType, image
from meshsdk import ops
from meshsdk.errors import ConfigurationError
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.plan_spec import OpSpec
from meshwire.strict_json import PlanError


@pytest.fixture
def picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((70, 50), Image.Resampling.BICUBIC))


def run(spec: OpSpec, value: Any, *, seed: int = 1, of: FieldType | None = None) -> Any:
    """What an op makes of a value, checked against the type it promises."""
    _, operation = registry.build(spec, "ops[0]")
    promised = operation.infer(of or image(None, None, 3))
    made = operation.apply(value, KeyedRandom(seed, 0, 0))
    if promised.kind != "bytes":
        assert made.dtype == np.dtype(promised.dtype)
        assert len(made.shape) == len(promised.shape)
        for extent, known in zip(made.shape, promised.shape, strict=True):
            assert known in (None, extent)
    return made


def test_grayscale(picture: Any) -> None:
    luma = np.asarray(Image.fromarray(picture).convert("L"))
    assert (run(ops.grayscale("x"), picture) == luma[:, :, None]).all()
    assert run(ops.grayscale("x", p=0.0), picture) is picture


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
def test_jitter_of_one_kind_is_pillows(picture: Any, name: str, kind: Any) -> None:
    made = run(ops.color_jitter("x", **{name: 0.4}), picture, seed=9)
    draws = KeyedRandom(9, 0, 0)
    factors = {
        each: draws.uniform(0.6 if each == name else 1.0, 1.4 if each == name else 1.0)
        for each in ("brightness", "contrast", "saturation")
    }
    assert (made == np.asarray(kind(Image.fromarray(picture)).enhance(factors[name]))).all()


def test_hue_turns_the_circle(picture: Any) -> None:
    flat = Image.fromarray(np.full((4, 4, 3), (200, 40, 40), dtype=np.uint8))
    turned = np.asarray(turn_hue(flat, 1 / 3))[0, 0]
    assert int(turned.argmax()) == 1  # red became green
    assert (run(ops.color_jitter("x"), picture) == picture).all()
    assert not (run(ops.color_jitter("x", hue=0.4), picture) == picture).all()


def test_geometry(picture: Any) -> None:
    assert (run(ops.vflip("x", p=1.0), picture) == picture[::-1]).all()
    padded = run(ops.pad("x", [1, 2, 3, 4], fill=9), picture)
    assert padded.shape == (54, 76, 3)
    assert (padded[1:-3, 4:-2] == picture).all()
    assert (padded[0] == 9).all()
    cut = run(ops.random_crop("x", [20, 30]), picture)
    assert any(
        (picture[top : top + 20, left : left + 30] == cut).all() for top in range(31) for left in range(41)
    )
    with pytest.raises(BadSampleError, match="smaller than the crop"):
        run(ops.random_crop("x", 60), picture)


def test_rotation(picture: Any) -> None:
    square = np.ascontiguousarray(picture[:49, :49])
    assert (run(ops.rotate("x", [0.0, 0.0]), square) == square).all()
    quarter = run(ops.rotate("x", [90.0, 90.0]), square)
    assert np.abs(quarter.astype(int) - np.rot90(square).astype(int)).max() <= 1
    assert run(ops.rotate("x", [45.0, 45.0], fill=7), square)[0, 0].tolist() == [7, 7, 7]


def test_rand_augment_is_drawn_by_key(picture: Any) -> None:
    first = run(ops.rand_augment("x", count=3, strength=15), picture, seed=4)
    assert (first == run(ops.rand_augment("x", count=3, strength=15), picture, seed=4)).all()
    distinct = {run(ops.rand_augment("x"), picture, seed=seed).tobytes() for seed in range(20)}
    assert len(distinct) > 5
    assert (run(ops.rand_augment("x", count=1, strength=0), picture, seed=0).shape) == picture.shape


def test_every_change_keeps_shape_and_type_and_most_change_something(picture: Any) -> None:
    still, picture = [], picture // 2 + 20  # autocontrast leaves alone what spans the whole range
    for name, change in CHANGES:
        made = change(picture, 0.6, 0)
        assert made.shape == picture.shape
        assert made.dtype == np.uint8
        if (made == picture).all():
            still.append(name)
    assert still == ["identity"]
    changes = dict(CHANGES)
    assert (
        changes["solarize"](picture, 1.0, 0) == np.asarray(ImageOps.solarize(Image.fromarray(picture), 0))
    ).all()
    assert (changes["posterize"](picture, -1.0, 0) == picture & 0xF0).all()


def test_normalize(picture: Any) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    made = run(ops.normalize("x", mean, std), picture)
    expected = (picture / 255.0 - mean) / std
    assert np.allclose(made, expected, atol=1e-5)
    assert run(ops.normalize("x", 0.5, 0.5, dtype="float16"), picture).dtype == np.float16
    for wrong in (ops.normalize("x", [1.0, 2.0], 1.0), ops.normalize("x", 0.0, 0.0)):
        _, operation = registry.build(wrong, "ops[0]")
        with pytest.raises(ValueError, match=r"channels|must not be 0"):
            operation.infer(image(None, None, 3))


def test_normalised_images_go_through_to_chw(picture: Any) -> None:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    chain = compile_chain(
        list(
            enumerate(
                [ops.decode("x"), ops.resize("x", [8, 9]), ops.normalize("x", 0.5, 0.5), ops.to_chw("x")]
            )
        )
    )
    assert (chain.output.dtype, chain.output.fixed) == ("float32", (3, 8, 9))
    row = np.empty((3, 8, 9), np.float32)
    chain.render_into(out.getvalue(), lambda _: KeyedRandom(0, 0, 0), row)
    assert (row == chain.render(out.getvalue(), lambda _: KeyedRandom(0, 0, 0))).all()


def test_cast() -> None:
    array = FieldType("array", "float32", (None,))
    values = np.array([0.5, 1.5, -2.5, 3.4], dtype=np.float32)
    assert run(ops.cast("x", "int8"), values, of=array).tolist() == [0, 2, -2, 3]
    assert run(ops.cast("x", "float64"), values, of=array).dtype == np.float64
    for bad in ([300.0], [np.nan], [-1e20]):
        with pytest.raises(BadSampleError):
            run(ops.cast("x", "int8"), np.array(bad, dtype=np.float32), of=array)


def test_to_npy(picture: Any) -> None:
    assert (np.load(io.BytesIO(run(ops.to_npy("x"), picture))) == picture).all()


@pytest.mark.parametrize(("form", "exact"), [("png", True), ("jpeg", False), ("webp", False)])
def test_encode(picture: Any, form: Any, exact: bool) -> None:
    data = run(ops.encode("x", form, quality=95), picture)
    assert isinstance(data, bytes)
    back = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    difference = np.abs(back.astype(int) - picture.astype(int))
    assert difference.max() == 0 if exact else difference.mean() < 4
    assert data == run(ops.encode("x", form, quality=95), picture)
    gray = run(ops.encode("x", form), picture[:, :, :1], of=image(None, None, 1))
    assert Image.open(io.BytesIO(gray)).size == (70, 50)
    lossless = run(ops.encode("x", "webp", lossless=True), picture)
    assert (np.asarray(Image.open(io.BytesIO(lossless)).convert("RGB")) == picture).all()


def test_results_never_change_within_a_version() -> None:
    """Of a version's formula: new arithmetic needs a new version. (Codecs and resampling are left out: they
    follow their libraries.)"""
    ramp = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    made = [
        run(ops.vflip("x"), ramp, seed=5),
        run(ops.pad("x", 2, fill=1), ramp),
        run(ops.random_crop("x", [4, 5]), ramp, seed=6),
        run(ops.normalize("x", 0.5, 0.25), ramp),
    ]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in made)).hexdigest()
    assert digest[:16] == "31ef7083f09ee0a3"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (OpSpec("rotate", "x", {"degrees": [5, -5]}), "args.degrees"),
        (OpSpec("pad", "x", {"border": [1, 2]}), "args.border"),
        (OpSpec("color_jitter", "x", {"hue": 0.6}), "args.hue"),
        (OpSpec("rand_augment", "x", {"strength": 31}), "args.strength"),
        (OpSpec("encode", "x", {"format": "gif"}), "args.format"),
        (OpSpec("encode", "x", {"format": "jpeg", "lossless": 1}), "args.lossless"),
        (OpSpec("normalize", "x", {"mean": [], "std": [1]}), "args.mean"),
    ],
)
def test_arguments_are_checked(spec: OpSpec, path: str) -> None:
    with pytest.raises(PlanError) as error:
        registry.build(spec, "ops[0]")
    assert error.value.path.startswith(f"ops[0].{path}")


def test_types_that_do_not_fit() -> None:
    for spec in (ops.rotate("x", 5), ops.color_jitter("x"), ops.normalize("x", 0, 1), ops.encode("x", "png")):
        _, operation = registry.build(spec, "ops[0]")
        with pytest.raises(ValueError, match="needs"):
            operation.infer(BYTES)
    with pytest.raises(ConfigurationError, match="probability"):
        ops.vflip("x", p=2.0)


def test_what_moves_pixels_refuses_what_it_cannot_address() -> None:
    long = np.zeros((2, 33_000, 3), np.uint8)
    with pytest.raises(BadSampleError, match="33000×2"):
        run(ops.rotate("x", 10), long)
    near = np.zeros((2, 32_000, 3), np.uint8)
    assert run(ops.rotate("x", [90, 90]), near).shape == near.shape


@pytest.mark.parametrize(
    "source", [[[1, 0, 5], [0, 1, -3]], [[2, 0, 0], [0, 1, 0]], [[1, 0, 4e4], [0, 1, 0]]]
)
def test_whole_steps_move_pixels_exactly(source: list[list[float]]) -> None:
    value = np.random.default_rng(0).integers(0, 200, (20, 30, 3), dtype=np.uint8)
    moved = affine(value, np.array(source, np.float64), 255)
    for y, x in np.ndindex(20, 30):
        from_x, from_y = (int(row[0] * x + row[1] * y + row[2]) for row in source)
        inside = 0 <= from_x < 30 and 0 <= from_y < 20
        assert (moved[y, x] == (value[from_y, from_x] if inside else 255)).all()
