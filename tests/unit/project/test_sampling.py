"""The sample of tests that CI takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import sampling

ROOT = Path(__file__).parents[3]

TESTS = [f"tests/test_a.py::test_{number}" for number in range(300)]
COMMITS = [f"{number * 0x9E3779B1 % (1 << 32):08x}0000" for number in range(1, 30)]


def test_every_test_has_its_turn_and_a_commit_has_its_part_of_them() -> None:
    taken = [{test for test in TESTS if sampling.chosen(test, 0, 3, commit)} for commit in COMMITS]
    assert set().union(*taken) == set(TESTS)
    assert all(60 < len(part) < 140 for part in taken)
    for commit in COMMITS:
        cases = [case for case in range(30) if sampling.chosen(TESTS[0], case, 3, commit)]
        assert len(cases) == 10


def test_without_a_commit_all_are_run() -> None:
    assert all(sampling.chosen(test, 0, 3, "") for test in TESTS)


def test_every_point_has_its_turn() -> None:
    commits = [f"{number:08x}" for number in range(3)]
    assert sorted(point for commit in commits for point in sampling.points(range(10), 3, commit)) == [
        *range(10)
    ]
    assert sampling.points(range(10), 3, "") == range(10)


SUITE = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", range(40))
def test_point(point):
    pass

def test_always():
    pass
"""


def test_what_is_not_in_the_sample_is_counted_as_deselected(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "21 passed, 20 deselected" in done.stdout, done.stdout
