"""A trace replayed on policies: how many reads, and how many bytes, each would have served.

Law: every policy sees the same reads and has the same capacity; a hit is a whole item. `warm` leaves out
reads of what nobody has read before, which no cache could serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.cache.policies.belady import Belady
from meshd.cache.policies.interface import SEGMENT_BYTES
from meshd.cache.policies.lru import Lru
from meshd.cache.policies.s3fifo import S3Fifo
from meshd.cache.policies.segmented import Segmented
from meshd.cache.policies.sieve import Sieve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.cache.policies.interface import Item, Policy, Settings
    from meshd.cache.traces import Read

_SEGMENTS = 64
_PLAN = "trace"

PLANNED, BOUND = "segments+plan", "belady"


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy made of a trace. `warm` ratios are of the reads, or bytes, that could hit."""

    policy: str
    objects: float
    bytes: float
    warm_objects: float
    warm_bytes: float
    moved: int
    evictions: int


def footprint(trace: Sequence[Read]) -> int:
    """Bytes of all its items, each at its largest."""
    sizes: dict[Item, int] = {}
    for read in trace:
        sizes[read.item] = max(read.size, sizes.get(read.item, 0))
    return sum(sizes.values())


def segment_of(capacity: int) -> int:
    """A store's, or what makes some dozens of them in a small cache."""
    return max(1, min(SEGMENT_BYTES, capacity // _SEGMENTS))


def simulate(name: str, trace: Sequence[Read], settings: Settings) -> Result:
    """Raises KeyError for a policy that is not one of POLICIES."""
    policy = POLICIES[name](settings, trace)
    steps = policy if name == PLANNED and isinstance(policy, Segmented) else None
    seen: set[Item] = set()
    hits = hit_bytes = warm = warm_bytes = total = 0
    for position, read in enumerate(trace, 1):
        if steps is not None:
            steps.advance(_PLAN, position)  # it is asked for the use after this one
        got = policy.read(read.item, read.size)
        total += read.size
        hits += got == read.size
        hit_bytes += got
        if read.item in seen:
            warm += 1
            warm_bytes += read.size
        seen.add(read.item)
    return Result(
        name,
        hits / len(trace),
        hit_bytes / total,
        hits / max(warm, 1),
        hit_bytes / max(warm_bytes, 1),
        policy.moved,
        policy.evictions if isinstance(policy, Segmented) else 0,
    )


def _planned(settings: Settings, trace: Sequence[Read]) -> Segmented:
    policy = Segmented(settings)
    policy.plan(_PLAN, (read.item for read in trace))
    return policy


POLICIES: dict[str, Callable[[Settings, Sequence[Read]], Policy]] = {
    "segments": lambda settings, _: Segmented(settings),
    PLANNED: _planned,
    "lru": lambda settings, _: Lru(settings.capacity),
    "s3-fifo": lambda settings, _: S3Fifo(settings.capacity),
    "sieve": lambda settings, _: Sieve(settings.capacity),
    BOUND: lambda settings, trace: Belady(settings.capacity, (read.item for read in trace)),
}
