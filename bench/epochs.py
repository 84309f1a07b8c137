"""The row of what a cache keeps: epochs over more data than fits, replayed on the policies.

Law: no clock in it; the same trace gives the same figures on every machine. `warm` leaves out first reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.results import Figure
from meshd.origins.eviction.policy_api import EvictionSettings
from meshtools.cache_simulator.simulator import (
    BOUND,
    PLANNED,
    default_segment,
    epoch_trace,
    footprint,
    simulate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.rows import Scale

NAME: Final = "epochs"
TITLE: Final = "Hit ratios, a cache of 0.3 of the data"
OURS, LEAST, OF_BOUND = "segments", 0.29, 0.95
CONTENDERS: Final = (OURS, PLANNED, "lru", "s3-fifo", "sieve", BOUND)
_SHARE, _EPOCHS = 0.3, 20


def measure(scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Shuffled epochs, and epochs in one order."""
    shuffled, ordered = (
        epoch_trace(_EPOCHS, scale.cached_items, 100 << 10, shuffled=each) for each in (True, False)
    )
    capacity = int(_SHARE * footprint(shuffled))
    settings = EvictionSettings(capacity, default_segment(capacity))
    for name in CONTENDERS:
        say(f"{NAME}: {name}")
        mixed, same = (simulate(name, trace, settings) for trace in (shuffled, ordered))
        metrics = {"hits": mixed.bytes, "warm": mixed.warm_bytes, "ordered": same.warm_bytes}
        yield Figure(name, 0, metrics)
