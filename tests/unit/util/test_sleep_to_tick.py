"""When the loops of a process wake up: at the same times, so that an idle process wakes up rarely."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshd.util.async_tasks import tick_delay

TICK = 250  # ms

times = st.integers(0, 1 << 40)


@given(times, st.integers(TICK, 10_000), times)
def test_sleeps_of_a_tick_and_more_end_at_one(now: int, wait: int, phase: int) -> None:
    delay = round(1000 * tick_delay(now, wait / 1000, phase))
    assert (now + delay - phase) % TICK == 0
    assert max(wait - TICK, wait / 2) <= delay < wait + TICK / 2 + 1
    if wait >= 2 * TICK:
        assert delay <= wait


@given(times, st.integers(0, TICK - 1), times)
def test_shorter_sleeps_are_never_prolonged(now: int, wait: int, phase: int) -> None:
    delay = round(1000 * tick_delay(now, wait / 1000, phase))
    assert wait / 2 <= delay <= wait


@given(times, times, st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.integers(0, 20))
def test_a_loop_that_wakes_up_late_returns_to_its_ticks(
    now: int, phase: int, seconds: float, late: int
) -> None:
    now += round(1000 * tick_delay(now, seconds, phase)) + late
    now += round(1000 * tick_delay(now, seconds, phase))
    assert (now - phase) % TICK == 0
