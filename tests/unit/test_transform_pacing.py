"""How many rows a process takes: its share of what waits, and never next to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.transform.scheduling import MIN_SLICE_SECONDS, SliceSizer


def paced(seconds: float) -> SliceSizer:
    """Rows of the job take so long."""
    pace = SliceSizer()
    pace.took("job", 10, 10 * seconds)
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
    assert paced(0.001).portion("job", rows, waiting, processes) == taken


def test_rows_that_cost_little_stay_together() -> None:
    assert paced(1e-5).portion("job", 32, 32, 16) == 32
    assert paced(0.0).portion("job", 32, 32, 16) == 32
    assert paced(1.0).portion("job", 32, 32, 16) == 2
    assert SliceSizer().portion("unheard of", 32, 32, 4) == 8


def test_the_newest_rows_count_for_a_quarter() -> None:
    pace = paced(0.001)
    assert pace.portion("job", 32, 32, 32) == 6
    for _ in range(20):
        pace.took("job", 32, 32 * 0.01)
    assert pace.portion("job", 32, 32, 32) == 2
    pace.took("job", 0, 5.0)  # a slice of which nothing was done tells nothing
    assert pace.portion("job", 32, 32, 32) == 2


def test_jobs_that_are_long_gone_are_forgotten() -> None:
    pace = SliceSizer()
    for number in range(1500):
        pace.took(f"job {number}", 1, 1.0)
    assert repr(pace) == "<Pace of 1000 jobs>"
    assert pace.portion("job 1499", 32, 32, 32) == 2
    assert pace.portion("job 0", 32, 32, 32) == 4


@given(
    rows=st.integers(1, 32),
    more=st.integers(0, 2000),
    processes=st.integers(1, 64),
    seconds=st.floats(0, 1),
)
def test_it_is_some_of_them_and_what_is_left_is_worth_while(
    rows: int, more: int, processes: int, seconds: float
) -> None:
    taken = paced(seconds).portion("job", rows, rows + more, processes)
    assert 1 <= taken <= rows
    if taken < rows:
        assert taken % 2 == 0
        assert taken * processes >= rows + more
        assert min(taken, rows - taken) * seconds >= MIN_SLICE_SECONDS * 0.999
