"""A disk whose damage is repaired each time is told once, if it comes again and again."""

from __future__ import annotations

import logging

import pytest

from meshd.cluster.repair.decaying_disks import INTERVAL, WHY, DecayingDisks
from meshd.store.disks.health_monitor import DiskState
from meshd.store.integrity.scrub import DiskDamage
from tests.support.manual_clock import ManualClock


def _run(hours: list[float], caplog: pytest.LogCaptureFixture, restarts: str = "") -> tuple[list[str], int]:
    """What is said of a disk after damage in these hours, and how many lines were logged. `restarts` before
    each: of the "coordinator", or of the "node", whose counters begin again."""
    clock = ManualClock()
    clock.advance(3600 - clock.now_ms() / 1e3 % 3600)
    began = clock.monotonic()
    disks, count = DecayingDisks(clock, {}), 0
    with caplog.at_level(logging.ERROR):
        for hour in hours:
            clock.advance(began + 3600 * hour - clock.monotonic() + INTERVAL)
            if restarts:
                disks = DecayingDisks(clock, disks.damage)
            if restarts == "node":
                disks.observe({})  # as it starts
                count = 0
                clock.advance(INTERVAL)
            count += 5
            assert disks.is_due()
            disks.observe({"/a": float(count), "/b": 0.0})
            assert not disks.is_due()
    states = disks.mark_decaying(
        [DiskState("/a", True), DiskState("/b", True), DiskState("/c", False, "lost")]
    )
    assert [state.why for state in states[1:]] == ["", "lost"]
    return [states[0].why], len(caplog.records)


def test_damage_in_three_hours_of_a_day_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert _run([0, 1, 5, 6, 7], caplog) == ([WHY], 1)


def test_one_burst_is_not(caplog: pytest.LogCaptureFixture) -> None:
    assert _run([0, 0.1, 0.2, 0.5], caplog) == ([""], 0)


def test_damage_days_apart_is_not(caplog: pytest.LogCaptureFixture) -> None:
    assert _run([0, 30, 60, 90], caplog) == ([""], 0)


@pytest.mark.parametrize("restarts", ["coordinator", "node"])
def test_damage_outlasts_restarts(restarts: str, caplog: pytest.LogCaptureFixture) -> None:
    assert _run([0, 0.1, 1], caplog, restarts) == ([""], 0)
    assert _run([0, 1, 2], caplog, restarts) == ([WHY], 1)


@pytest.mark.parametrize("between", [5.0, 0.0])
def test_restarts_without_damage_are_none(between: float, caplog: pytest.LogCaptureFixture) -> None:
    """`between`: what the metrics count after a restart, of the coordinator or of the node."""
    clock = ManualClock()
    disks = DecayingDisks(clock, {})
    disks.observe({"/a": 5.0})
    for _ in range(5):
        clock.advance(3600)
        disks = DecayingDisks(clock, disks.damage)
        disks.observe({"/a": between} if between else {})
    assert len(disks.damage["/a"].hours) == 1
    assert not caplog.records


def test_a_disk_that_decays_is_told_again_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    hour = clock.now_ms() // 3_600_000
    disks = DecayingDisks(clock, {"/a": DiskDamage(5.0, (hour - 2, hour - 1, hour))})
    disks.observe({})
    assert [state.why for state in disks.mark_decaying([DiskState("/a", True)])] == [WHY]
    assert len(caplog.records) == 1
    clock.advance(23 * 3600)
    disks.observe({})
    assert [state.why for state in disks.mark_decaying([DiskState("/a", True)])] == [""]
