"""Limits of the decoded cache: how many more bytes a table may take, and what share of the samples that is.

Law: the samples that count are those that the node is asked for, so that the nodes of a mesh keep together
what their limits allow together. Bytes that are used or promised count, not the sizes of files. A little of
each limit stays unused: what was promised is the mean size of an entry, and the entries that come may be
larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

UNUSED: Final = 64
"""One part in so many of a limit stays unused, or the size of an entry if that is more."""
FILES: Final = 16
"""A limit has room for so many segments, at least: one that is dropped is a small part of what is kept."""


@dataclass(frozen=True, slots=True)
class Limit:
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
