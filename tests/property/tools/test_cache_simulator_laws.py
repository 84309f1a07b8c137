"""Laws of the simulated cache policies: capacity, and the bound that no policy exceeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.origins.eviction.policy_api import EvictionSettings
from meshtools.cache_simulator.comparison_policies import Lru, S3Fifo, Sieve
from meshtools.cache_simulator.simulator import POLICIES, TraceRead, simulate

if TYPE_CHECKING:
    from meshd.origins.eviction.policy_api import Item

ITEMS = st.tuples(st.sampled_from("ab"), st.sampled_from([f"{p}{n}" for p in "pqr" for n in range(6)]))
SIZES = st.integers(1, 40)


@given(st.lists(st.tuples(ITEMS, SIZES), max_size=200), st.sampled_from([Lru, Sieve, S3Fifo]))
def test_the_others_stay_within_too(
    reads: list[tuple[Item, int]], kind: type[Lru] | type[Sieve] | type[S3Fifo]
) -> None:
    cache = kind(100)
    for item, size in reads:
        assert cache.read_item(item, size) in (0, size)
        assert cache.used <= 100
        assert cache.read_item(item, size) == size


@settings(max_examples=30, deadline=None)
@given(st.lists(ITEMS, min_size=1, max_size=150), st.randoms(use_true_random=False))
def test_nobody_serves_more_bytes_than_the_bound(reads: list[Item], random: Any) -> None:
    sizes: dict[Item, int] = {}
    trace = [TraceRead(item, sizes.setdefault(item, random.randrange(1, 60))) for item in reads]
    everything = EvictionSettings(100, segment=20, high=1, low=1)
    bound = simulate("belady", trace, everything).bytes
    for name in POLICIES:
        assert simulate(name, trace, everything).bytes <= bound + 1e-12
