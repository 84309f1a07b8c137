"""Compiled wheels of user ops, for real: what works, what their constructors may do, and what is refused."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import pytest

from meshd.transform.sandbox import restrictions
from meshd.transform.sandbox.sandbox_process import SandboxPolicy, SandboxProcess, UnusableModuleError
from meshwire.plan.module_bundle import SharedObject, join_bundle, split_bundle
from tests.support.native_wheels import BASE, LIBRARY, MODULE, build_files, join_wheel, wheel_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not restrictions.landlock_version(), reason="this kernel has no Landlock")

SOURCE = b"""
import os
import tiny
from meshsdk.userops import BYTES, op

@op(input=BYTES, output=BYTES)
def told(data):
    try:
        open("/etc/passwd")
        opened = True
    except OSError:
        opened = False
    return repr((tiny.twice(20), tiny.constructed(), opened, tiny._core.__file__)).encode()

@op(input=BYTES, output=BYTES)
def descriptors(data):
    kept = []
    try:
        while len(kept) < 1000:
            kept.append(os.dup(0))
    except OSError:
        pass
    return str(len(kept)).encode()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return build_files(tmp_path_factory.mktemp("tiny"))


def objects_of(name: str, files: Mapping[str, bytes]) -> tuple[SharedObject, ...]:
    return tuple(SharedObject(name, file, len(data)) for file, data in files.items() if ".so" in file)


def start(
    wheel: bytes,
    objects: Sequence[SharedObject],
    policy: SandboxPolicy | None = None,
    name: str | None = None,
) -> SandboxProcess:
    wheels = {name or wheel_name(): wheel}
    return SandboxProcess("mine", SOURCE, 256 * MIB, policy or SandboxPolicy(), wheels, objects)


def call(process: SandboxProcess, op: str) -> bytes:
    made = process.run_op(op, {}, b"", key=7, random=False, seconds=20)
    assert isinstance(made, bytes)
    return made


def test_a_compiled_library_is_loaded_with_the_libraries_beside_it(files: dict[str, bytes]) -> None:
    name, wheel = wheel_name(), join_wheel(files)
    source, wheels, objects = split_bundle(join_bundle(SOURCE, {name: wheel}))
    assert (source, wheels, set(objects)) == (SOURCE, {name: wheel}, set(objects_of(name, files)))
    process = start(wheel, objects)
    try:
        result, (file, reason), opened, path = eval(call(process, "told"))
        assert (result, opened, path) == (41, False, f"{name}/{MODULE}")
        assert file == -1  # its constructor ran without rights, as the module does
        assert reason in (1, 13)
        # The objects do not use up the files that the op may open.
        assert int(call(process, "descriptors")) >= restrictions.OPEN_FILES - 16
    finally:
        process.close()


def changed(wheel: bytes, file: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as given, zipfile.ZipFile(out, "w") as made:
        for item in given.infolist():
            made.writestr(item, data if item.filename == file else given.read(item))
    return out.getvalue()


def test_what_is_not_as_told_is_refused(files: dict[str, bytes]) -> None:
    name, wheel = wheel_name(), join_wheel(files)
    objects = objects_of(name, files)
    smaller = [each._replace(size=each.size - 1) if each.file == MODULE else each for each in objects]
    larger = [each._replace(size=each.size + 1) if each.file == BASE else each for each in objects]
    for given, told, reason in (
        (changed(wheel, MODULE, files[MODULE][:-1] + b"x"), objects, "does not have the hash"),
        (changed(wheel, LIBRARY, bytes(64 * MIB)), objects, "more than the .* bytes that were told"),
        (wheel, smaller, "more than the"),
        (wheel, larger, "not the .* that were told"),
        (wheel, [each for each in objects if each.file != MODULE], "pushed without its size"),
        (join_wheel(files, recorded={}), objects, "does not have the hash"),
        (changed(wheel, "tiny-1.0.dist-info/RECORD", b'"'), objects, "hash|RECORD"),
        (join_wheel({**files, MODULE: b"/etc/passwd"}), objects, "not the"),
    ):
        with pytest.raises(UnusableModuleError, match=reason):
            start(given, told).close()


def test_a_link_or_garbage_in_place_of_an_object_is_no_library(files: dict[str, bytes]) -> None:
    linked = {**files, MODULE: b"/usr/lib/libc.so"}
    item = zipfile.ZipInfo(MODULE)
    item.external_attr = 0o120777 << 16  # a symbolic link, to whoever unpacks it
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(join_wheel(linked))) as given, zipfile.ZipFile(out, "w") as made:
        for each in given.infolist():
            made.writestr(item if each.filename == MODULE else each, given.read(each))
    with pytest.raises(UnusableModuleError, match="ImportError"):
        start(out.getvalue(), objects_of(wheel_name(), linked)).close()


def test_a_node_without_landlock_refuses_compiled_code(files: dict[str, bytes]) -> None:
    with pytest.raises(UnusableModuleError, match="has Landlock"):
        start(join_wheel(files), objects_of(wheel_name(), files), SandboxPolicy(sealed=True)).close()


def test_a_wheel_for_another_node_is_refused_with_the_tags(files: dict[str, bytes]) -> None:
    other = "tiny-1.0-cp39-cp39-win_amd64.whl"
    with pytest.raises(UnusableModuleError, match="is not for this node, which has cp3"):
        start(join_wheel(files), objects_of(other, files), name=other).close()
