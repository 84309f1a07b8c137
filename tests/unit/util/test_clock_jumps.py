"""What a node knows of jumps of its clock after it has restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshd.util.clock_jumps import ClockWatch
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86_400.0


@pytest.mark.parametrize("noticed", [False, True])
def test_a_restart_does_not_end_the_hour_after_a_jump(tmp_path: Path, *, noticed: bool) -> None:
    clock, file = ManualClock(), tmp_path / "clock"
    watch = ClockWatch(clock, file)
    assert not watch.is_settling()
    clock.jump(200 * DAY)
    assert not noticed or watch.is_settling()
    for _ in range(2):
        assert ClockWatch(clock, file).is_settling()
        clock.advance(1700)
    clock.advance(300)
    assert not ClockWatch(clock, file).is_settling()


def test_a_clock_that_was_set_back_settles_no_longer_than_an_hour(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "clock"
    watch = ClockWatch(clock, file)
    assert not watch.is_settling()
    clock.jump(200 * DAY)
    assert watch.is_settling()
    clock.jump(-200 * DAY)
    assert watch.is_settling()
    assert not ClockWatch(clock, file).is_settling()
    clock.advance(3600)
    assert not watch.is_settling()


def test_days_that_pass_are_no_jump_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "clock"
    watch = ClockWatch(clock, file)
    for _ in range(3):
        assert not watch.is_settling()
        clock.advance(2 * DAY)
    file.write_bytes(b"x")
    assert not ClockWatch(clock, file).is_settling()
    file.unlink()
    file.mkdir()
    assert not ClockWatch(clock, file).is_settling()
