"""How many rows a process takes: its share of what waits, and never next to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.render_queue import MIN_SLICE_SECONDS, SliceSizer


def paced(seconds: float) -> SliceSizer:
    """Rows of the job take so long."""
    pace = SliceSizer()
    pace.record_duration("job", 10, 10 * seconds)
    return pace


@pytest.mark.parametrize(
    ("rows", "waiting", "processes", "taken"),
    [
        (32, 1024, 2, 32),  # plenty waits: all of the slice
        (32, 64, 2, 32),
        (32, 32, 2, 16),  # the end: both end together
        (32, 32, 16, 6),  # five milliseconds' worth, and even
        (16, 16, 2, 8),
        (8, 8, 2, 8),  # half of it would be too little
        (32, 256, 16, 16),  # one batch on many cores
        (32, 32, 1, 32),
        (1, 1, 16, 1),
    ],
)
def test_a_process_takes_its_share(rows: int, waiting: int, processes: int, taken: int) -> None:
    assert paced(0.001).slice_rows("job", rows, waiting, processes) == taken


def test_rows_that_cost_little_stay_together() -> None:
    assert paced(1e-5).slice_rows("job", 32, 32, 16) == 32
    assert paced(0.0).slice_rows("job", 32, 32, 16) == 32
    assert paced(1.0).slice_rows("job", 32, 32, 16) == 2
    assert SliceSizer().slice_rows("unheard of", 32, 32, 4) == 8


def test_the_newest_rows_count_for_a_quarter() -> None:
    pace = paced(0.001)
    assert pace.slice_rows("job", 32, 32, 32) == 6
    for _ in range(20):
        pace.record_duration("job", 32, 32 * 0.01)
    assert pace.slice_rows("job", 32, 32, 32) == 2
    pace.record_duration("job", 0, 5.0)  # a slice of which nothing was done tells nothing
    assert pace.slice_rows("job", 32, 32, 32) == 2


def test_jobs_that_are_long_gone_are_forgotten() -> None:
    pace = SliceSizer()
    for number in range(1500):
        pace.record_duration(f"job {number}", 1, 1.0)
    assert repr(pace) == "<SliceSizer of 1000 jobs>"
    assert pace.slice_rows("job 1499", 32, 32, 32) == 2
    assert pace.slice_rows("job 0", 32, 32, 32) == 4


@given(
    rows=st.integers(1, 32),
    more=st.integers(0, 2000),
    processes=st.integers(1, 64),
    seconds=st.floats(0, 1),
)
def test_it_is_some_of_them_and_what_is_left_is_worth_while(
    rows: int, more: int, processes: int, seconds: float
) -> None:
    taken = paced(seconds).slice_rows("job", rows, rows + more, processes)
    assert 1 <= taken <= rows
    if taken < rows:
        assert taken % 2 == 0
        assert taken * processes >= rows + more
        assert min(taken, rows - taken) * seconds >= MIN_SLICE_SECONDS * 0.999
