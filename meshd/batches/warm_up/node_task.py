"""The work of one node for one warm-up: window after window of its samples, in stored order.

Law: each sample is counted once, when nothing more is to be done for it. While one window is made, the bytes
of the next are looked up, read ahead and fetched.
An epoch's samples come once each, with the position they are read at.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.batches.assembly.frame_rows import new_rows, own_rows
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.warm_up.messages import WARM_UP, WARM_UP_HERE, WarmUpRequest, WarmUpStatus
from meshd.core.document_store import asset_key, asset_places
from meshd.core.memory_frames import MemoryAccount
from meshd.core.node_tasks import RPC_ERRORS, NodeTasks
from meshd.core.peer_source import SINGLE_NODE
from meshd.core.sample_locations import PinnedObjects, bytes_columns, main_objects
from meshd.rpc.peer_rpc import handler
from meshd.rpc.process_client import ProcessClient
from meshd.telemetry import metrics
from meshd.transform.decoded_cache.messages import KEPT, REFUSED, STORED, UNSTORED
from meshd.transform.decoded_cache.sample_set import SampleSet
from meshd.transform.decoded_cache.slice_order import NOT_SETTLED, TOO_LARGE
from meshd.transform.renderer import UNREADABLE_KINDS, RowWork, program_digest
from meshd.util.async_tasks import cancel_and_discard
from meshd.util.byte_rate import RateLimiter
from meshd.util.tenant_limits import tenant_scope
from meshwire.plan.epoch_order import snapshot_order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from meshd.batches.read_ahead.scheduler import ReadScheduler
    from meshd.core.document_store import DocumentStore
    from meshd.core.peer_source import PeerSource
    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.transform.decoded_cache.cache import DecodedCache
    from meshd.transform.decoded_cache.policy import PrefixStatus
    from meshd.transform.decoded_cache.sample_set import OwnRows
    from meshd.transform.messages import Failure
    from meshd.transform.pool import TransformPool
    from meshd.transform.renderer import RenderResult
    from meshwire.dataset.build_snapshot import Snapshot

    Integers = npt.NDArray[np.int64]


_MEASURED: Final = 32  # samples that are made until the plan has been measured
_TRIES: Final = 4  # times that a sample is made before it counts as left out
_REASON: Final = 160  # characters of a reason that are kept
WarmUps = NodeTasks[WarmUpRequest, WarmUpStatus]


class WarmUpContext(msgspec.Struct, frozen=True):
    """The dependencies of all tasks of a node. `decoded`: None if its decoded cache is switched off."""

    store: ObjectStore
    pool: TransformPool
    archives: DecompressedArchives
    catalog: DocumentStore
    decoded: DecodedCache | None
    read_ahead: ReadScheduler | None = None
    remote: PeerSource = SINGLE_NODE
    memory: MemoryAccount = msgspec.field(default_factory=MemoryAccount)


def warm_ups(context: WarmUpContext) -> WarmUps:
    """Return the tasks of a node."""
    return WarmUps(lambda request: WarmUpTask(context, request), WarmUpStatus(done=True), WARM_UP_HERE)


class _Window(msgspec.Struct):
    """Samples that are made together; rows of `work` can be read until `pinned` is closed."""

    numbers: Integers
    work: list[RowWork]
    pinned: PinnedObjects


class _Scope(msgspec.Struct, frozen=True):
    """The samples of a task: `samples`, the `positions` that key their draws, and the `sizes` of their
    sources in bytes; int64[n] each. `own`: see `SampleSet`.
    """

    plan: Plan
    snapshot: Snapshot
    program: str
    epoch: int
    samples: Integers
    positions: Integers
    sizes: Integers
    own: OwnRows | None


class WarmUpTask:
    """The node's part of one warm-up; `status` has the totals at any time."""

    def __init__(self, context: WarmUpContext, request: WarmUpRequest) -> None:
        self._context, self.request = context, request
        self.status = WarmUpStatus(run=secrets.token_hex(8))
        self.rate = request.rate
        self._budget = RateLimiter(lambda: self.rate)
        self._tries: Counter[int] = Counter()

    def __repr__(self) -> str:
        status = self.status
        return f"<WarmUpTask {self.request.session}, {status.samples} of {status.samples_total} samples>"

    async def run(self) -> None:
        """Warm up. Raises BatchError."""
        status, decoded = self.status, self._context.decoded
        if decoded is None or self.request.limit == 0:
            status.refused = CACHE_OFF
            return
        if not decoded.has_room:
            status.refused = NO_SPACE
            return
        scope = await self._scope()
        status.samples_total, status.bytes_total = len(scope.samples), int(scope.sizes.sum())
        if not len(scope.samples):
            return
        status.refused = await self._measure(decoded, scope)
        if not status.refused:
            await self._make_all(decoded, scope)

    async def _scope(self) -> _Scope:
        """Return the samples of this node. Raises BatchError NoSuchPlan, NotOwner."""
        request, context = self.request, self._context
        plan, epoch = await context.catalog.plan(request.plan), request.epoch
        packed = bool(plan.within)
        if packed:
            plan, epoch = await context.catalog.plan(plan.within), 0
        await context.catalog.ensure_local_copies(map(asset_key, plan.assets))
        snapshot = await context.catalog.snapshot(plan.snapshot)
        samples, positions = await asyncio.to_thread(samples_of, plan, snapshot, epoch)
        if packed:  # its samples are rendered once for all epochs, at their own numbers
            positions = samples
        if request.bucket and len(samples):
            inside = await asyncio.to_thread(in_folder, snapshot, samples, request.bucket, request.prefix)
            samples, positions = samples[inside], positions[inside]
        if request.own and len(samples):
            own = await own_rows(context.remote, snapshot, new_rows(samples, samples), request.version)
            samples, positions = samples[own], positions[own]
        asked: OwnRows | None = None
        if request.own and plan.pairs is None:  # else epochs mix samples of all nodes into its rows
            asked = await OwnSampleFinder(context.remote).find_rows(snapshot)
        sizes = source_bytes(snapshot, samples)
        program = program_digest(plan.program_text)
        return _Scope(plan, snapshot, program, epoch, samples, positions, sizes, asked)

    async def _measure(self, decoded: DecodedCache, scope: _Scope) -> str:
        """Make some samples until the cache knows what it keeps. Returns why it keeps nothing, or ""."""
        first = np.arange(min(_MEASURED, len(scope.samples)))
        bad = rounds = 0
        while (found := decoded.plan_status(scope.program, scope.snapshot.hash)) is None:
            if not decoded.has_room or rounds == _MEASURED:
                return NO_SPACE
            rounds += 1
            window = await self._prepare(scope, first)
            try:
                bad = len((await self._make(scope, window.work)).failures)
            finally:
                window.pinned.close()
        if any(field.kept for field in found):
            return ""
        if bad == len(first):
            return f"none of the first {bad} samples can be decoded; see: mesh bad {self.request.plan[:12]}"
        return why_nothing(list(scope.plan.outputs), found, rotational=math.isfinite(decoded.disk_rate))

    async def _make_all(self, decoded: DecodedCache, scope: _Scope) -> None:
        """Make all windows, and look up the next one meanwhile."""
        at, count = 0, len(scope.samples)
        ahead: asyncio.Task[_Window] | None = None
        window: _Window | None = None
        try:
            while at < count or window is not None:
                if at < count:
                    end = window_end(scope.sizes, at, min(WINDOW_BYTES, self.rate or WINDOW_BYTES))
                    ahead = asyncio.create_task(self._begin(decoded, scope, np.arange(at, end)))
                    at = end
                if window is not None:
                    await self._finish(scope, window)
                window = None if ahead is None else await ahead
                ahead = None
        finally:
            if window is not None:
                window.pinned.close()
            await cancel_and_discard(ahead, lambda unused: unused.pinned.close())

    async def _begin(self, decoded: DecodedCache, scope: _Scope, numbers: Integers) -> _Window:
        """Count the samples of a window that need nothing, and prepare the others."""
        program, snapshot = scope.program, scope.snapshot.hash
        samples = scope.samples[numbers]
        missing = decoded.find_missing(program, snapshot, samples)
        there = decoded.find_all(program, snapshot, samples) & ~missing
        left = ~missing & ~there
        self.status.there += int(there.sum())
        metrics.decoded_cache_warmed.labels("there").inc(int(there.sum()))
        self._count_left(decoded.bound_of(program, snapshot), int(left.sum()))
        self._count(scope, numbers[~missing])
        wanted = numbers[missing]
        await self._budget.acquire_bytes(int(scope.sizes[wanted].sum()))
        if len(wanted) and self._context.read_ahead is not None:
            await self._context.read_ahead.read_samples(scope.snapshot, scope.samples[wanted])
        return await self._prepare(scope, wanted)

    async def _prepare(self, scope: _Scope, numbers: Integers) -> _Window:
        """Look up the locations of samples' bytes. Raises BatchError SnapshotChanged, Busy."""
        context = self._context
        pinned = PinnedObjects(
            context.store, scope.snapshot, context.archives, context.remote, context.memory
        )
        samples = scope.samples[numbers].tolist()
        try:
            await pinned.prepare(samples)
            sources = pinned.sample_sources(samples)
        except BaseException:
            pinned.close()
            raise
        positions = scope.positions[numbers].tolist()
        work = [
            RowWork(row, position, pieces, (), sample)
            for row, position, pieces, sample in zip(
                numbers.tolist(), positions, sources, samples, strict=True
            )
        ]
        return _Window(numbers, work, pinned)

    async def _finish(self, scope: _Scope, window: _Window) -> None:
        """Make the samples of a window, some of them again, and count them."""
        try:
            while window.work:
                again = self._settle(scope, await self._make(scope, window.work))
                window.work = [work for work in window.work if work.row in again]
                if any(again.values()):  # compacted or replaced since the lookup
                    window.pinned.close()
                    fresh = await self._prepare(scope, np.array(sorted(again), np.int64))
                    window.work, window.pinned = fresh.work, fresh.pinned
        finally:
            window.pinned.close()

    async def _make(self, scope: _Scope, work: list[RowWork]) -> RenderResult:
        request, snapshot = self.request, scope.snapshot
        samples = SampleSet(snapshot.hash, snapshot.samples, request.limit, scope.plan.bucket, scope.own)
        with tenant_scope(request.account):
            made = await self._context.pool.keep_prefixes(
                f"warm-up {scope.plan.hash}",
                scope.plan.program_text,
                scope.epoch,
                work,
                samples=samples,
                assets=asset_places(self._context.store, scope.plan.assets),
            )
        self.status.seconds += made.kept_seconds
        self.status.kept_bytes += made.kept_bytes
        return made

    def _settle(self, scope: _Scope, made: RenderResult) -> dict[int, bool]:
        """Count the rows that are finished. Returns the others, and whether to look up their bytes again."""
        again: dict[int, bool] = {}
        ended: list[int] = []
        # Refused without a reason: the segment was full. While others are stored, there is another one.
        stored = any(verdict == STORED for verdict, _ in made.kept.values())
        for row, (verdict, why) in made.kept.items():
            if verdict in (KEPT, STORED):
                self.status.there += verdict == KEPT
                self.status.stored += verdict == STORED
                metrics.decoded_cache_warmed.labels("there" if verdict == KEPT else "stored").inc()
            elif verdict == UNSTORED or why:
                self._count_left(why or TOO_LARGE)
            elif (verdict == REFUSED and stored) or self._may_try(row):
                again[row] = False
                continue
            else:
                self._count_left(NOT_SETTLED)
            ended.append(row)
        for failure in made.failures:
            if failure.kind in UNREADABLE_KINDS and self._may_try(failure.row):
                again[failure.row] = True
            else:
                self._count_bad(scope, failure)
                ended.append(failure.row)
        self._count(scope, np.array(ended, np.int64))
        return again

    def _may_try(self, row: int) -> bool:
        self._tries[row] += 1
        return self._tries[row] < _TRIES

    def _count(self, scope: _Scope, numbers: Integers) -> None:
        self.status.samples += len(numbers)
        self.status.bytes += int(scope.sizes[numbers].sum())
        for number in numbers.tolist():
            self._tries.pop(number, None)

    def _count_left(self, why: str, samples: int = 1) -> None:
        self.status.count_left(why, samples)
        metrics.decoded_cache_warmed.labels("left").inc(samples)

    def _count_bad(self, scope: _Scope, failure: Failure) -> None:
        names = list(scope.plan.outputs)
        why = f"{failure.op} of {names[failure.field]}: {failure.message}"[:_REASON]
        self.status.count_bad(scope.snapshot.sample_name(int(scope.samples[failure.row])), why)
        metrics.decoded_cache_warmed.labels("bad").inc()


CACHE_OFF: Final = (
    "the decoded cache is off: start the node with --decoded-cache auto or a size, and the job with a limit "
    "that is not 0"
)
NO_SPACE: Final = (
    "the disk of the decoded cache is nearly full (a tenth of it, at most 32 GiB, stays free): free some "
    "space, or set decoded-cache-dir to another disk"
)
RANDOM_FIRST: Final = (
    "no field has an op before its first random one, so nothing is the same in every epoch: there is nothing "
    "to keep"
)


def why_nothing(names: Sequence[str], found: Sequence[PrefixStatus], *, rotational: bool) -> str:
    """Return why no result of a plan is kept. `names`: the fields, in the order of `found`."""
    measured = [(name, field) for name, field in zip(names, found, strict=True) if field.cost]
    if not measured:
        return RANDOM_FIRST
    said = "; ".join(
        f"{name}: {field.cost * 1e3:.3g} ms to compute, {field.read * 1e3:.3g} ms to read "
        f"{field.bytes / 1000:.3g} kB back"
        for name, field in measured
    )
    where = " from a rotational disk" if rotational else ""
    help = "; set decoded-cache-dir to a faster disk" if rotational else ""
    return f"nothing is kept, because reading results back{where} would save too little ({said}){help}"


WINDOW_BYTES: Final = 16 << 20
"""Source bytes of a window; a rotational disk reads them in 0.1 s."""
WINDOW_ROWS: Final = 512


def samples_of(plan: Plan, snapshot: Snapshot, epoch: int) -> tuple[Integers, Integers]:
    """Return (samples, positions), int64[n] each: the samples in stored order, and where each is read first.

    `plan`: not a packed one, but the plan that renders its samples.
    """
    positions = np.arange(plan.positions, dtype=np.int64)
    read = snapshot_order(plan.spec, snapshot, epoch).samples_at(positions)
    samples, first = np.unique(read, return_index=True)
    return samples.astype(np.int64), first.astype(np.int64)


def in_folder(snapshot: Snapshot, samples: Integers, bucket: str, prefix: str) -> npt.NDArray[np.bool_]:
    """Return which samples have most of their bytes in objects of a bucket whose keys begin with `prefix`.
    bool[n].
    """
    numbers, places = np.unique(main_objects(snapshot, samples), return_inverse=True)
    objects = snapshot.objects
    inside = [
        objects.bucket_of(number) == bucket and objects.keys[number].startswith(prefix)
        for number in numbers.tolist()
    ]
    return np.array(inside, np.bool_)[places]


def source_bytes(snapshot: Snapshot, samples: Integers) -> Integers:
    """Return the size of each sample's source bytes. int64[n]."""
    columns = bytes_columns(snapshot).values()
    lengths = [column.lengths_at(samples) for column in columns]
    return np.asarray(np.sum(lengths, axis=0, dtype=np.int64), dtype=np.int64)


def window_end(sizes: Integers, first: int, most: int = WINDOW_BYTES) -> int:
    """Return the end of the window that begins with sample `first`: one sample, or about `most` bytes."""
    ends = np.cumsum(sizes[first : first + WINDOW_ROWS])
    return first + max(1, int(np.searchsorted(ends, most, side="right")))


class WarmUpHandlers:
    """Passes the calls of other nodes on to the coordinator behind `socket`. One instance per process."""

    def __init__(self, socket: Path) -> None:
        self._client = ProcessClient(socket, RPC_ERRORS)

    @handler(WARM_UP)
    async def warm_up(self, request: WarmUpRequest, context: CallContext) -> WarmUpStatus:
        return await self._client.call(WARM_UP_HERE, request)
