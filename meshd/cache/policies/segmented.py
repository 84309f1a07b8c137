"""The policy of a store: whole segments go, and what is worth it is written again.

Law: a newcomer gets in only if it is read again sooner than what would go for it, so a scan does not empty
the cache: of data that is read in epochs and does not fit, a part stays. Plans make "sooner" exact.
Invariant: as `interface`. A refused item is served past the cache; what went for it until then is gone.
Seam: a store reports reads, writes, removals, guards and plans, and does what the `Decision`s say.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from meshd.cache.policies.forecasting import Forecast, Plan
from meshd.cache.policies.guarding import Guards
from meshd.cache.policies.interface import Decision, Eviction
from meshd.cache.policies.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshd.cache.policies.interface import Item, Settings
    from meshd.cache.policies.segments import Segment

_LOOKED_AT = 32  # segments a search looks at; the next search goes on behind them
_SHARE = 0.5  # of a segment's bytes that should go with it: no byte is freed by writing more than another
_LEAST = 1 / 16  # of them without which a segment is let be
_SOON = 8  # a search without result holds for this part of the capacity in bytes read
_MUST = -1.0  # the distance of what must be kept


@dataclass(frozen=True, slots=True)
class _Victim:
    """A segment and the distance from which on its items are dropped. `worth`: of the nearest that goes."""

    segment: Segment
    drop: tuple[Item, ...]
    worth: float


class Segmented:
    """State of one cache. Nothing in it waits; every call returns at once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.moved = 0
        self.evictions = 0
        self._segments = Segments(settings.segment)
        self._guards = Guards()
        self._forecast = Forecast(settings.memory * settings.capacity, settings.tracked)
        self._hand = 0
        self._bars: dict[str | None, tuple[float, int]] = {}  # of a full bucket, or (None) of the whole

    def __repr__(self) -> str:
        return f"<Segmented {self.used} of {self.settings.capacity} bytes, {self._segments!r}>"

    @property
    def used(self) -> int:
        return self._segments.used

    def used_by(self, bucket: str) -> int:
        return self._segments.by_bucket[bucket]

    def size_of(self, item: Item) -> int | None:
        """Bytes kept of it; None: it is not kept."""
        return self._segments.size_of(item)

    # --- what happens

    def read(self, item: Item, size: int) -> int:
        """As the simulator's other policies: how many bytes were kept."""
        return size if self.decide(item, size).hit else 0

    def decide(self, item: Item, size: int) -> Decision:
        """Somebody reads an item of this size."""
        self._forecast.note(item, size)
        held = self._segments.size_of(item)
        if held == size or (held is not None and item in self._guards.dirty):
            return Decision(hit=True)
        stale = () if held is None else self._bury(item)
        distance = _MUST if self._guards.wanted(item) else self._forecast.newcomer(item)
        return self._admit(item, size, distance, stale)

    def write(self, item: Item, size: int) -> Decision:
        """Write-back: it is kept until `clean`. Without a segment there is no room: write through instead."""
        done = self._admit(item, size, _MUST, ())
        if done.segment is not None:
            self._guards.dirty.add(item)
        return done

    def clean(self, item: Item) -> None:
        """The origin has it now."""
        self._bars.clear()
        self._guards.dirty.discard(item)

    def remove(self, item: Item) -> tuple[Eviction, ...]:
        """It is deleted; its file goes too if it was the last in it."""
        self._guards.dirty.discard(item)
        self._forecast.forget(item)
        self._bars.clear()
        return self._bury(item)

    def restore(self, segment: int, item: Item, size: int, *, dirty: bool = False) -> None:
        """What a store finds on its disks when it starts; `sweep` afterwards."""
        self._segments.restore(segment, item, size)
        if dirty:
            self._guards.dirty.add(item)

    def sweep(self) -> tuple[Eviction, ...]:
        """Down to the low watermark and to the quotas, whatever it is worth; what must stay stays."""
        done: list[Eviction] = []
        for bucket, quota in sorted(self.settings.quotas.items()):
            while self.used_by(bucket) > quota and (victim := self._victim(bucket)):
                done.append(self._evict(victim))
        while self.used > self._low and (victim := self._victim(None)):
            done.append(self._evict(victim))
        return tuple(done)

    # --- what is known

    def pin(self, bucket: str, prefix: str = "") -> None:
        """Keys of the bucket that begin so are let in before others, and stay."""
        self._guards.pin(bucket, prefix)

    def unpin(self, bucket: str, prefix: str = "") -> None:
        self._guards.unpin(bucket, prefix)
        self._bars.clear()

    def declare(self, name: str, *prefixes: Item) -> None:
        """A working set, as (bucket, prefix): none of it goes while it is declared."""
        if self.settings.hints:
            self._guards.declare(name, frozenset(prefixes))

    def withdraw(self, name: str) -> None:
        self._guards.withdraw(name)
        self._bars.clear()

    def plan(self, name: str, order: Iterable[Item]) -> None:
        """The reads to come, in order."""
        if self.settings.hints:
            self._forecast.plans[name] = Plan(order)

    def advance(self, name: str, position: int) -> None:
        """The plan's reader has read all before `position`. A plan at its end is forgotten."""
        plan = self._forecast.plans.get(name)
        if plan is not None:
            plan.position = position
            if position >= plan.length:
                del self._forecast.plans[name]

    def unplan(self, name: str) -> None:
        """Its reads to come are not known any more."""
        self._forecast.plans.pop(name, None)
        self._bars.clear()

    # --- deciding

    def _bury(self, item: Item) -> tuple[Eviction, ...]:
        segment = self._segments.bury(item)
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
        return Decision(segment=self._segments.append(item, size, stream), evictions=tuple(done))

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
        """Evict one segment if the newcomer is read again sooner than what goes."""
        bar, until = self._bars.get(bucket, (inf, 0))
        if distance >= bar and self._forecast.clock < until:
            return False
        victim = self._victim(bucket)
        until = self._forecast.clock + self.settings.capacity // _SOON
        self._bars[bucket] = (victim.worth if victim else -inf, until)
        if victim is None or distance >= victim.worth:
            return False
        done.append(self._evict(victim))
        return True

    def _victim(self, bucket: str | None) -> _Victim | None:
        """Of the segments looked at, the one whose dropped items are read again last."""
        best: _Victim | None = None
        for found in self._candidates(bucket):
            if best is None or found.worth > best.worth:
                best = found
        return best

    def _candidates(self, bucket: str | None) -> Iterator[_Victim]:
        """What segments behind the hand, then around, have to give; as many as one search looks at."""
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
        """Drop from the farthest on until enough goes. None: too little would."""
        free = [
            (self._forecast.distance(item), item, size)
            for item, size in segment.members.items()
            if not self._guards.holds(item)
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
        self._segments.drop(segment)
        moves = tuple((item, self._segments.append(item, size, self._stream(item))) for item, size in kept)
        moved = sum(size for _, size in kept)
        self.moved += moved
        self.evictions += 1
        return Eviction(segment.number, victim.drop, moves, segment.size - moved, moved)

    def _stream(self, item: Item) -> str:
        """Whose like it is: what is held need not be written again with what comes and goes."""
        return "kept" if self._guards.holds(item) else "moved"
