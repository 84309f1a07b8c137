"""Ops over several fields: read, told back, compiled; what does not fit together is named."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from meshd.transform.compiler import compile_program, complete_spec
from meshd.transform.errors import BadSampleError
from meshd.transform.messages import OpStats
from meshd.transform.multi_field_ops import RowInputs
from meshwire.plan.op_declarations import parse_declaration
from meshwire.plan.op_decorator import MARK, array, image, op
from meshwire.plan.plan_spec import canonical_spec, parse_spec, spec_document
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshd.transform.compiler import Program

SHARED = {
    "op": "random_resized_crop",
    "fields": ["image", "mask"],
    "args": {"size": 32},
    "each": {"mask": {"filter": "nearest"}},
}


def grey(height: int = 60, width: int = 80) -> Image.Image:
    """A picture of large steps."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(((y // 10 * 7 + x // 10) % 5 * 60).astype(np.uint8))


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def program(*more: dict[str, Any]) -> Program:
    ops = [{"op": "decode", "field": "image"}, {"op": "decode", "field": "mask", "args": {"mode": "gray"}}]
    spec = complete_spec(parse_spec({"seed": 5, "ops": [*ops, *more]}), lambda field: b"")
    return compile_program(spec, ["image", "mask"])


def rendered(made: Program, image: bytes, mask: bytes, position: int = 3) -> dict[str, Any]:
    draw = made.draw(0, position)
    begun = RowInputs(made.joints, (((0,),), ((1,),)), lambda pieces: (image, mask)[pieces[0][0]], draw, IDLE)
    values = {}
    for number, (name, chain) in enumerate(made.chains.items()):
        value, done = begun.begin_chain(number, chain)
        values[name] = chain.render(value, draw, done=done)
    return values


IDLE = OpStats(lambda: 0.0)


# --- documents -------------------------------------------------------------------------------------------


def test_a_plan_over_several_fields_survives_its_document() -> None:
    spec = parse_spec({"ops": [SHARED]})
    (found,) = spec.ops
    assert (found.field, found.fields, found.all_fields) == ("image", ("image", "mask"), ("image", "mask"))
    assert parse_spec(spec_document(spec)) == spec
    assert found.for_field("mask").args == {"size": 32, "filter": "nearest"}
    assert found.for_field("image").args == {"size": 32}
    assert b'"fields":["image","mask"]' in canonical_spec(spec)


def test_an_op_of_one_field_is_spelled_as_before() -> None:
    assert b"fields" not in canonical_spec(parse_spec({"ops": [{"op": "decode", "field": "image"}]}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"field": "image"}, "not both"),
        ({"fields": ["image"]}, "2…16 fields"),
        ({"fields": ["image", "image"]}, "appears twice"),
        ({"fields": ["image", 3]}, r"fields\[1\]"),
        ({"each": {"maks": {}}}, "does not apply to 'maks'; did you mean 'mask'"),
        ({"each": {"mask": 3}}, "expected an object"),
        ({"each": []}, "by field"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_spec({"ops": [SHARED | given]})
    with pytest.raises(PlanError, match="only an op over several"):
        parse_spec({"ops": [{"op": "decode", "field": "image", "each": {}}]})


# --- one op done to each ---------------------------------------------------------------------------------


def test_a_mask_stays_over_its_image() -> None:
    """Whatever is drawn: the picture is its own mask."""
    made = program(
        SHARED,
        {"op": "hflip", "fields": ["image", "mask"]},
        {"op": "random_crop", "fields": ["image", "mask"], "args": {"size": 24}},
    )
    seen = set()
    for position in range(20):
        got = rendered(made, png(grey()), png(grey()), position)
        assert got["image"].shape == (24, 24, 3)
        assert set(np.unique(got["mask"])) <= {0, 60, 120, 180, 240}
        inside = np.abs(got["image"][:, :, :1].astype(int) - got["mask"]) < 40  # but for blurred edges
        assert inside.mean() > 0.8
        seen.add(got["mask"].tobytes())
    assert len(seen) > 15


def test_drawn_alone_they_part() -> None:
    alone = [{**{key: SHARED[key] for key in ("op", "args")}, "field": name} for name in ("image", "mask")]
    apart = 0
    for position in range(10):
        got = rendered(program(*alone), png(grey()), png(grey()), position)
        apart += (np.abs(got["image"][:, :, :1].astype(int) - got["mask"]) < 40).mean() < 0.8
    assert apart >= 5


def test_the_first_field_is_drawn_for_as_if_it_were_alone() -> None:
    alone = program({"op": "random_resized_crop", "field": "image", "args": {"size": 32}})
    np.testing.assert_array_equal(
        rendered(program(SHARED), png(grey()), png(grey()))["image"],
        rendered(alone, png(grey()), png(grey()))["image"],
    )


def test_fields_that_differ_in_size_make_a_bad_sample() -> None:
    with pytest.raises(BadSampleError, match="'image' and 'mask' differ in size"):
        rendered(program(SHARED), png(grey()), png(grey(30, 40)))


@pytest.mark.parametrize(
    ("op", "path", "message"),
    [
        ({"op": "hflip", "fields": ["image", "label"]}, "ops[2].fields", "no field 'label'"),
        ({"op": "mixup", "fields": ["image", "mask"]}, "ops[2].fields", "mixes one field"),
        (SHARED | {"each": {"mask": {"filter": "worst"}}}, "ops[2].args.filter", "bilinear"),
    ],
)
def test_what_cannot_be_shared_is_refused(op: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        program(op)
    assert caught.value.path == path


def test_nearest_makes_no_new_values() -> None:
    small = {"op": "resize", "field": "mask", "args": {"size": [17, 23], "filter": "nearest"}}
    got = rendered(program(small), png(grey()), png(grey()))["mask"]
    assert got.shape == (17, 23, 1)
    assert set(np.unique(got)) <= {0, 60, 120, 180, 240}
    blurred = rendered(program(small | {"args": {"size": [17, 23]}}), png(grey()), png(grey()))["mask"]
    assert not set(np.unique(blurred)) <= {0, 60, 120, 180, 240}


# --- declarations ----------------------------------------------------------------------------------------


@op(
    inputs={"picture": image("h", "w", 3), "mask": image("h", "w", 1)},
    outputs={"mask": array("float32", ("h", "w", "layers"))},
)
def layered(picture: Any, mask: Any, *, layers: int = 2) -> Any:
    """Both at once."""
    return {"mask": mask}


def test_an_op_over_several_fields_declares_them_by_name() -> None:
    declared = getattr(layered, MARK)
    assert [name for name, _ in declared.inputs] == ["picture", "mask"]
    assert parse_declaration(declared.document()) == declared
    assert declared.input_signature == "picture: image (hwc) uint8[h×w×3], mask: image (hwc) uint8[h×w×1]"
    assert declared.output_signature == "mask: array float32[h×w×layers]"


def test_what_a_declaration_says_must_fit_together() -> None:
    two = {"a": image(), "b": image()}
    with pytest.raises(TypeError, match=r"write @op\(input=.*, output=.*inputs=.* and outputs="):
        op(input=image(), outputs=two)

    def given(a: Any, b: Any) -> Any:
        return {"a": a}

    with pytest.raises(TypeError, match="its first parameters must be its inputs: b, a"):
        op(inputs={"b": image(), "a": image()}, outputs=two)(given)
    with pytest.raises(PlanError, match="must replace an input"):
        op(inputs=two, outputs={"c": image(1, 1)})(given)
    with pytest.raises(PlanError, match="must be an extent of the input"):
        op(inputs=two, outputs={"a": image("h", 1)})(given)
    with pytest.raises(PlanError, match="2…16 values"):
        op(inputs={"a": image()}, outputs={"a": image(1, 1)})(_one)


def _one(a: Any) -> Any:
    return {"a": a}
