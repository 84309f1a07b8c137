"""Decoded cache of a node, in the coordinator: what transform processes read, compute and store.

Law: a plan's first rows are measured; then the prefix of each field that saves most is kept, or none. A wrong
decision costs time, never a byte of a batch. Space that the store may need is given back within seconds.
Use on one event loop only.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.telemetry import metrics
from meshd.transform.decoded_cache import policy
from meshd.transform.decoded_cache.messages import MEASURE, PLAIN, WINDOWED
from meshd.transform.decoded_cache.policy import Candidate, Limit, describe_prefix, find_room
from meshd.transform.decoded_cache.segment_store import MIN_SEGMENT_BYTES
from meshd.transform.decoded_cache.slice_order import (
    BUCKET_QUOTA,
    CALLER_LIMIT,
    NO_ROOM,
    READ_SLOWLY,
    WRITE_PAUSE,
    SliceOrder,
)
from meshd.transform.decoded_cache.tables import FieldChoice, PlanState, Table, leaves_out_results
from meshd.transform.decoded_cache.unowned_entries import UnownedEntries
from meshd.util.disk_space import measure_disk_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from meshd.transform.decoded_cache.messages import PrefixCost, PrefixReport
    from meshd.transform.decoded_cache.policy import PrefixStatus
    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.decoded_cache.segment_store import SegmentStore
    from meshd.transform.decoded_cache.tables import Segment

_log = logging.getLogger(__name__)
MEASURED_ROWS: Final = 24
"""Rows of a plan that are measured before its prefixes are chosen."""
KEEP_FREE: Final = 32 << 30
"""Bytes of the file system that the cache leaves free, or KEEP_FREE_SHARE of a smaller one."""
KEEP_FREE_SHARE: Final = 0.1
_MAX_PLANS: Final = 256
_MAX_TABLES: Final = 64
_SHRINKS_BY: Final = 4
_PAUSE: Final = 60.0
"""Seconds without new entries after one could not be written."""


class DecodedCache:
    """Decides for each slice; see the module. `clock` returns seconds.

    `disk_rate`: bytes a second of the directory's disk, if it is so slow that reading from it may take longer
    than computing. `quota`: returns the bytes that results of a bucket may take, None without a quota.
    """

    def __init__(
        self,
        segments: SegmentStore,
        directory: Path,
        clock: Callable[[], float],
        disk_rate: float = math.inf,
        quota: Callable[[str], int | None] = lambda bucket: None,
    ) -> None:
        self.disk_rate = disk_rate
        self.token = secrets.token_hex(8)
        """Another one after a restart of the node, which empties the cache."""
        self._quota = quota
        self._segments, self._directory, self._clock = segments, directory, clock
        self._moved = UnownedEntries(segments)
        self._plans: OrderedDict[tuple[str, str], PlanState] = OrderedDict()
        self._tables: dict[tuple[str, int, str], Table] = {}
        self._by_number: dict[int, Table] = {}
        self._next_table = secrets.randbits(62)
        self._most = segments.limit
        self._paused_until = 0.0
        for result in ("hit", "miss", "damaged"):  # a ratio needs all of them from the beginning
            metrics.decoded_cache_reads.labels(result)

    def __repr__(self) -> str:
        return f"<DecodedCache {self._segments!r}, {len(self._tables)} tables>"

    @property
    def bytes(self) -> int:
        """Bytes of its entries."""
        return self._segments.used

    @property
    def has_room(self) -> bool:
        """Whether the disk has room for results, of this plan or another one."""
        return self._most >= self._segments.segment_bytes

    @property
    def tables(self) -> tuple[Table, ...]:
        """Its tables."""
        return tuple(self._by_number.values())

    def order(
        self,
        program: str,
        samples: SampleSet | None,
        rows: int,
        fields: int,
        writer: object,
        *,
        in_advance: bool = False,
    ) -> SliceOrder | None:
        """Return what to do for a slice that `writer` renders; None: as if there were no cache.

        `in_advance`: no batch waits for it, so results are stored even while writing is slow.
        """
        if samples is None or samples.limit == 0 or not self.has_room:
            return None
        key = program, samples.snapshot
        state = self._plans.get(key)
        if state is None:
            state = self._plans[key] = PlanState(samples)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        state.samples = samples
        if state.fields is None:
            return SliceOrder(key, writer, rows, (MEASURE,) * fields, ((),) * fields, {}, {})
        if not any(state.fields):
            return None
        return self._order(key, state, rows, writer, in_advance)

    def find_all(self, program: str, snapshot: str, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for which samples every field of the program has an entry, so that their files are most
        likely not read. bool[n].
        """
        state = self._plans.get((program, snapshot))
        found = np.full(len(samples), state is not None and bool(state.fields))
        for choice in (state.fields or ()) if state is not None else ():
            kept = np.zeros(len(samples), np.bool_)
            for table in choice.tables.values() if choice is not None else ():
                kept |= table.find_all(samples)
            found &= kept
        return found

    def find_missing(
        self, program: str, snapshot: str, samples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return for which samples a result may have to be stored: some table has no entry, and room for it.
        bool[n].
        """
        state, now = self._plans.get((program, snapshot)), self._clock()
        wanted = np.zeros(len(samples), np.bool_)
        for table in state.tables if state is not None else ():
            assert state is not None
            lacking = np.flatnonzero(~table.find_all(samples))
            share, _ = self._share(table, state, now)
            for place in lacking[~wanted[lacking]].tolist():
                wanted[place] = policy.is_admitted(int(samples[place]), share)
        return wanted

    def bound_of(self, program: str, snapshot: str) -> str:
        """Return why no more results of a plan are kept."""
        state, now = self._plans.get((program, snapshot)), self._clock()
        shares = [self._share(table, state, now) for table in state.tables] if state is not None else []
        return min(shares, default=(0.0, NO_ROOM))[1]

    def plan_status(self, program: str, snapshot: str) -> tuple[PrefixStatus, ...] | None:
        """Return what is kept of each field of a plan; None until enough of its rows were measured."""
        state = self._plans.get((program, snapshot))
        if state is None or state.fields is None:
            return None
        return tuple(
            describe_prefix(state.candidates.get(number, {}).values(), choice is not None, self.disk_rate)
            for number, choice in enumerate(state.fields)
        )

    def _order(
        self, key: tuple[str, str], state: PlanState, rows: int, writer: object, in_advance: bool
    ) -> SliceOrder:
        steps = tuple(PLAIN if choice is None else choice.steps for choice in state.fields or ())
        tables = tuple(
            () if choice is None else tuple(choice.tables.values()) for choice in state.fields or ()
        )
        made = SliceOrder(key, writer, rows, steps, tables, {}, {}, promise=self._segments.promise)
        now = self._clock()
        for table in state.tables:
            number, size = table.number, table.size.value
            table.note_request(state.samples, now)
            paused = now < max(self._paused_until, 0.0 if in_advance else table.paused_until)
            limits = self._limits(table, state, now)
            room, why = find_room(limits, size)
            needed = int(rows * size)
            far = why == CALLER_LIMIT and room < -needed  # other callers allow what is there
            if room < needed and not far and self._make_room(table, why, state, needed - room, now):
                limits = self._limits(table, state, now)
                room, why = find_room(limits, size)
            segment = why if room < size else self._segment(table, limits, writer, paused)
            if isinstance(segment, str):
                made.bounds[number] = segment
            else:
                made.segments[number], made.rooms[number] = segment, room
                made.shares[number], made.bounds[number] = policy.find_share(limits, size, table.asked)
        return made

    def _segment(self, table: Table, limits: Sequence[Limit], writer: object, paused: bool) -> Segment | str:
        """Return the segment that `writer` appends results of the table to, or why none are to be stored."""
        found = self._segments.open_segment(writer, table)
        if found is not None:
            return found
        if paused:
            return WRITE_PAUSE
        if table.saved <= 0:
            return READ_SLOWLY
        if table.entries >= table.samples:
            return NO_ROOM
        try:
            capacity = policy.segment_capacity(limits, MIN_SEGMENT_BYTES, self._segments.segment_bytes)
            return self._segments.create(writer, table, capacity)
        except OSError as error:
            self._pause(str(error))
            return WRITE_PAUSE

    def _limits(self, table: Table, state: PlanState, now: float) -> list[Limit]:
        """Return all limits of what the table may take."""
        least, quota = table.value(now) / policy.BETTER, self._quota(table.bucket)
        tables, limit = self._tables.values(), state.samples.limit
        others = [other for other in tables if other is not table and other.value(now) > least]
        taken = sum(other.bytes for other in others)
        found = [Limit(self._most, self._segments.bytes, taken, NO_ROOM)]
        if table.limit is not None:
            found.append(Limit(table.limit, table.bytes, 0, READ_SLOWLY))
        if limit is not None:
            taken = sum(each.bytes for each in state.tables)
            found.append(Limit(limit, taken, taken - table.bytes, CALLER_LIMIT))
        if quota is not None:
            taken = sum(other.bytes for other in others if other.bucket == table.bucket)
            found.append(Limit(quota, self.bytes_by_bucket()[table.bucket], taken, BUCKET_QUOTA))
        return found

    def _share(self, table: Table, state: PlanState, now: float) -> tuple[float, str]:
        """Return the share of the samples whose results there is room for, and what bounds it."""
        return policy.find_share(self._limits(table, state, now), table.size.value, state.samples.asked)

    def bytes_by_bucket(self) -> dict[str, int]:
        """Return the bytes of the segments of each bucket, used and promised."""
        found: dict[str, int] = {}
        for table in self._by_number.values():
            found[table.bucket] = found.get(table.bucket, 0) + table.bytes
        return found

    def _make_room(self, table: Table, why: str, state: PlanState, wanted: int, now: float) -> bool:
        """Drop some entries of samples that moved to other nodes, so that the table, bounded by `why`, can
        take `wanted` bytes more; else segments of less value. Returns whether it can take any."""
        gained = self._give_back(self._tables_under_limit(table, why, state), wanted)
        return gained or (why == NO_ROOM and self._replace(table, wanted, now))

    def _tables_under_limit(self, table: Table, why: str, state: PlanState) -> Iterable[Table]:
        """Return the tables that count towards the limit which bounds a table."""
        if why == NO_ROOM:
            return self._by_number.values()
        if why == BUCKET_QUOTA:
            return [each for each in self._by_number.values() if each.bucket == table.bucket]
        return state.tables if why == CALLER_LIMIT else (table,)

    def _give_back(self, tables: Iterable[Table], wanted: int) -> bool:
        given = self._moved.give_back(tables, wanted)
        metrics.decoded_cache_evicted.inc(given or 0)
        return given is not None

    async def find_moved(self) -> None:
        """Find the entries of samples that moved to other nodes, where room is short."""
        await self._moved.find()

    def _replace(self, table: Table, wanted: int, now: float) -> bool:
        """Drop segments of less value until there are `wanted` bytes more. Returns whether there are."""
        while wanted > 0:
            worth = table.value(now)
            least = min(
                (each for each in self._by_number.values() if each is not table and each.segments),
                key=lambda each: each.value(now),
                default=None,
            )
            if least is None or worth < policy.BETTER * least.value(now):
                return False
            segment = next(iter(least.segments.values()))
            wanted -= segment.size
            self._drop(segment)
        return True

    def _drop(self, segment: Segment) -> None:
        metrics.decoded_cache_evicted.inc(self._segments.drop(segment))
        metrics.decoded_cache_bytes.set(self._segments.used)

    def on_reply(self, order: SliceOrder, report: PrefixReport, *, in_advance: bool = False) -> None:
        """Take over what a transform process measured, stored and found damaged.

        `in_advance`: no batch wanted it, so it misses nothing.
        """
        for table, sample in report.damaged:
            if table in self._by_number:
                self._by_number[table].forget(sample)
        metrics.decoded_cache_reads.labels("damaged").inc(len(report.damaged))
        for entry in report.stored:
            segment = order.segments.get(entry.table)
            if segment is not None and segment.number in segment.table.segments:
                segment.table.add(segment, entry)
                self._segments.grow(segment, entry.offset + entry.length)
                metrics.decoded_cache_stored.inc(entry.length)
        self._end_promises(order)
        if report.full:
            for segment in order.segments.values():
                self._segments.seal(segment)
            self._pause("an entry could not be written")
        now = self._clock()
        for use in report.uses:
            used = self._by_number.get(use.table)
            if used is None:
                continue
            metrics.decoded_cache_reads.labels("hit").inc(use.hits)
            metrics.decoded_cache_reads.labels("miss").inc(0 if in_advance else use.made)
            metrics.decoded_cache_saved.inc(max(0.0, use.hits * used.cost.value - use.hit_seconds))
            used.record_use(use, now, in_advance=in_advance)
            if used.is_slow(now):
                self._shrink(used, now)
        self._learn(order, report.costs)
        metrics.decoded_cache_bytes.set(self._segments.used)

    def on_writer_lost(self, writer: object, orders: Sequence[SliceOrder]) -> None:
        """Note that a transform process died, with slices that it had not answered."""
        for order in orders:
            self._end_promises(order)
        self._segments.seal_all(writer)

    def _end_promises(self, order: SliceOrder) -> None:
        for number, size in order.promised.items():
            self._segments.end_promise(order.segments[number], size)
        order.promised.clear()

    def _learn(self, order: SliceOrder, costs: Sequence[PrefixCost]) -> None:
        state = self._plans.get(order.program)
        if state is None:
            return
        for cost in costs:
            known = state.candidates.setdefault(cost.field, {})
            kind = cost.steps, cost.variant, cost.digest
            one = known.setdefault(kind, Candidate(*kind))
            one.calls += cost.calls
            one.seconds += cost.seconds
            one.size += cost.size
            one.source += cost.source
        if state.fields is None:
            state.measured += order.rows
            if state.measured >= MEASURED_ROWS:
                state.fields = [self._choose(state, number) for number in range(len(order.steps))]
        elif costs:
            for number, choice in enumerate(state.fields):
                if choice is not None and choice.steps == WINDOWED:
                    self._add_tables(state, number, choice)

    def _choose(self, state: PlanState, number: int) -> FieldChoice | None:
        found = state.candidates.get(number, {}).values()
        steps = policy.choose_prefix(found, state.samples.asked, self._most, self.disk_rate)
        if steps is None:
            return None
        made = FieldChoice(steps)
        self._add_tables(state, number, made)
        return made

    def _add_tables(self, state: PlanState, number: int, choice: FieldChoice) -> None:
        for one in state.candidates.get(number, {}).values():
            if one.steps == choice.steps and one.variant not in choice.tables and one.calls:
                choice.tables[one.variant] = self._table(state.samples, number, one)

    def _table(self, samples: SampleSet, number: int, one: Candidate) -> Table:
        key = samples.snapshot, number, one.digest
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _MAX_TABLES:
                self._drop_table()
            self._next_table += 1
            found = Table(
                self._next_table, samples.count, one.variant, self._clock(), self.disk_rate, samples.bucket
            )
            found.source_seconds = one.source_bytes / self.disk_rate
            found.cost.add(one.seconds, one.calls)
            found.size.add(one.size, one.calls)
            self._tables[key] = self._by_number[found.number] = found
        return found

    def _drop_table(self) -> None:
        """Drop the table of the least value, with the plans that use it."""
        now = self._clock()
        key, table = min(self._tables.items(), key=lambda item: item[1].value(now))
        for segment in list(table.segments.values()):
            self._drop(segment)
        del self._tables[key], self._by_number[table.number]
        self._moved.forget(table)
        for name in [name for name, state in self._plans.items() if table in set(state.tables)]:
            del self._plans[name]

    def _shrink(self, table: Table, now: float) -> None:
        """Drop a part of a table that is read too slowly: what is left may fit in memory."""
        for segment in list(table.segments.values())[: -(-len(table.segments) // _SHRINKS_BY)]:
            self._drop(segment)
        table.set_limit(table.bytes, now)
        _log.info("decoded samples are read slowly; fewer are kept", extra={"bytes": table.bytes})

    def _pause(self, why: str) -> None:
        self._paused_until = self._clock() + _PAUSE
        _log.info("no decoded samples are stored for a while", extra={"why": why})

    def fit(self, total: int, free: int) -> Iterator[None]:
        """Adapt to the file system, of `total` bytes with `free` ones, so that enough of it stays free, and
        to the present quotas of buckets: in steps of some milliseconds."""
        spare = free - min(KEEP_FREE, int(KEEP_FREE_SHARE * total))
        self._most = max(0, min(self._segments.limit, self._segments.bytes + spare))
        yield from self._drop_least(self.tables, self._most)
        at_quota = 0
        for bucket, size in self.bytes_by_bucket().items():
            quota = self._quota(bucket)
            if quota is not None:
                own = [table for table in self._by_number.values() if table.bucket == bucket]
                at_quota += leaves_out_results(quota, size, own)
                yield from self._drop_least(own, quota)
        metrics.decoded_cache_limit.set(self._most)
        metrics.decoded_cache_at_quota.set(at_quota)

    def _drop_least(self, tables: Sequence[Table], most: int) -> Iterator[None]:
        """Drop segments of these tables until they take at most `most` bytes, those of least value first;
        before them entries of samples that moved to other nodes."""
        now = self._clock()
        while filled := [table for table in tables if table.segments]:
            if (size := sum(table.bytes for table in filled) - most) <= 0:
                return
            if not self._give_back(filled, size):
                self._drop(next(iter(min(filled, key=lambda table: table.value(now)).segments.values())))
            yield

    def measure_disk(self) -> tuple[int, int]:
        """Return (total, free) bytes of the file system (blocking). Raises OSError."""
        space = measure_disk_space(self._directory)
        return space.total, space.free_for_cache
