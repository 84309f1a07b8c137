"""Declarations of user ops: read from functions, read back strictly, matched against fields."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from meshwire.plan.op_declarations import (
    BYTES,
    Argument,
    ValueType,
    checked_argument,
    checked_module,
    is_user_op,
    output_shape,
    parse_declaration,
    parse_declarations,
    split_name,
)
from meshwire.plan.op_decorator import MARK, array, image, op
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshwire.plan.op_declarations import OpDeclaration


@op(input=image("h", "w", 3), output=array("float32", ("h", "w", "depth")), seconds=2)
def lifted(
    pixels: Any, *, random: Any, depth: int = 2, gain: float = 1.0, tags: list[str], other: Any = None
) -> Any:
    """Pixels in `depth` layers.

    More text that is no summary.
    """
    return pixels


LIFTED: OpDeclaration = getattr(lifted, MARK)


def test_a_function_declares_its_arguments_by_its_signature() -> None:
    assert LIFTED.arguments == (
        Argument("depth", "int", False, 2),
        Argument("gain", "float", False, 1.0),
        Argument("tags", "list", True),
        Argument("other", "any", False, None),
    )
    assert LIFTED.random
    assert LIFTED.seconds == 2
    assert LIFTED.summary == "Pixels in `depth` layers."
    assert lifted("as it was", random=None, tags=[]) == "as it was"


def test_a_declaration_survives_its_document() -> None:
    assert parse_declaration(LIFTED.document()) == LIFTED
    assert parse_declarations([LIFTED.document()]) == {"lifted": LIFTED}


def test_signatures_that_say_too_little_are_refused() -> None:
    with pytest.raises(TypeError, match="write `\\*` before 'gain'"):

        @op(input=BYTES, output=BYTES)
        def positional(value: Any, gain: float = 1.0) -> Any: ...

    given: Any = {"a": image("h", "w", 3)}
    with pytest.raises(
        TypeError, match=r"input= is one type, .* not a dict; for several fields write inputs="
    ):
        op(input=given, output=BYTES)
    for several in ((image("h", "w", 3), BYTES), {"a": "image"}):
        wrong: Any = several
        with pytest.raises(
            TypeError, match="outputs= is a dictionary of types by the names of the parameters"
        ):
            op(inputs=given, outputs=wrong)
    untyped: Any = op
    for unnamed in ((lifted,), (BYTES, BYTES)):
        with pytest.raises(TypeError, match=r"types by name: write @op\(input=image"):
            untyped(*unnamed)
    with pytest.raises(TypeError, match=r"write @op\(input=image.*, or for several fields inputs="):
        op(input=BYTES)
    with pytest.raises(TypeError, match="first parameter"):

        @op(input=BYTES, output=BYTES)
        def keyword(*, gain: float = 1.0) -> Any: ...

    with pytest.raises(PlanError, match="not a JSON value"):

        @op(input=BYTES, output=BYTES)
        def odd(value: Any, *, table: Any = object()) -> Any: ...  # noqa: B008  refused: it is no JSON


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"name": "no name"}, "name"),
        ({"name": 7}, "name"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"memory": 1}, "memory"),
        ({"random": 1}, "random"),
        ({"summary": "x" * 201}, "summary"),
        ({"more": 1}, "more"),
        ({"input": "bytes"}, "input"),
        ({"input": {"kind": "image", "dtype": "float32", "shape": [1, 2, 3], "layout": "hwc"}}, "input"),
        ({"output": {"kind": "array", "dtype": "object", "shape": []}}, "output.dtype"),
        ({"output": {"kind": "array", "dtype": "float32"}}, "output"),
        ({"output": {"kind": "array", "dtype": "float32", "shape": ["nowhere"]}}, "output"),
        ({"output": {"kind": "array", "dtype": "float32", "shape": [-1]}}, "output.shape[0]"),
        ({"output": {"kind": "array", "dtype": "float32", "shape": [1] * 17}}, "output.shape"),
        ({"output": image(None, None, None).document()}, "output"),
        ({"arguments": [{"name": "a b"}]}, "arguments[0].name"),
        ({"arguments": [{"name": "a", "type": "blob"}]}, "arguments[0].type"),
        ({"arguments": [{"name": "a", "type": "bytes", "default": "x"}]}, "arguments[0].default"),
    ],
)
def test_what_is_wrong_with_a_declaration_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_declaration(LIFTED.document() | change)
    assert caught.value.path == place


def test_a_module_has_ops_each_under_one_name() -> None:
    wrongs: list[Any] = [[], {}, [LIFTED.document()] * 2, [LIFTED.document()] * 65]
    for wrong in wrongs:
        with pytest.raises(PlanError, match="ops"):
            parse_declarations(wrong)


def test_named_extents_are_the_inputs_or_an_arguments() -> None:
    assert output_shape(LIFTED, (4, None, 3), {"depth": 5}) == (4, None, 5)
    with pytest.raises(ValueError, match="axis 2 must have size 3, not 1"):
        output_shape(LIFTED, (4, None, 1), {"depth": 5})
    with pytest.raises(ValueError, match="axis 0 must have size 4, not a varying size"):
        output_shape(replace(LIFTED, input=array("uint8", (4, "w", "h"))), (None, 2, 2), {"depth": 5})
    with pytest.raises(ValueError, match="expected 3 axes, got 2"):
        output_shape(LIFTED, (4, 3), {"depth": 5})
    square = replace(LIFTED, input=array("uint8", ("h", "h")), output=array("uint8", ("h",)))
    assert output_shape(square, (4, 4), {"depth": 1}) == (4,)
    with pytest.raises(ValueError, match="axis 1 is 'h' and must have size 4, not 5"):
        output_shape(square, (4, 5), {"depth": 1})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("int", 3, True),
        ("int", -3, 3.5),
        ("float", 3.5, "x"),
        ("float", 3, False),
        ("bool", True, 1),
        ("str", "x", None),
        ("list", [1], "ab"),
        ("dict", {"a": 1}, []),
    ],
)
def test_arguments_are_checked_by_their_annotation(kind: str, good: Any, bad: Any) -> None:
    assert checked_argument(Argument("a", kind), good, "a") == good
    with pytest.raises(PlanError, match=f"a: expected {kind}"):
        checked_argument(Argument("a", kind), bad, "a")


def test_names() -> None:
    assert is_user_op("augment/brighten")
    assert not is_user_op("decode")
    assert split_name("augment/brighten") == ("augment", "brighten")
    assert checked_module("my-ops_2") == "my-ops_2"
    for wrong in ("", "A", "a/b", "../a", "a" * 41, "ä"):
        with pytest.raises(PlanError, match="not a valid module name"):
            checked_module(wrong)


def test_types_say_what_they_are() -> None:
    assert str(BYTES) == "bytes"
    assert str(image("h", None, 3)) == "image (hwc) uint8[h×?×3]"
    assert str(array()) == "array any[…]"
    assert ValueType("array", "float32", ()).document()["shape"] == []


def test_the_decorator_needs_numpy_and_nothing_else() -> None:
    code = (
        "import sys, meshsdk.userops; "
        "print(*{n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    ours = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize"))}
    assert ours <= {"numpy", "meshsdk", "meshwire"}
