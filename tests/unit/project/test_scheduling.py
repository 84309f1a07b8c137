"""The order in which files of tests are handed to processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import scheduling
from tests.support.interpreters import python

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("start", scheduling.LONGEST)
def test_every_name_is_of_a_file_that_is_there(start: str) -> None:
    assert list(TESTS.glob(f"{start}*"))


def test_what_takes_long_comes_first_and_the_rest_keeps_its_order() -> None:
    first, second = (f"tests/{start}.py::test" for start in scheduling.LONGEST[:2])
    short = ["tests/unit/test_b.py::test", "tests/unit/test_a.py::test"]
    assert sorted([*short, second, first], key=scheduling.place) == [first, second, *short]


def test_what_shares_a_control_plane_is_handed_out_together() -> None:
    assert scheduling.group("tests/kubernetes/test_a.py::test") == scheduling.group(
        "tests/kubernetes/test_b.py::x::y"
    )
    assert scheduling.group("tests/unit/test_a.py::test[::]") == "unit/test_a.py"


ENDING = """
import os

def test_passes():
    pass

def test_ends_its_process():
    with open("ended", "a") as file:
        file.write("x")
    os._exit(3)

def test_comes_after():
    pass
"""
PLUGIN = "from tests.conftest import pytest_xdist_make_scheduler\n"


def test_a_test_that_ends_its_process_fails_once_and_the_others_are_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ENDING)
    (tmp_path / "conftest.py").write_text(PLUGIN)
    command = [
        python(),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "xdist",
        "-n",
        "1",
        "--dist",
        "loadfile",
    ]
    # Other plugins are nothing to this, and loading them in each process takes longer than the run.
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=100
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "ended").read_text() == "x"
