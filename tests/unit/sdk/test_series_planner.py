"""For how many steps a loader asks at once, and when its prefetch thread is woken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshsdk.loader.series_planner import MAX_SERIES, MAX_SERIES_BYTES, MemoryWait, SeriesPlanner
from meshwire.http_values.mesh_headers import (
    MAX_FRAME_SERIES,
    HandoverBlock,
    parse_frame_sizes,
    parse_handover_block,
    parse_series,
)

BUDGET = 256 << 20


def planner(answers: int = 10, *, enabled: bool = True) -> SeriesPlanner:
    made, step = SeriesPlanner(enabled=enabled), 0
    for _ in range(answers):
        asked = made.wanted(step, 10_000, 1000, BUDGET)
        made.record_response(asked, asked, 0.0001)
        step += asked
    return made


def test_it_grows_while_answers_are_complete() -> None:
    made, step, asked = SeriesPlanner(enabled=True), 0, []
    for _ in range(12):
        asked.append(made.wanted(step, 10_000, 1000, BUDGET))
        made.record_response(asked[-1], asked[-1], 0.0001)
        step += asked[-1]
    assert asked[:3] == [1, 3, 12]  # up to the next multiples of 4 and 16
    assert asked[-1] == MAX_SERIES
    assert step % MAX_SERIES == 0  # series begin at multiples of their length
    assert planner(enabled=False).wanted(0, 10_000, 1000, BUDGET) == 1


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 1 << 30), st.integers(1, 1 << 34))
def test_a_series_fits(step: int, left: int, size: int, budget: int) -> None:
    wanted = planner().wanted(step, left, size, budget)
    assert 1 <= wanted <= min(left, MAX_SERIES)
    assert wanted == 1 or wanted * size <= min(MAX_SERIES_BYTES, budget // 8)


def test_slow_frames_come_alone_and_a_failure_halves() -> None:
    slow = planner()
    slow.record_response(MAX_SERIES, MAX_SERIES, 2.0)
    assert slow.wanted(0, 100, 1000, BUDGET) == 1
    failed = planner()
    failed.record_failure(1)
    assert failed.wanted(0, 100, 1000, BUDGET) == MAX_SERIES
    failed.record_failure(MAX_SERIES)
    assert failed.wanted(0, 100, 1000, BUDGET) == 1
    for _ in range(8):
        failed.record_response(1, 1, 0.0)
    assert failed.wanted(0, 100, 1000, BUDGET) == MAX_SERIES // 2
    older = planner()
    older.record_response(2, 1, 0.0)
    for _ in range(8):
        older.record_response(1, 1, 0.0)
    assert older.wanted(0, 100, 1000, BUDGET) == 1


class _Waker:
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_the_thread_is_woken_when_enough_slots_returned_or_nothing_is_left() -> None:
    waker = _Waker()
    waiting = MemoryWait(waker)  # type: ignore[arg-type]  # what it uses of one
    waiting.slot_returned(1)
    waiting.frame_taken(last=True)
    assert waker.woken == 0
    waiting.slots = 3
    waiting.slot_returned(1)
    waiting.slot_returned(2)
    waiting.frame_taken(last=False)
    assert waker.woken == 0
    waiting.slot_returned(3)
    assert waker.woken == 1
    waiting.frame_taken(last=True)
    assert waker.woken == 2


@pytest.mark.parametrize(
    ("header", "count"),
    [(None, 1), ("1", 1), ("8", 8), ("0", 1), ("999", MAX_FRAME_SERIES), ("-1", 1), ("x", 1), ("9999", 1)],
)
def test_the_header_of_a_request(header: str | None, count: int) -> None:
    assert parse_series(header) == count


def test_the_header_of_a_response() -> None:
    assert parse_frame_sizes("10,20,30") == (10, 20, 30)
    for invalid in ("", "10", "10,", "10,x", "10;20", ",".join(["1"] * 33)):
        assert parse_frame_sizes(invalid) == ()


def test_the_header_of_a_block_of_frames() -> None:
    block = HandoverBlock(12288, (0, 8192))
    assert block.to_header() == "12288 0,8192"
    assert parse_handover_block(block.to_header()) == block
    assert parse_handover_block("4096 0") == HandoverBlock(4096, (0,))
    for invalid in ("", "1", "4096 ", "4096 0,", "4096 -1", "4096 0;1", f"4096 {','.join(['0'] * 33)}"):
        assert parse_handover_block(invalid) is None
