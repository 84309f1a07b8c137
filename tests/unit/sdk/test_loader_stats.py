"""Statistics of a window: the difference of two, and the figures that are logged."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as some

from meshsdk.loader_stats import LoaderStats, Meter, Stall, Tally


def stats(**more: object) -> LoaderStats:
    plain: dict[str, object] = {each.name: 0 for each in fields(LoaderStats)} | {"frames": {}}
    return LoaderStats(**(plain | more))  # type: ignore[arg-type]


def test_a_window_has_its_own_rates_and_shares() -> None:
    earlier = stats(samples=100, seconds=10.0, waited=9.0, steady=9.0, steady_waited=8.0, frames={"miss": 3})
    later = stats(
        samples=500,
        bytes=4000,
        seconds=20.0,
        waited=10.0,
        fetch=1.0,
        steady=19.0,
        steady_waited=9.0,
        retries=2,
        frames={"miss": 3, "hit": 4},
    )
    window = later - earlier
    assert (window.samples, window.seconds, window.samples_per_second) == (400, 10.0, 40.0)
    assert (window.wait_share, window.au, window.hits) == (0.1, 0.9, 4)
    assert window.frames == {"hit": 4}
    shown = window.scalars("train/")
    assert shown["train/samples_per_second"] == 40.0
    assert shown["train/bytes_per_second"] == 400.0
    assert (shown["train/wait_fetch"], shown["train/wait_network"]) == (0.1, 0.0)
    assert (shown["train/au"], shown["train/retries"]) == (0.9, 2.0)


def test_a_window_without_a_step_is_all_zeros() -> None:
    assert set((stats(samples=5) - stats(samples=5)).scalars().values()) == {0.0}


@given(some.lists(some.tuples(some.floats(0, 9), some.booleans(), some.integers(0, 9)), max_size=8))
def test_windows_add_up_to_the_whole(steps: list[tuple[float, bool, int]]) -> None:
    meter, whole = Meter(), []
    for waited, steady, size in steps:
        meter.seconds += waited
        meter.add_wait(waited, Stall(waited / 2, waited / 2), steady=steady)
        meter.absorb(Tally(retries=size, bytes=size, origins={"hit": size}))
        whole.append(meter.snapshot(None, 0))
    windows = [later - earlier for earlier, later in zip([stats(), *whole], whole, strict=False)]
    last = whole[-1] if whole else stats()
    assert sum(window.retries for window in windows) == last.retries
    assert abs(sum(window.waited for window in windows) - last.waited) < 1e-6
    assert sum(window.hits for window in windows) == last.hits
