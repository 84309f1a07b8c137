"""Policy of the decoded cache: which prefix to keep, how much of it, and what is dropped first.

Law: pure functions of what was measured. The value of a table is the processor time that a byte of it saves
at each read; a table that is not read loses half of its value every HALF_LIFE seconds. A share of the samples
is kept, chosen by a hash of the sample number: it stays the same from epoch to epoch, so a cache that holds a
share p of the data saves a share p of the work, in every batch.

Limits: only samples that the node receives requests for count, so that the nodes of a mesh together keep what
their limits allow together. Bytes that are used or reserved count, not the sizes of files. A small part of
each limit stays unused, because a reservation is the mean size of an entry, and the actual entry may
be larger.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_SECONDS: Final = 40e-6
"""Assumed time of reading an entry, besides its bytes, until reads were measured."""
READ_RATE: Final = 3e9
"""Assumed bytes a second of reading and verifying entries in memory, until reads were measured."""
LEAST_GAIN: Final = 0.25
"""A prefix is kept if this share of its time is saved, at least."""
LEAST_SECONDS: Final = 60e-6
"""A prefix that costs less is not kept."""
HALF_LIFE: Final = 600.0
BETTER: Final = 2.0
"""A table gives way to one of at least so many times its value."""
_WEIGHT: Final = 1 / 64
_MASK: Final = (1 << 64) - 1


class Mean(msgspec.Struct):
    """A moving mean; the first values count fully."""

    value: float = 0.0
    count: int = 0

    def add(self, total: float, count: int) -> None:
        """Add `count` values that make up `total`."""
        if count:
            self.count += count
            weight = min(1.0, max(count / self.count, count * _WEIGHT))
            self.value += (total / count - self.value) * weight


class Candidate(msgspec.Struct):
    """A possible prefix of a field, as measured: totals of `calls` samples."""

    steps: int
    variant: int
    digest: str
    calls: int = 0
    seconds: float = 0.0
    size: int = 0
    source: int = 0

    @property
    def cost(self) -> float:
        """Seconds of computing the prefix of one sample."""
        return self.seconds / self.calls if self.calls else 0.0

    @property
    def bytes(self) -> float:
        """Bytes of one result."""
        return self.size / self.calls if self.calls else 0.0

    @property
    def source_bytes(self) -> float:
        """Bytes of one file."""
        return self.source / self.calls if self.calls else 0.0


def expected_read(size: float, disk_rate: float = math.inf) -> float:
    """Return the seconds that reading an entry of `size` bytes takes: in memory, and of a disk that gives
    `disk_rate` bytes a second.
    """
    return READ_SECONDS + size / READ_RATE + size / disk_rate


def gain(cost: float, size: float, disk_rate: float = math.inf) -> float:
    """Return the seconds that keeping one result saves at each read; 0 if it does not pay.

    `cost`: of computing it, and of reading its file.
    """
    saved = cost - expected_read(size, disk_rate)
    return saved if size and cost >= LEAST_SECONDS and saved >= LEAST_GAIN * cost else 0.0


def choose_prefix(
    candidates: Iterable[Candidate], samples: int, room: int, disk_rate: float = math.inf
) -> int | None:
    """Return the number of steps whose results are worth keeping, or None if none are.

    The choice saves most in an epoch of so many `samples`, with `room` bytes for results. `disk_rate`: bytes
    a second of a disk that is too slow to be left out of account.
    """
    by_steps: dict[int, float] = {}
    for one in candidates:
        if one.calls:
            fits = min(1.0, room / (samples * one.bytes)) if samples and one.bytes else 1.0
            cost = one.cost + one.source_bytes / disk_rate
            saved = one.calls * fits * gain(cost, one.bytes, disk_rate)
            by_steps[one.steps] = by_steps.get(one.steps, 0.0) + saved
    best = max(by_steps, key=lambda steps: by_steps[steps], default=None)
    return best if best is not None and by_steps[best] > 0 else None


class PrefixStatus(msgspec.Struct, frozen=True):
    """What was decided about a field. `cost`, `read`: seconds of computing its prefix for one sample and of
    reading the result back, of `bytes`; 0 if no op comes before the first random one.
    """

    kept: bool
    cost: float = 0.0
    read: float = 0.0
    bytes: float = 0.0


def describe_prefix(candidates: Iterable[Candidate], kept: bool, disk_rate: float = math.inf) -> PrefixStatus:
    """Return the status of a field by its best candidate: the one whose result saves most."""
    measured = [one for one in candidates if one.calls]
    if not measured:
        return PrefixStatus(kept)

    def saved(one: Candidate) -> float:
        return one.cost + one.source_bytes / disk_rate - expected_read(one.bytes, disk_rate)

    best = max(measured, key=saved)
    read = expected_read(best.bytes, disk_rate)
    return PrefixStatus(kept, best.cost + best.source_bytes / disk_rate, read, best.bytes)


def value(saved: float, size: float, idle: float) -> float:
    """Return the value of a table: `saved` seconds at a read of `size` bytes, `idle` seconds after its last
    use.
    """
    return saved / size * 0.5 ** (idle / HALF_LIFE) if size else 0.0


def is_admitted(sample: int, share: float) -> bool:
    """Return whether a sample belongs to the share of the samples that is kept, by its number alone."""
    mixed = (sample + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return (mixed ^ mixed >> 32) < share * (_MASK + 1)


UNUSED: Final = 64
"""One part in so many of a limit stays unused, or the size of an entry if that is more."""
FILES: Final = 16
"""A limit has room for so many segments, at least: one that is dropped is a small part of what is kept."""


class Limit(msgspec.Struct, frozen=True):
    """A limit in bytes. `taken`: bytes that count towards it; `others`: those of them that do not give way to
    the table; `why`: what to say when it is reached."""

    bytes: int
    taken: int
    others: int
    why: str

    def usable(self, size: float) -> int:
        """Return its bytes without those that stay unused; `size`: the mean size of an entry."""
        return self.bytes - max(self.bytes // UNUSED, int(size))


def find_room(limits: Iterable[Limit], size: float) -> tuple[int, str]:
    """Return how many more bytes a table with entries of this mean size may take, and what bounds it."""
    return min((limit.usable(size) - limit.taken, limit.why) for limit in limits)


def find_share(limits: Iterable[Limit], size: float, samples: int) -> tuple[float, str]:
    """Return the share of the samples that the node is asked for whose entries there is room for, and what
    bounds it."""
    room, why = min((limit.usable(size) - limit.others, limit.why) for limit in limits)
    return max(0.0, min(1.0, room / max(1.0, samples * max(1.0, size)))), why


def segment_capacity(limits: Iterable[Limit], least: int, most: int) -> int:
    """Return how large a new segment may become, between `least` and `most` bytes."""
    return max(least, min(most, min(limit.bytes for limit in limits) // FILES))
