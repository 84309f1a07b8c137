"""The table of modules, and who may change it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from meshd.auth.authorizer import Authorizer
from meshd.auth.identity import Identity
from meshd.auth.required_actions import RequiredAction
from meshd.batches.user_module_registry import MAX_BUILDS, MAX_DRAFTS, _with_build
from meshd.control.user_modules import Build, ModuleTable, PushedModule
from meshd.core.api_errors import BatchError
from meshd.transform.assets import Asset
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshd.transform.op_types import BYTES as BYTES_FIELD
from meshd.transform.op_types import FieldType, image
from meshd.transform.sandbox.user_op_definitions import UserModuleCache, encode_module, parse_module
from meshwire.errors import S3Error
from meshwire.iam import PolicyError, parse_policy
from meshwire.plan.op_declarations import parse_declarations
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl


def build(number: int, *, draft: bool = False) -> Build:
    return Build(f"sha256:{number:064x}", f"{number:064x}", number, "ann", ("f",), draft)


def test_two_who_push_at_once_both_count() -> None:
    async def main() -> PushedModule | None:
        control = MemoryControl(ManualClock())
        tables = [ModuleTable(control) for _ in range(5)]
        pushes = [
            table.update_module("mine", partial(_with_build, build=build(number)))
            for number, table in enumerate(tables)
        ]
        await asyncio.gather(*pushes)
        return tables[0].get("mine")

    found = asyncio.run(main())
    assert found is not None
    assert {item.version for item in found.builds} == {build(number).version for number in range(5)}


def test_a_module_without_builds_is_gone() -> None:
    async def main() -> None:
        table = ModuleTable(MemoryControl(ManualClock()))
        await table.update_module("mine", lambda present: _with_build(present, build(1)))
        await table.update_module("mine", lambda present: replace_builds(present))
        assert table.get("mine") is None
        assert table.list_all() == {}

    def replace_builds(present: PushedModule) -> PushedModule:
        return PushedModule(present.name)

    asyncio.run(main())


def test_the_latest_is_what_was_pushed_last_and_is_no_draft() -> None:
    module = PushedModule("mine")
    for item in (build(1), build(2), build(3, draft=True)):
        module = _with_build(module, item)
    assert module.latest == build(2)
    assert _with_build(module, build(2)) == module
    assert _with_build(module, build(1)).latest == build(1)
    assert _with_build(module, build(3)).latest == build(3)  # a draft becomes a build by being pushed
    assert _with_build(module, build(1, draft=True)) == module  # and a build is no draft again
    assert PushedModule("mine", (build(1, draft=True),)).latest is None


def test_drafts_make_room_and_builds_do_not() -> None:
    module = PushedModule("mine")
    for number in range(MAX_DRAFTS + 3):
        module = _with_build(module, build(number, draft=True))
    assert [item.pushed_ms for item in module.builds] == list(range(3, MAX_DRAFTS + 3))
    for number in range(100, 100 + MAX_BUILDS):
        module = _with_build(module, build(number))
    with pytest.raises(BatchError, match="100 builds") as caught:
        _with_build(module, build(999))
    assert "mesh op rm mine --version" in caught.value.help


# --- who may -----------------------------------------------------------------------------------------------


def policy(effect: str, action: str, resource: str) -> Any:
    statement = {"Effect": effect, "Action": action, "Resource": resource}
    return parse_policy(json.dumps({"Version": "2012-10-17", "Statement": statement}), kind="identity")


PUSH = RequiredAction("mesh:PushOp", arn="arn:aws:mesh:::op/mine")


def may(identity: Identity, need: RequiredAction = PUSH) -> bool:
    access = Authorizer(object(), ManualClock())  # type: ignore[arg-type]  # no bucket is asked for
    try:
        access.require_action(identity, need)
    except S3Error:
        return False
    return True


def test_nobody_but_root_pushes_unless_a_policy_allows_it() -> None:
    ann = Identity("ann", "Ann", "KEY")
    assert may(Identity("root", "root", "KEY", root=True))
    assert not may(ann)
    assert not may(Identity("", "anonymous", ""))
    assert may(replace(ann, policies=(policy("Allow", "mesh:PushOp", "arn:aws:mesh:::op/mine"),)))
    assert may(replace(ann, policies=(policy("Allow", "mesh:*", "*"),)))
    assert may(replace(ann, policies=(policy("Allow", "*", "*"),)))
    assert not may(replace(ann, policies=(policy("Allow", "mesh:PushOp", "arn:aws:mesh:::op/other"),)))
    assert not may(replace(ann, policies=(policy("Allow", "mesh:DeleteOp", "*"),)))
    assert not may(replace(ann, policies=(policy("Allow", "s3:*", "*"),)))
    denied = (policy("Allow", "*", "*"), policy("Deny", "mesh:PushOp", "*"))
    assert not may(replace(ann, policies=denied))


def test_a_bound_key_of_roots_pushes_only_within_its_bounds() -> None:
    root = Identity("root", "root", "KEY", root=True)
    assert not may(root.with_bounds((policy("Allow", "s3:*", "*"),)))
    assert may(root.with_bounds((policy("Allow", "mesh:PushOp", "arn:aws:mesh:::op/m*"),)))


def test_an_action_that_is_none_is_refused_where_the_policy_is_written() -> None:
    with pytest.raises(PolicyError, match="did you mean 'mesh:PushOp'"):
        policy("Allow", "mesh:PushOps", "*")
    with pytest.raises(PolicyError, match="not an action on a bucket"):
        parse_policy(
            '{"Statement": {"Effect": "Allow", "Principal": "*", "Action": "mesh:PushOp", '
            '"Resource": "arn:aws:s3:::b"}}',
            kind="bucket",
            bucket="b",
        )


# --- definitions -------------------------------------------------------------------------------------------

DECLARED = parse_declarations(
    [
        {
            "name": "planes",
            "input": {"kind": "image", "dtype": "uint8", "shape": ["h", "w", 3], "layout": "hwc"},
            "output": {"kind": "array", "dtype": "float32", "shape": [3, "h", "size"]},
            "arguments": [{"name": "size", "type": "int", "default": 4}, {"name": "table", "type": "bytes"}],
            "summary": "Planes.",
        },
        {"name": "same", "input": {"kind": "array"}, "output": {"kind": "bytes"}},
    ]
)


def known() -> tuple[UserModuleCache, str]:
    data = encode_module("source", DECLARED)
    module = parse_module("mine", data)
    modules = UserModuleCache()
    modules.set_loader(lambda digest: Asset(digest, data))
    return modules, module.version


def test_a_definition_says_what_the_declaration_does() -> None:
    modules, version = known()
    found = modules.find_op("mine/planes", version, "ops[0]")
    assert (found.name, found.version, found.summary) == ("mine/planes", version, "Planes.")
    assert found.assets == ("table",)
    assert [(parameter.name, parameter.required) for parameter in found.parameters] == [
        ("size", False),
        ("table", True),
    ]
    assert str(found.takes) == "image (hwc) uint8[h×w×3]"


def test_types_are_inferred_from_the_declaration() -> None:
    modules, version = known()
    planes = modules.find_op("mine/planes", version, "").build(size=7, table=Asset("0" * 64, b""))
    assert planes.infer(image(5, None, 3)) == FieldType("array", "float32", (3, 5, 7))
    same = modules.find_op("mine/same", version, "").build()
    assert same.infer(image(5, None, 3)) == BYTES_FIELD
    assert same.infer(FieldType("label", "int64", ())) == BYTES_FIELD
    for wrong in (image(5, 5, 1), image(5, 5, 3, "chw"), BYTES_FIELD, FieldType("array", "uint8", (5, 5, 3))):
        with pytest.raises(ValueError, match=r"needs image \(hwc\) uint8\[h×w×3\], not"):
            planes.infer(wrong)


def test_what_is_not_there_is_named() -> None:
    modules, version = known()
    with pytest.raises(UnknownOpError, match="it has mine/planes, mine/same"):
        modules.find_op("mine/other", version, "ops[3]")
    with pytest.raises(UnknownBuildError, match=r"ops\[3\].version: .* is not a version"):
        modules.find_op("mine/planes", "1", "ops[3]")
    with pytest.raises(UnknownBuildError, match="push the same file again"):
        UserModuleCache().find_op("mine/planes", version, "")
    for data in (b"", b"[]", b"{}", b'{"format": 1, "ops": 1, "source": ""}', b"\xff"):
        modules = UserModuleCache()
        modules.set_loader(lambda digest, data=data: Asset(digest, data))  # type: ignore[misc]
        with pytest.raises(UnknownBuildError, match="is not a build of"):
            modules.find_op("mine/planes", version, "")
