"""The eviction policy of the cache: whole segments are evicted, and valuable items are rewritten.

An item is admitted only if it is read again sooner than what it would replace, so a scan does not empty the
cache. Pins, declared working sets and dirty items stay. Removed items are dead bytes until their file is
deleted. A segment holds items of one bucket; `used` is the sum of all segments. A store reports reads and
writes, and carries out the decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from meshd.origins.eviction.next_use_predictor import NextUsePredictor, ReadSchedule
from meshd.origins.eviction.policy_api import Decision, Eviction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshd.origins.eviction.policy_api import EvictionSettings, Item


class ProtectedItems:
    """Items that must not be evicted."""

    def __init__(self) -> None:
        self.dirty: set[Item] = set()
        self._pins: set[Item] = set()
        self._declared: dict[str, frozenset[Item]] = {}
        self._prefixes: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"<ProtectedItems {len(self._pins)} pins, {len(self._declared)} sets, {len(self.dirty)} dirty>"

    def pin(self, bucket: str, prefix: str) -> None:
        self._pins.add((bucket, prefix))
        self._rebuild_prefixes()

    def unpin(self, bucket: str, prefix: str) -> None:
        self._pins.discard((bucket, prefix))
        self._rebuild_prefixes()

    def declare(self, name: str, prefixes: frozenset[Item]) -> None:
        """Declare a working set, as (bucket, prefix); the same name replaces an earlier set."""
        self._declared[name] = prefixes
        self._rebuild_prefixes()

    def withdraw(self, name: str) -> None:
        self._declared.pop(name, None)
        self._rebuild_prefixes()

    def is_pinned(self, item: Item) -> bool:
        """Whether the item is pinned or in a working set."""
        return bool(self._prefixes) and item[1].startswith(self._prefixes.get(item[0], ()))

    def is_protected(self, item: Item) -> bool:
        """Whether the item must not be dropped."""
        return item in self.dirty or self.is_pinned(item)

    def _rebuild_prefixes(self) -> None:
        gathered = defaultdict(list)
        for bucket, prefix in sorted(self._pins.union(*self._declared.values())):
            gathered[bucket].append(prefix)
        self._prefixes = {bucket: tuple(prefixes) for bucket, prefixes in gathered.items()}


@dataclass(slots=True, eq=False)
class Segment:
    """A data file. `size` includes dead bytes; `members` are the live items."""

    number: int
    bucket: str
    size: int = 0
    dead: int = 0
    members: dict[Item, int] = field(default_factory=dict)


class SegmentTable:
    """All data files, and the open one of each stream. A stream groups items of similar lifetime."""

    def __init__(self, target: int) -> None:
        self.target, self.used = target, 0
        self.by_number: dict[int, Segment] = {}
        self.by_bucket: Counter[str] = Counter()
        self._where: dict[Item, Segment] = {}
        self._open: dict[tuple[str, str], Segment] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"<SegmentTable {len(self.by_number)} files, {len(self._where)} items, {self.used} bytes>"

    def size_of(self, item: Item) -> int | None:
        segment = self._where.get(item)
        return None if segment is None else segment.members[item]

    def append_item(self, item: Item, size: int, stream: str) -> int:
        """Append an item; return the number of its segment. An earlier copy becomes dead bytes."""
        self.mark_dead(item)
        where = (item[0], stream)
        segment = self._open.get(where)
        if segment is None or segment.number not in self.by_number or segment.size + size > self.target:
            segment = self._open[where] = self._new(item[0], self._next)
        self._put(segment, item, size)
        return segment.number

    def restore(self, number: int, item: Item, size: int) -> None:
        """Add an item that is in a file of an earlier run."""
        segment = self.by_number.get(number) or self._new(item[0], number)
        if segment.bucket != item[0] or item in self._where:
            raise ValueError(
                f"{item} cannot be in segment {number} of bucket {segment.bucket}: "
                "the item has another bucket or segment"
            )
        self._put(segment, item, size)

    def mark_dead(self, item: Item) -> Segment | None:
        """Mark an item's bytes dead; return its segment, if any."""
        segment = self._where.pop(item, None)
        if segment is not None:
            segment.dead += segment.members.pop(item)
        return segment

    def remove_segment(self, segment: Segment) -> None:
        """Remove a file with all items that are still in it."""
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


_LOOKED_AT = 32  # segments that a search examines; the next search continues after them
_SHARE = 0.5  # minimum share of evicted bytes: no freed byte costs more than one written byte
_LEAST = 1 / 16  # below this share a segment is not evicted
_SOON = 8  # a search without result is not repeated until capacity / _SOON bytes have been read
_MUST = -1.0  # the distance of an item that must be cached


@dataclass(frozen=True, slots=True)
class _Victim:
    """A segment, and the items to drop with it. `worth`: the distance of the nearest of them."""

    segment: Segment
    drop: tuple[Item, ...]
    worth: float


class SegmentPolicy:
    """The state of one cache. Every call returns at once."""

    def __init__(self, settings: EvictionSettings) -> None:
        self.settings = settings
        self.moved = 0
        self.evictions = 0
        self._segments = SegmentTable(settings.segment)
        self._protected = ProtectedItems()
        self._predictor = NextUsePredictor(settings.memory * settings.capacity, settings.tracked)
        self._hand = 0
        self._bars: dict[str | None, tuple[float, int]] = {}  # of a full bucket, or (None) of the whole cache

    def __repr__(self) -> str:
        return f"<SegmentPolicy {self.used} of {self.settings.capacity} bytes, {self._segments!r}>"

    @property
    def used(self) -> int:
        return self._segments.used

    def used_by(self, bucket: str) -> int:
        return self._segments.by_bucket[bucket]

    def size_of(self, item: Item) -> int | None:
        """Return the cached bytes of an item; None if it is not cached."""
        return self._segments.size_of(item)

    # --- events

    def read_item(self, item: Item, size: int) -> int:
        """Read an item, as the other policies of the simulator do; return the cached bytes."""
        return size if self.decide(item, size).hit else 0

    def decide(self, item: Item, size: int) -> Decision:
        """Decide about a read of an item of this size."""
        self._predictor.record_read(item, size)
        held = self._segments.size_of(item)
        if held == size or (held is not None and item in self._protected.dirty):
            return Decision(hit=True)
        stale = () if held is None else self._mark_dead(item)
        distance = _MUST if self._protected.is_pinned(item) else self._predictor.admission_distance(item)
        return self._admit(item, size, distance, stale)

    def write(self, item: Item, size: int) -> Decision:
        """Cache a write-back item until `clean`. Without a segment there is no room: write through
        instead."""
        done = self._admit(item, size, _MUST, ())
        if done.segment is not None:
            self._protected.dirty.add(item)
        return done

    def clean(self, item: Item) -> None:
        """Mark an item as written to the origin."""
        self._bars.clear()
        self._protected.dirty.discard(item)

    def remove(self, item: Item) -> tuple[Eviction, ...]:
        """Remove a deleted item, and its file if it was the last item in it."""
        self._protected.dirty.discard(item)
        self._predictor.forget(item)
        self._bars.clear()
        return self._mark_dead(item)

    def restore(self, segment: int, item: Item, size: int, *, dirty: bool = False) -> None:
        """Add an item that a store finds on its disks when it starts; call `sweep` afterwards."""
        self._segments.restore(segment, item, size)
        if dirty:
            self._protected.dirty.add(item)

    def sweep(self) -> tuple[Eviction, ...]:
        """Evict down to the low watermark and to the quotas, whatever the items are worth; protected items
        stay."""
        done: list[Eviction] = []
        for bucket, quota in sorted(self.settings.quotas.items()):
            while self.used_by(bucket) > quota and (victim := self._victim(bucket)):
                done.append(self._evict(victim))
        while self.used > self._low and (victim := self._victim(None)):
            done.append(self._evict(victim))
        return tuple(done)

    # --- hints

    def pin(self, bucket: str, prefix: str = "") -> None:
        """Admit keys of the bucket with this prefix before others, and do not evict them."""
        self._protected.pin(bucket, prefix)

    def unpin(self, bucket: str, prefix: str = "") -> None:
        self._protected.unpin(bucket, prefix)
        self._bars.clear()

    def declare(self, name: str, *prefixes: Item) -> None:
        """Declare a working set, as (bucket, prefix): none of it is evicted while it is declared."""
        if self.settings.hints:
            self._protected.declare(name, frozenset(prefixes))

    def withdraw(self, name: str) -> None:
        self._protected.withdraw(name)
        self._bars.clear()

    def plan(self, name: str, order: Iterable[Item]) -> None:
        """Set the future reads of a plan, in order."""
        if self.settings.hints:
            self._predictor.plans[name] = ReadSchedule(order)

    def advance(self, name: str, position: int) -> None:
        """Record that the plan's reader has read all before `position`. A finished plan is forgotten."""
        plan = self._predictor.plans.get(name)
        if plan is not None:
            plan.position = position
            if position >= plan.length:
                del self._predictor.plans[name]

    def unplan(self, name: str) -> None:
        """Forget the future reads of a plan."""
        self._predictor.plans.pop(name, None)
        self._bars.clear()

    # --- decisions

    def _mark_dead(self, item: Item) -> tuple[Eviction, ...]:
        segment = self._segments.mark_dead(item)
        if segment is None or segment.members:
            return ()
        return (self._evict(_Victim(segment, (), inf)),)

    @property
    def _low(self) -> int:
        return int(self.settings.capacity * self.settings.low)

    @property
    def _high(self) -> int:
        return int(self.settings.capacity * self.settings.high)

    def _admit(self, item: Item, size: int, distance: float, before: tuple[Eviction, ...]) -> Decision:
        quota = min(self.settings.quotas.get(item[0], self._high), self._high)
        if size > quota:
            return Decision(evictions=before)
        done = list(before)
        if not self._make_room(item[0], size, quota, distance, done):
            return Decision(evictions=tuple(done))
        stream = "kept" if distance == _MUST else "read"
        return Decision(segment=self._segments.append_item(item, size, stream), evictions=tuple(done))

    def _make_room(self, bucket: str, size: int, quota: int, distance: float, done: list[Eviction]) -> bool:
        while self.used_by(bucket) + size > quota:
            if not self._replace(bucket, distance, done):
                return False
        if self.used + size <= self._low:
            return True
        if self.used + size <= self._high:
            return distance == _MUST or distance < self._bars.get(None, (inf, 0))[0]
        while self.used + size > self._low:
            if not self._replace(None, distance, done):
                return self.used + size <= self._high
        return True

    def _replace(self, bucket: str | None, distance: float, done: list[Eviction]) -> bool:
        """Evict one segment if the new item is read again sooner than what is dropped."""
        bar, until = self._bars.get(bucket, (inf, 0))
        if distance >= bar and self._predictor.clock < until:
            return False
        victim = self._victim(bucket)
        until = self._predictor.clock + self.settings.capacity // _SOON
        self._bars[bucket] = (victim.worth if victim else -inf, until)
        if victim is None or distance >= victim.worth:
            return False
        done.append(self._evict(victim))
        return True

    def _victim(self, bucket: str | None) -> _Victim | None:
        """Return the examined segment whose dropped items are read again last."""
        best: _Victim | None = None
        for found in self._candidates(bucket):
            if best is None or found.worth > best.worth:
                best = found
        return best

    def _candidates(self, bucket: str | None) -> Iterator[_Victim]:
        """Yield what the segments after the hand offer, wrapping around, as many as one search examines."""
        numbers = sorted(self._segments.by_number)
        at = bisect_right(numbers, self._hand)
        left = _LOOKED_AT
        for number in (*numbers[at:], *numbers[:at]):
            segment = self._segments.by_number[number]
            if bucket is not None and segment.bucket != bucket:
                continue
            if (found := self._weigh(segment)) is not None:
                yield found
                left -= 1
            if not left:
                self._hand = number
                return

    def _weigh(self, segment: Segment) -> _Victim | None:
        """Choose items to drop, farthest first, until enough bytes are freed; None if too few would be."""
        free = [
            (self._predictor.distance(item), item, size)
            for item, size in segment.members.items()
            if not self._protected.is_protected(item)
        ]
        free.sort(reverse=True)
        freed, worth, drop = segment.dead, inf, []
        for distance, item, size in free:
            if freed >= _SHARE * segment.size and distance < worth:
                break
            worth = distance
            freed += size
            drop.append(item)
        if freed < _LEAST * segment.size or not freed:
            return None
        return _Victim(segment, tuple(drop), worth * min(1.0, freed / (_SHARE * segment.size)))

    def _evict(self, victim: _Victim) -> Eviction:
        segment, dropped = victim.segment, set(victim.drop)
        kept = [(item, size) for item, size in segment.members.items() if item not in dropped]
        self._segments.remove_segment(segment)
        moves = tuple(
            (item, self._segments.append_item(item, size, self._stream(item))) for item, size in kept
        )
        moved = sum(size for _, size in kept)
        self.moved += moved
        self.evictions += 1
        return Eviction(segment.number, victim.drop, moves, segment.size - moved, moved)

    def _stream(self, item: Item) -> str:
        """Return the stream for a moved item: protected items are kept apart from items that come and go."""
        return "kept" if self._protected.is_protected(item) else "moved"
