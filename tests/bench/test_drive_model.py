"""The drive as arithmetic: which request is next, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.drive_model import (
    KIB,
    Arm,
    Completed,
    Drive,
    DriveStats,
    Geometry,
    Issued,
    Request,
    replay,
)

GIB = 1 << 30
GEOMETRY = Geometry(8 * GIB)
HALF_A_TURN = 60 / 7200 / 2
requests = st.builds(Request, st.integers(0, 8 * GIB - 1), st.integers(1, 4 << 20))


def test_a_seek_costs_its_distance_and_half_a_turn() -> None:
    assert GEOMETRY.seek_s(0) == pytest.approx(0.0008 + HALF_A_TURN)
    assert GEOMETRY.seek_s(8 * GIB) == pytest.approx(0.015 + HALF_A_TURN)
    assert GEOMETRY.seek_s(-2 * GIB) == pytest.approx(0.0008 + 0.0142 / 2 + HALF_A_TURN)
    assert Geometry(GIB).seek_s(GIB // 4) == GEOMETRY.seek_s(2 * GIB)  # relative to the size


def test_bytes_cost_the_media_rate() -> None:
    arm = Arm(GEOMETRY)
    assert arm.serve(Request(0, 200_000_000)) == pytest.approx(1.0)
    assert arm.stats == DriveStats(reads=1, bytes=200_000_000, media_s=1.0)


def test_forward_gaps_pass_under_the_head_and_others_are_seeks() -> None:
    arm = Arm(GEOMETRY, head=GIB)
    arm.serve(Request(GIB + 512 * KIB, KIB))
    assert arm.stats.seeks == 0
    assert arm.stats.passing_s == pytest.approx(512 * KIB / 200e6)
    arm.serve(Request(arm.head + 512 * KIB + 1, KIB))
    assert arm.stats.seeks == 1
    arm.serve(Request(arm.head - 1, KIB))
    assert arm.stats.seeks == 2
    arm.serve(Request(arm.head, KIB))
    assert arm.stats.seeks == 2


def test_writes_cost_media_time_and_leave_the_head_where_it_is() -> None:
    arm = Arm(GEOMETRY)
    assert arm.serve(Request(GIB, 2_000_000, write=True)) == pytest.approx(0.01)
    assert arm.head == 0
    assert arm.stats == DriveStats(writes=1, written=2_000_000)


def test_the_drive_goes_on_upwards_and_then_begins_at_the_lowest() -> None:
    arm = Arm(GEOMETRY, head=100)
    low, near, far = (Request(offset, 1) for offset in (50, 150, 900))
    assert arm.choose([far, low, near]) is near
    assert arm.choose([far, low]) is far
    assert arm.choose([low]) is low


def test_the_drive_knows_only_as_many_as_its_queue_holds() -> None:
    arm = Arm(replace(GEOMETRY, queue_depth=2))
    waiting = [Request(offset, 1) for offset in (300, 200, 100)]
    assert arm.choose(waiting).offset == 200


@given(st.lists(requests, min_size=1, max_size=20), st.integers(0, 8 * GIB))
def test_what_is_chosen_waits_and_nothing_lies_between_it_and_the_head(
    waiting: list[Request], head: int
) -> None:
    chosen = Arm(GEOMETRY, head=head).choose(waiting)
    assert chosen in waiting
    above = [request for request in waiting if request.offset >= head]
    assert all(request.offset >= chosen.offset for request in above or waiting)


@given(st.lists(requests, max_size=20))
def test_costs_add_up(asked: list[Request]) -> None:
    arm = Arm(GEOMETRY)
    spent = sum(arm.serve(request) for request in asked)
    assert arm.stats.disk_s == pytest.approx(spent)
    assert arm.stats.bytes == sum(request.length for request in asked)
    assert arm.stats.reads == len(asked)
    assert arm.stats.seeks <= len(asked)
    assert arm.stats - DriveStats() == arm.stats
    assert arm.stats - arm.stats == DriveStats()


def test_a_seek_is_held_for_the_request_that_continues() -> None:
    """An idle drive takes the one at its head at once, another one half a millisecond later."""
    drive = Drive.idle(GEOMETRY)
    drive.submit(Request(GIB, KIB, arrived=1.0))
    assert drive.start_next(1.0004) is None
    drive.submit(Request(0, 2_000_000, arrived=1.0004))
    taken = drive.start_next(1.0004)
    assert taken is not None
    assert taken[0] == Request(0, 2_000_000, arrived=1.0004)
    assert taken[1] == pytest.approx(1.0104)
    assert drive.decides_at() == pytest.approx(1.0109)
    assert drive.start_next(1.0108) is None
    assert drive.start_next(1.011)
    assert drive.decides_at() is None


@given(st.lists(requests, min_size=1, max_size=30), st.floats(0, 0.05))
def test_a_busy_drive_is_never_ahead_of_its_costs(asked: list[Request], late: float) -> None:
    """However late it is asked for the next one, requests that all wait take the sum of their costs."""
    drive = Drive.idle(replace(GEOMETRY, patience_s=0.0))
    for request in asked:
        drive.submit(request)
    now = 0.0
    while (decides := drive.decides_at()) is not None:
        taken = drive.start_next(decides + late)
        assert taken
        assert taken[1] >= now
        now = taken[1]
    assert now == pytest.approx(drive.arm.stats.disk_s)


def log(*steps: int) -> list[Issued | Completed]:
    """A request of 4 KiB is issued at each offset, or completed there where the offset is negative."""
    return [Completed(-step) if step < 0 else Issued(Request(step, 4 * KIB)) for step in steps]


def test_reads_one_after_the_other_are_seeks_as_they_come() -> None:
    apart = [GIB, 3 * GIB, 2 * GIB, 4 * GIB]
    steps = [step for offset in apart for step in (offset, -offset)]
    assert replay(GEOMETRY, log(*steps)).seeks == 4


def test_reads_that_wait_together_are_taken_in_one_direction() -> None:
    """Two halves of a file are asked for the wrong way round, and are one run for the drive."""
    first, second = GIB, GIB + 4 * KIB
    assert replay(GEOMETRY, log(second, first, -second, -first)).seeks == 1
    assert replay(GEOMETRY, log(second, -second, first, -first)).seeks == 2
    assert replay(GEOMETRY, log(second, first)).seeks == 1


@given(st.lists(st.integers(1, 8 * GIB - 1), max_size=30, unique=True))
def test_every_read_of_a_log_is_counted_once(offsets: list[int]) -> None:
    together = replay(GEOMETRY, log(*offsets, *(-offset for offset in offsets)))
    alone = replay(GEOMETRY, log(*(step for offset in offsets for step in (offset, -offset))))
    assert together.reads == alone.reads == len(offsets)
    assert together.bytes == alone.bytes
