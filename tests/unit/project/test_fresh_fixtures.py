"""What a failed test shared is made anew for the tests after it."""

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
    shared.append("broken")
    assert WHERE != "call"

def test_after(shared):
    assert shared == []
    assert made == ["session", "module", "ended", "module"]
"""


@pytest.mark.parametrize(
    ("where", "outcome"),
    [("call", "1 failed, 2 passed"), ("teardown", "3 passed, 1 error")],
)
def test_what_a_failed_test_shared_is_made_anew(tmp_path: Path, where: str, outcome: str) -> None:
    assert outcome_of(tmp_path, f"WHERE = {where!r}\n{_FILE}").startswith(f"{outcome} in ")


def outcome_of(tmp_path: Path, text: str) -> str:
    """The last line of pytest for a file of tests, with the plugin."""
    file = tmp_path / "test_some.py"
    file.write_text(text)
    words = ["-m", "pytest", "-q", "-W", "error", "-p", "tests.support.fresh_fixtures"]
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
    print(done.stdout, done.stderr)
    return done.stdout.splitlines()[-1]


# Without it a collection in between charges the cycle to the first test.
_UNCLOSED = """
import gc, socket

gc.disable()

class Cycle:
    def __init__(self):
        self.me, self.socket = self, socket.socket()

def test_breaks():
    one, cycle = socket.socket(), Cycle()
    assert not one

def test_after():
    gc.collect()
"""


def test_what_a_failed_test_had_open_fails_no_other(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, _UNCLOSED).startswith("1 failed, 1 passed in ")


def test_what_a_test_leaves_open_that_did_not_fail_is_told(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, _UNCLOSED.replace("not one", "one")).startswith("1 failed, 1 passed in ")
