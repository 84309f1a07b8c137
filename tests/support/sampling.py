"""Tests of which CI runs a sample: points of a larger space, and toy runs of benchmarks.

Law: `@pytest.mark.sampled(n)` gives a test its turn in one of `n` commits, and a commit every nth case of a
test with parameters; `points` gives it every nth point that one test looks at. A commit always has the same
sample. Outside CI every test is run.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK = "sampled"
T = TypeVar("T")


def chosen(test: str, case: int, parts: int, commit: str) -> bool:
    """Whether a commit has a case of this test in its sample. Without a commit all are."""
    return not commit or (zlib.crc32(test.encode()) + case + int(commit[:8], 16)) % parts == 0


def sample(items: list[pytest.Item], commit: str) -> list[pytest.Item]:
    """Take the tests out of `items` whose turn it is not, and return them."""
    left, cases = list[pytest.Item](), Counter[str]()
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if not chosen(test, cases[test], mark.args[0], commit):
                left.append(item)
            cases[test] += 1
    out = {id(item) for item in left}
    items[:] = [item for item in items if id(item) not in out]
    return left


def points(all_points: Sequence[T], parts: int, commit: str) -> Sequence[T]:
    """Those points of a sweep, of at least `parts`, that a commit has in its sample. Without a commit all."""
    return all_points[int(commit[:8], 16) % parts :: parts] if commit else all_points


@cache
def commit() -> str:
    """The commit that CI tests, in hexadecimal; "" outside CI, and where git does not say."""
    if not os.environ.get("CI"):
        return ""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=20
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
