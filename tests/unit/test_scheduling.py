"""The order in which files of tests are handed to processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scheduling

TESTS = Path(__file__).parents[1]


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
