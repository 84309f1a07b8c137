"""A module with its wheels as one body: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.sandbox.user_op_definitions import encode_module, parse_module
from meshwire.plan.module_bundle import MAX_OBJECT_BYTES, MAX_OBJECTS, join_bundle, split_bundle
from meshwire.plan.op_declarations import BYTES, OpDeclaration
from meshwire.strict_json import PlanError

WHEEL = "einops-0.8.1-py3-none-any.whl"


@given(
    st.binary(), st.dictionaries(st.sampled_from([WHEEL, "a_b-1.0.post1-py2.py3-none-any.whl"]), st.binary())
)
def test_source_and_wheels_come_back(source: bytes, wheels: dict[str, bytes]) -> None:
    assert split_bundle(join_bundle(source, wheels)) == (source, wheels, ())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h5py-3.16.0-cp311-cp311-manylinux_2_28_x86_64.whl", "is not a wheel"),
        ("numpy-2.0-cp311-cp311-linux_x86_64.whl", "node's own"),
        ("numpy-2.0-py3-none-any.whl", "node's own"),
        ("../x-1.0-py3-none-any.whl", "not the name of a wheel"),
        ("x.whl", "not the name of a wheel"),
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


NATIVE = "tiny-1.0-cp311-cp311-linux_x86_64.whl"


def native(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_the_objects_of_compiled_wheels_are_told_and_kept() -> None:
    wheel = native({"tiny/a.so": b"12345", "tiny.libs/libb.so.2.1": b"12", "tiny/a.py": b"", "x.so.txt": b""})
    source, wheels, objects = split_bundle(join_bundle(b"", {NATIVE: wheel, WHEEL: b""}))
    assert objects == ((NATIVE, "tiny/a.so", 5), (NATIVE, "tiny.libs/libb.so.2.1", 2))
    ops = {"f": OpDeclaration("f", BYTES, BYTES)}
    kept = parse_module("m", encode_module(source.decode(), ops, wheels, objects))
    assert (kept.wheels, kept.objects) == (wheels, objects)


@pytest.mark.parametrize(
    "file", ["../tiny.so", "/etc/tiny.so", "tiny/../../a.so", "a b.so", f"{'x' * 200}.so"]
)
def test_objects_with_strange_names_are_refused(file: str) -> None:
    with pytest.raises(PlanError, match="not a shared object"):
        join_bundle(b"", {NATIVE: native({file: b""})})


def test_objects_that_are_too_large_or_too_many_are_refused() -> None:
    bomb = native({"tiny/a.so": bytes(MAX_OBJECT_BYTES + 1)})
    assert len(bomb) < 1 << 20
    many = native({f"tiny/a{number}.so": b"" for number in range(MAX_OBJECTS + 1)})
    for wheel in (bomb, many):
        with pytest.raises(PlanError, match="at most 192 shared objects of 128 MiB"):
            join_bundle(b"", {NATIVE: wheel})


@pytest.mark.parametrize(
    "objects",
    [
        [[NATIVE, "tiny/a.so", -1]],
        [["other-1.0-cp311-cp311-linux_x86_64.whl", "tiny/a.so", 1]],
        [[NATIVE, "tiny/a.py", 1]],
        [[NATIVE, "../a.so", 1]],
        [[NATIVE, "tiny/a.so", 1], [NATIVE, "tiny/a.so", 1]],
        [[NATIVE, "tiny/a.so", 1 << 40]],
        [[NATIVE, "tiny/a.so"]],
        [[NATIVE, "tiny/a.so", "many"]],
        {"tiny": 1},
        7,
    ],
)
def test_what_a_client_tells_of_objects_is_checked(objects: Any) -> None:
    wheel = native({"tiny/a.so": b"1"})
    head, _, rest = join_bundle(b"", {NATIVE: wheel}).partition(b"\n")
    body = json.dumps(json.loads(head) | {"objects": objects}).encode() + b"\n" + rest
    with pytest.raises(PlanError):
        split_bundle(body)
