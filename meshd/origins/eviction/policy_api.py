"""The interface of eviction policies: settings, decisions and evictions.

A decision takes effect when it is returned: the policy counts the named items as dropped, moved or admitted,
and the store carries it out. A segment number names one data file. Cached bytes never exceed the capacity;
pinned, declared or dirty items are never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


Item = tuple[str, str]
"""Bucket and key; the key names the unit of caching: an object or a chunk of one."""

SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """Settings of an eviction policy.

    capacity: bytes that may be cached. A store uses up to one segment more while it moves items.
    segment: bytes at which a data file is sealed; a larger item has a file of its own.
    high, low: shares of the capacity. Above `high`, data is evicted down to `low`.
    quotas: maximum bytes of a bucket; a bucket without one is bounded only by the capacity.
    hints: whether plans and working sets count. Pins always do.
    memory: the window in which reads are counted, in capacities of bytes read. Data that is read again after
    more than that seems never to be read again.
    tracked: maximum items counted in a window; more items end the window early.
    """

    capacity: int
    segment: int = SEGMENT_BYTES
    high: float = 0.98
    low: float = 0.95
    quotas: Mapping[str, int] = field(default_factory=dict)
    hints: bool = True
    memory: int = 10
    tracked: int = 4_000_000

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.segment < 1 or self.memory < 1 or self.tracked < 1:
            raise ValueError("capacity, segment, memory and tracked must be at least 1")
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"watermarks must be 0 < low <= high <= 1, not {self.low} and {self.high}")
        if min(self.quotas.values(), default=0) < 0:
            raise ValueError("a quota cannot be negative")


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction of one data file. `move`: items that are first appended to other segments, with the
    segments' numbers. `drop`: items that are removed with the file. `freed` and `moved` are in bytes."""

    segment: int
    drop: tuple[Item, ...] = ()
    move: tuple[tuple[Item, int], ...] = ()
    freed: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one read. hit: the item is cached already. segment: where to append it; None: do not
    cache it, only serve it. evictions: to be carried out first, in order."""

    hit: bool = False
    segment: int | None = None
    evictions: tuple[Eviction, ...] = ()


class Policy(Protocol):
    """What the cache simulator needs of any policy."""

    @property
    def used(self) -> int:
        """Bytes in the cache."""

    @property
    def moved(self) -> int:
        """Bytes rewritten so far to keep items."""

    def read_item(self, item: Item, size: int) -> int:
        """Read an item; return how many of its bytes were cached: all (a hit), none, or (bounds only)
        some."""
