"""What a failed test shared is made anew, for its second try and for the tests after it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_FILE = """
import pytest

made = []

@pytest.fixture(scope="session")
def lasting():
    made.append("session")
    return made

@pytest.fixture(scope="module")
def shared(lasting):
    made.append("module")
    yield []
    made.append("ended")

@pytest.fixture
def own(shared):
    yield
    if WHERE == "teardown":
        assert not shared.count("broken")

def test_first(shared):
    assert made == ["session", "module"]

def test_breaks(own, shared):
    tries = made.count("ended") + 1
    if tries <= FAILURES:
        shared.append("broken")
    if WHERE == "call":
        assert shared == []

def test_after(shared):
    assert shared == []
    assert made == ["session", "module"] + ["ended", "module"] * FAILURES
"""


@pytest.mark.parametrize(
    ("where", "failures", "outcome"),
    [
        ("call", 1, "3 passed, 1 rerun"),
        ("call", 2, "1 failed, 2 passed, 1 rerun"),
        ("teardown", 1, "4 passed, 1 rerun"),  # a call that passed is counted with each try
        ("teardown", 2, "4 passed, 1 error, 1 rerun"),
    ],
)
def test_what_a_failed_test_shared_is_made_anew(
    tmp_path: Path, where: str, failures: int, outcome: str
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(f"WHERE, FAILURES = {where!r}, {failures}\n{_FILE}")
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.fresh_fixtures",
        "-p",
        "pytest_rerunfailures",
        "--reruns",
        "1",
    ]
    done = subprocess.run(
        [
            sys.executable,
            *words,
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            str(file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )
    assert done.stdout.splitlines()[-1].startswith(f"{outcome} in "), done.stdout + done.stderr
