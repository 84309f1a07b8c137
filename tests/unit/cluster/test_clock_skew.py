"""Whose clock is wrong, of several that were looked at."""

from __future__ import annotations

import pytest

from meshd.cluster.clock_skew import REPORTED_SKEW, compare_clocks


@pytest.mark.parametrize(
    ("ahead", "agree", "told"),
    [
        ({"n1": 0.0}, True, {"n1": 0}),
        ({"n1": 0.0, "n2": 0.4, "n3": -0.4}, True, {"n1": 0, "n2": 0, "n3": 0}),
        ({"n1": 0.0, "n2": 400.2, "n3": 0.0}, True, {"n1": 0, "n2": 400, "n3": 0}),
        ({"n1": 0.0, "n2": 400.0, "n3": 401.0}, True, {"n1": -400, "n2": 0, "n3": 0}),  # the asked one's own
        ({"n1": 0.0, "n2": 400.0}, False, {"n1": 0, "n2": 400}),
        ({"n1": 0.0, "n2": 30.0}, True, {"n1": -15, "n2": 15}),
        ({"n1": 0.0, "n2": 400.0, "n3": -400.0}, False, {"n1": 0, "n2": 400, "n3": -400}),
        ({"n1": 0.0, "n2": 0.0, "n3": 90.0, "n4": 90.0}, False, {"n1": 0, "n2": 0, "n3": 90, "n4": 90}),
    ],
)
def test_most_are_right(ahead: dict[str, float], agree: bool, told: dict[str, int]) -> None:
    found = compare_clocks(ahead)
    assert (found.agree, found.ahead) == (agree, told)


def test_a_node_tells_of_its_own_clock_whatever_it_can_know() -> None:
    assert compare_clocks({"n1": 0.0, "n2": 400.0, "n3": 401.0}).skew_of("n1") == -400
    assert compare_clocks({"n1": 0.0, "n2": 400.0, "n3": 0.0}).skew_of("n1") == 0
    assert compare_clocks({"n1": 0.0, "n2": 400.0}).skew_of("n1") == -400
    assert compare_clocks({"n1": 0.0}).skew_of("n1") == 0


def test_a_clock_counts_as_another_from_a_minute_on() -> None:
    assert compare_clocks({"n1": 0.0, "n2": REPORTED_SKEW - 1}).agree
    assert not compare_clocks({"n1": 0.0, "n2": REPORTED_SKEW}).agree
