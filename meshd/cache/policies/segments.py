"""Which item lies in which data file, and how many bytes that is.

Law: bytes are given back only with their whole file; what was removed or replaced is dead bytes till then.
Invariant: a segment holds items of one bucket; `used` is the sum of all segments, dead bytes included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.cache.policies.interface import Item


@dataclass(slots=True, eq=False)
class Segment:
    """A data file. `size` with dead bytes; `members` are alive."""

    number: int
    bucket: str
    size: int = 0
    dead: int = 0
    members: dict[Item, int] = field(default_factory=dict)


class Segments:
    """All data files and the open one of each stream. A stream keeps like with like."""

    def __init__(self, target: int) -> None:
        self.target, self.used = target, 0
        self.by_number: dict[int, Segment] = {}
        self.by_bucket: Counter[str] = Counter()
        self._where: dict[Item, Segment] = {}
        self._open: dict[tuple[str, str], Segment] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"<Segments {len(self.by_number)} files, {len(self._where)} items, {self.used} bytes>"

    def size_of(self, item: Item) -> int | None:
        segment = self._where.get(item)
        return None if segment is None else segment.members[item]

    def append(self, item: Item, size: int, stream: str) -> int:
        """The number of the segment it goes into; an earlier copy becomes dead bytes."""
        self.bury(item)
        where = (item[0], stream)
        segment = self._open.get(where)
        if segment is None or segment.number not in self.by_number or segment.size + size > self.target:
            segment = self._open[where] = self._new(item[0], self._next)
        self._put(segment, item, size)
        return segment.number

    def restore(self, number: int, item: Item, size: int) -> None:
        """An item that lies in a file of an earlier run."""
        segment = self.by_number.get(number) or self._new(item[0], number)
        if segment.bucket != item[0] or item in self._where:
            raise ValueError(
                f"{item} cannot lie in segment {number} too, which is of bucket {segment.bucket}"
            )
        self._put(segment, item, size)

    def bury(self, item: Item) -> Segment | None:
        """Its bytes are dead; the segment they lie in."""
        segment = self._where.pop(item, None)
        if segment is not None:
            segment.dead += segment.members.pop(item)
        return segment

    def drop(self, segment: Segment) -> None:
        """The file goes with all that is still in it."""
        for item in segment.members:
            del self._where[item]
        del self.by_number[segment.number]
        self.used -= segment.size
        self.by_bucket[segment.bucket] -= segment.size

    def _new(self, bucket: str, number: int) -> Segment:
        self._next = max(self._next, number) + 1
        segment = self.by_number[number] = Segment(number, bucket)
        return segment

    def _put(self, segment: Segment, item: Item, size: int) -> None:
        segment.members[item] = size
        segment.size += size
        self._where[item] = segment
        self.used += size
        self.by_bucket[segment.bucket] += size
