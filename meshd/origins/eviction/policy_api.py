"""The interface of eviction policies: settings, decisions and evictions.

Law: a decision takes effect when it is returned: the policy counts the named items as dropped, moved or
admitted, and the store carries it out. A segment number names one data file. Invariant: kept bytes never
exceed the capacity; pinned, declared or dirty items are never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


Item = tuple[str, str]
"""Bucket and key; the key is of whatever is cached as one: an object or a chunk of one."""

SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """capacity: bytes that may be kept. A store holds up to one segment more while it moves what stays.
    segment: bytes at which a data file is sealed; a larger item has a file of its own.
    high, low: shares of the capacity. Above `high` something goes, until `low`.
    quotas: most bytes of a bucket; a bucket without one is bounded by the capacity only.
    hints: whether plans and working sets count. Pins always do.
    memory: the window in which reads are counted, in capacities of bytes read. Data read again later than
    that looks as if it were never read again.
    tracked: most items counted in a window; more end the window early.
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
    """One data file goes. `move`: what is appended to other segments first, with their numbers; `drop`: what
    goes with the file. `freed` and `moved` in bytes."""

    segment: int
    drop: tuple[Item, ...] = ()
    move: tuple[tuple[Item, int], ...] = ()
    freed: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """hit: it is kept already. segment: where to append it; None: it is not kept (serve it past the cache).
    evictions: to be done before it is appended, in order."""

    hit: bool = False
    segment: int | None = None
    evictions: tuple[Eviction, ...] = ()


class Policy(Protocol):
    """What the cache simulator needs of any policy."""

    @property
    def used(self) -> int:
        """Bytes kept."""

    @property
    def moved(self) -> int:
        """Bytes written again so far to keep them."""

    def read_item(self, item: Item, size: int) -> int:
        """Somebody reads an item; bytes of it that were kept: all (a hit), none, or (bounds only) some."""
