"""Clocks: stamps rise whatever happens. Failpoints: off unless asked for."""

from __future__ import annotations

import errno

import pytest

from meshd.util import failpoints
from meshd.util.clock import SystemClock
from tests.support.manual_clock import ManualClock


def test_stamps_rise_even_when_the_clock_steps_back() -> None:
    clock = ManualClock()
    before = [clock.stamp() for _ in range(3)]
    clock.advance(-100)
    after = [clock.stamp() for _ in range(3)]
    assert before + after == sorted(set(before + after))


def test_the_system_clock_tells_one_time() -> None:
    clock = SystemClock()
    stamps = [clock.stamp() for _ in range(1000)]
    assert stamps == sorted(set(stamps))
    assert abs(clock.stamp() // 1_000_000 - clock.now_ms()) < 60_000
    assert clock.monotonic() <= clock.monotonic()


def test_a_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5_000_000)
    clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic()) == (1505, 1.505)


def test_failpoints_are_off() -> None:
    assert failpoints._points is None
    failpoints.hit("anything")


def test_an_error_comes_after_its_skips() -> None:
    failpoints.configure("a=error(28):after 2, b=error")
    try:
        failpoints.hit("a")
        failpoints.hit("a")
        failpoints.hit("other")
        with pytest.raises(OSError, match="failpoint a") as caught:
            failpoints.hit("a")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="failpoint b") as caught:
            failpoints.hit("b")
        assert caught.value.errno == errno.EIO
    finally:
        failpoints.configure("")


@pytest.mark.parametrize("text", ["a", "a=explode", "a=kill:after x", "=kill"])
def test_a_misspelt_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MESHD_FAILPOINTS"):
        failpoints.configure(text)
