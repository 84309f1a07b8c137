"""docs/ops.md says what the registry says; every op tells its users what it takes, gives and refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshd.transform import registry
from meshd.transform.parameters import Parameter, choice, pair, probability, whole
from meshsdk import ops as constructors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from typing import TYPE_CHECKING

from ops_page import PAGE, written

if TYPE_CHECKING:
    from meshd.transform.registry import OpDefinition

BUILTIN = [op for op in registry.latest() if not op.name.startswith("test_")]


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == written(page), "docs/ops.md is stale: run `make reference`"


@pytest.mark.parametrize("op", BUILTIN, ids=lambda op: op.name)
def test_every_op_explains_itself(op: OpDefinition) -> None:
    assert op.summary, "its class has no docstring"
    assert op.takes, "@operation(…, takes=…): the kind, dtype and shape of its input"
    assert op.gives, "@operation(…, gives=…): the kind, dtype and shape of its output"
    for parameter in op.parameters:
        assert parameter.kind, f"the parser of {parameter.name} has no docstring"
        assert "parser" not in parameter.kind


@pytest.mark.parametrize("op", BUILTIN, ids=lambda op: op.name)
def test_every_op_has_a_constructor_in_the_sdk(op: OpDefinition) -> None:
    assert callable(getattr(constructors, op.name, None))


def test_kinds_are_told_in_words() -> None:
    kinds = [
        Parameter("x", parse).kind for parse in (probability, whole(0, 3), choice("a", "b"), pair(-9, 9))
    ]
    assert kinds == [
        "a number in [0, 1]",
        "an integer in 0…3",
        'one of "a", "b"',
        "[lowest, highest] in -9…9, or x for [−x, x]",
    ]


def test_an_op_is_described_with_all_its_versions() -> None:
    found = registry.describe_op(registry.find("resize", "", ""))
    assert found["version"] in found["versions"]
    assert found["arguments"] == [
        {"name": "size", "kind": "the shorter side in pixels, or [height, width]", "required": True},
        {
            "name": "filter",
            "kind": 'one of "bilinear", "bicubic", "box", "nearest", "fast"',
            "required": False,
            "default": "bilinear",
        },
    ]
