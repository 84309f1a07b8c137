"""A module with its wheels as one body: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.sandbox.user_op_definitions import encode_module, parse_module
from meshwire.plan.module_bundle import join_bundle, split_bundle
from meshwire.plan.op_declarations import BYTES, OpDeclaration
from meshwire.strict_json import PlanError

WHEEL = "einops-0.8.1-py3-none-any.whl"


@given(
    st.binary(), st.dictionaries(st.sampled_from([WHEEL, "a_b-1.0.post1-py2.py3-none-any.whl"]), st.binary())
)
def test_source_and_wheels_come_back(source: bytes, wheels: dict[str, bytes]) -> None:
    assert split_bundle(join_bundle(source, wheels)) == (source, wheels)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h5py-3.16.0-cp311-cp311-manylinux_2_28_x86_64.whl", "compiled code"),
        ("numpy-2.0-py3-none-any.whl", "node's own"),
        ("../x-1.0-py3-none-any.whl", "compiled code"),
    ],
)
def test_other_wheels_are_refused(name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        join_bundle(b"", {name: b""})


@given(st.binary())
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(PlanError):
        split_bundle(body)


def test_a_body_that_does_not_add_up_is_refused() -> None:
    body = join_bundle(b"source", {WHEEL: b"wheel"})
    for wrong in (body[:-1], body + b"x", body.replace(b'"source": 6', b'"source": -6')):
        with pytest.raises(PlanError):
            split_bundle(wrong)


def test_a_modules_document_keeps_its_wheels_and_is_as_before_without() -> None:
    ops = {"f": OpDeclaration("f", BYTES, BYTES)}
    found = parse_module("m", encode_module("x = 1", ops, {WHEEL: b"\x00\xff"}))
    assert (found.source, found.wheels) == (b"x = 1", {WHEEL: b"\x00\xff"})
    assert b"wheels" not in encode_module("x = 1", ops)
