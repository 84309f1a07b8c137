"""ReadScheduler: reads the bytes of coming batches from rotational disks, one window of the epoch at a time.

Law: a plan determines the order of the whole epoch, so the samples of the next steps are known in advance.
They are divided into windows as large as the budget allows; the bytes of a window are read in disk
order, and its batches are built once the bytes are in the page cache. All jobs share the budget.
Invariant: a batch is always built: without a window, its bytes are read when it is built.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.batches.read_ahead.arrivals import Arrivals, Progress, Window
from meshd.batches.read_ahead.disk_reader import DiskReader, DiskWork
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.read_ahead.windows import (
    MIN_WINDOW_BYTES,
    awaited_size,
    cut_window,
    first_size,
    fitting_size,
    has_room,
    next_size,
    window_between,
)
from meshd.telemetry import metrics
from meshd.telemetry.training_metrics import DIGITS, plan_read_ahead
from meshd.transform.renderer import RowWork, program_digest
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.timeouts import timeout
from meshwire.plan.epoch_order import snapshot_order

if TYPE_CHECKING:
    from meshd.batches.read_ahead.own_samples import OwnSamples
    from meshd.batches.read_ahead.read_hints import PackedReads, PlannedFrame
    from meshd.batches.read_ahead.window_lookup import WindowLookup
    from meshd.batches.read_ahead.windows import Integers
    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan
    from meshd.transform.decoded_cache.cache import DecodedCache
    from meshd.transform.source_files import Pieces
    from meshd.util.clock import Clock
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.shuffle import SampleOrder

_log = logging.getLogger("meshd.read_ahead")
MAX_CURSORS: Final = 16
IDLE_SECONDS: Final = 120.0
"""A cursor from which no frame was requested for this long is dropped."""
CONTENDED_IDLE_SECONDS: Final = 5.0
"""The same while there are other readers, unless its own pauses are longer: see `_patience`."""
WAIT_SECONDS: Final = 2.0
"""How long reads for other nodes wait for a window."""
_BEHIND: Final = 2  # batches of margin, since ranks are not all in the same step
_IN_FLIGHT: Final = 4  # batches that a loader requests at once: any of them may arrive first
_REACH: Final = 32  # batches: a request this far from the others of its epoch begins a cursor of its own


class _Cursor(msgspec.Struct, eq=False):
    """The place of one reader of an epoch. `windows`: in order and adjacent, those not yet consumed; `start`:
    the first position that had a window; `next`: the first after it that has none; `size`: bytes of the next
    window; `in_parts`: each node builds its own rows; `use_decoded`: no job reads what is decoded already;
    `started`: a frame was requested; `pause`: the longest time between two requests so far, in seconds;
    `packed`: what the rows of a packed plan read; `usual`: see `next_size`."""

    plan: Plan
    snapshot: Snapshot
    epoch: int
    order: SampleOrder
    start: int
    next: int
    size: int
    batch: int
    furthest: int
    used: float
    windows: deque[Window] = msgspec.field(default_factory=deque)
    growing: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    looking_up: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    in_parts: bool = False
    use_decoded: bool = True
    packed: PackedReads | None = None
    usual: int = 0
    started: bool = False
    pause: float = 0.0
    extending: bool = False
    dropped: bool = False

    @property
    def bytes(self) -> int:
        return sum(window.bytes for window in self.windows)

    @property
    def active(self) -> bool:
        """Whether frames are requested and more will be: neither ended nor the epoch to come."""
        return self.started and self.furthest + self.batch < self.order.n

    def covers(self, plan: str, epoch: int, first: int) -> bool:
        """Return whether a request at this position belongs to this reader."""
        reach = _REACH * self.batch
        same = self.plan.hash == plan and self.epoch == epoch
        return same and self.furthest - reach <= first < self.next + reach


class ReadScheduler:
    """Reads ahead for all plans of a node. Use on one event loop only; `aclose` at the end.

    `budget`: bytes of page cache that windows may use at a time; `decoded`: has samples whose bytes are not
    needed; `own`: finds the samples that the node reads itself.
    """

    def __init__(
        self,
        lookup: WindowLookup,
        clock: Clock,
        budget: int,
        decoded: DecodedCache | None = None,
        own: OwnSampleFinder | None = None,
    ) -> None:
        self._decoded, self._own = decoded, own or OwnSampleFinder()
        self._lookup, self._clock, self._budget = lookup, clock, max(budget, 2 * MIN_WINDOW_BYTES)
        self._cursors: list[_Cursor] = []
        self._readers: dict[int, DiskReader] = {}
        self._progress = Progress()
        self._tasks = BackgroundTasks("read-ahead")

    def __repr__(self) -> str:
        return f"<ReadScheduler {len(self._cursors)} cursors, {self._held_bytes()} of {self._budget} bytes>"

    def frame_requested(self, frame: PlannedFrame) -> None:
        """Note that a frame is requested: this is the reader's place. Returns at once.

        When the last window of an epoch is planned, the first one of the next epoch is, too.
        """
        try:
            self._note_request(frame)
        except Exception:  # the builder reports what is wrong with the plan
            _log.exception("cannot read the batches of a plan ahead")

    def _note_request(self, frame: PlannedFrame) -> None:
        address, first = frame.address, frame.address.first_position
        self._drop_idle()
        cursor = self._find(address.plan, address.epoch, first)
        if cursor is None:
            start = max(address.origin, first - _IN_FLIGHT * address.batch)
            cursor = self._begin(frame, address.epoch, start)
        now = self._clock.monotonic()
        cursor.pause = max(cursor.pause, now - cursor.used) if cursor.started else 0.0
        cursor.used, cursor.started, cursor.in_parts = now, True, frame.in_parts
        cursor.furthest = max(cursor.furthest, first)
        cursor.use_decoded &= frame.use_decoded
        while cursor.windows and cursor.windows[0].end <= cursor.furthest - _BEHIND * cursor.batch:
            cursor.windows.popleft()
        self._extend(cursor)
        if cursor.next >= cursor.order.n and self._find(address.plan, address.epoch + 1, 0) is None:
            later = self._begin(frame, address.epoch + 1, 0)
            later.use_decoded = cursor.use_decoded
            self._extend(later)

    async def arrivals(self, address: FrameAddress) -> Arrivals:
        """Return the reads ahead that a frame's batch waits for, when the first bytes are there; none if none
        are to be made."""
        first = address.first_position
        cursor = self._find(address.plan, address.epoch, first)
        if cursor is None:
            return Arrivals()
        began, windows = self._clock.monotonic(), list[Window]()
        try:
            windows = await self._windows_of(cursor, first, min(first + address.batch, cursor.order.n))
        except Exception:
            _log.exception("cannot wait for the reads ahead of a batch; it is built without them")
        metrics.read_ahead_wait_seconds.inc(self._clock.monotonic() - began)
        found = Arrivals(windows, self._clock)
        await found.until_begun()
        return found

    async def _windows_of(self, cursor: _Cursor, first: int, end: int) -> list[Window]:
        """Return the windows of the positions first…end−1 that have not been read yet; they are now."""
        async with cursor.growing:
            if first < cursor.start:
                await self._add_window_before(cursor, first)
            while cursor.next < end and not cursor.dropped:
                await self._add_window(cursor)
        found = [each for each in cursor.windows if each.first < end and each.end > first]
        for window in (unread := [each for each in found if not each.read.is_set()]):
            window.prioritize(self._readers)
        return unread

    async def wait_for_pieces(self, pieces: Pieces) -> None:
        """Wait until windows that are being read have brought these pieces of files, for WAIT_SECONDS at
        most; at once for others."""
        windows = [each for cursor in self._cursors for each in cursor.windows if not each.read.is_set()]
        with suppress(TimeoutError):
            async with timeout(WAIT_SECONDS):
                async for _ in Arrivals(windows, self._clock).groups([RowWork(0, 0, (pieces,))]):
                    return

    async def read_samples(self, snapshot: Snapshot, samples: Integers) -> None:
        """Read the bytes of these samples in the order of the disk, behind all windows of batches.

        Returns when they are in the page cache. samples: int64[n].
        """
        window = Window(0, len(samples), 0, self._progress)
        try:
            await self._submit(snapshot, samples, window, background=True)
            await window.read.wait()
        finally:
            for work in window.works:
                work.cancelled = True

    async def aclose(self) -> None:
        """Stop reading; waiting frames are built without it."""
        while self._cursors:
            self._drop(self._cursors[-1])
        await self._tasks.aclose()
        for reader in self._readers.values():
            await asyncio.to_thread(reader.close)
        self._readers.clear()

    def _held_bytes(self) -> int:
        return sum(cursor.bytes for cursor in self._cursors)

    def _find(self, plan: str, epoch: int, first: int) -> _Cursor | None:
        return next((each for each in self._cursors if each.covers(plan, epoch, first)), None)

    def _own_samples(
        self, snapshot: Snapshot, packed: PackedReads | None, *, in_parts: bool
    ) -> OwnSamples | None:
        """Return the samples that the node reads itself; None if it reads all that a plan needs."""
        if packed is not None and not packed.in_objects:
            return None
        return self._own.find(snapshot, in_parts=in_parts)

    def _begin(self, frame: PlannedFrame, epoch: int, first: int) -> _Cursor:
        """Begin at a position with a window that costs no more than the seeks of one batch would."""
        plan, snapshot, batch, in_parts = frame.plan, frame.snapshot, frame.address.batch, frame.in_parts
        packed, own = frame.packed, self._own_samples(snapshot, frame.packed, in_parts=in_parts)
        order = packed.order(epoch) if packed else snapshot_order(plan.spec, snapshot, epoch)
        share, now = own.fraction if own else 1.0, self._clock.monotonic()
        size = usual = first_size(order, batch * share)
        if epoch == frame.address.epoch and packed is None:  # else nobody waits for it yet
            size = awaited_size(order, batch * share, snapshot, share)
        cursor = _Cursor(
            plan, snapshot, epoch, order, first, first, size, batch, first, now,
            in_parts=in_parts, packed=packed, usual=usual,
        )  # fmt: skip
        if len(self._cursors) == MAX_CURSORS:
            self._drop(min(self._cursors, key=lambda each: each.used))
        self._cursors.append(cursor)
        return cursor

    def _drop(self, cursor: _Cursor) -> None:
        cursor.dropped = True
        self._cursors.remove(cursor)
        for window in cursor.windows:
            window.give_up()
        cursor.windows.clear()

    def _drop_idle(self) -> None:
        now, started = self._clock.monotonic(), sum(cursor.started for cursor in self._cursors)
        for cursor in list(self._cursors):
            if now - cursor.used > self._patience(cursor, contended=started > 1):
                self._drop(cursor)

    @staticmethod
    def _patience(cursor: _Cursor, *, contended: bool) -> float:
        """Return the seconds without a request after which a reader is dropped. One that has ended, or rests
        for long, must not hold a share of the budget: smaller windows cost the others seeks. What it had read
        stays in the page cache."""
        if not contended or not cursor.started:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(CONTENDED_IDLE_SECONDS, 3 * cursor.pause))

    def _share(self) -> int:
        """Return the bytes that each active reader may hold."""
        return self._budget // max(1, sum(cursor.active for cursor in self._cursors))

    def _has_room(self, cursor: _Cursor) -> bool:
        """Return whether to add a window: always one, and more within the share once the reader started."""
        if cursor.next >= cursor.order.n or cursor.dropped:
            return False
        held = [window.bytes for window in cursor.windows]
        return not held or (cursor.started and has_room(cursor.order, held, cursor.size, self._share()))

    def _extend(self, cursor: _Cursor) -> None:
        if not cursor.extending and self._has_room(cursor):
            cursor.extending = True
            self._tasks.spawn(self._grow(cursor), "grow")

    async def _grow(self, cursor: _Cursor) -> None:
        """Add windows until the reader's share of the budget is used."""
        try:
            async with cursor.growing:
                while self._has_room(cursor):
                    await self._add_window(cursor)
        finally:
            cursor.extending = False

    async def _add_window(self, cursor: _Cursor) -> None:
        """Add the next window and start to read it. The caller holds `growing`."""
        size = fitting_size(cursor.size, self._share())
        own = self._own_samples(cursor.snapshot, cursor.packed, in_parts=cursor.in_parts)
        where = cursor.snapshot, cursor.order, cursor.next
        cut = await asyncio.to_thread(cut_window, *where, size, own, cursor.packed)
        window = Window(cut.first, cut.end, cut.bytes, self._progress)
        cursor.next = cut.end
        cursor.size = next_size(cursor.order, cursor.size, self._budget, cursor.usual)
        if not cursor.dropped:
            cursor.windows.append(window)
            metrics.read_ahead_window_bytes.set(self._held_bytes())
            self._tasks.spawn(self._read_in_order(cursor, window, cut.samples), "window")

    async def _add_window_before(self, cursor: _Cursor, first: int) -> None:
        """Add a window from a late request to where the reader began. The caller holds `growing`."""
        own = self._own_samples(cursor.snapshot, cursor.packed, in_parts=cursor.in_parts)
        where = cursor.snapshot, cursor.order, first
        cut = await asyncio.to_thread(window_between, *where, cursor.start, own, cursor.packed)
        window = Window(first, cursor.start, cut.bytes, self._progress)
        cursor.start = first
        if not cursor.dropped:
            cursor.windows.appendleft(window)
            self._tasks.spawn(self._read(cursor, window, cut.samples), "window")

    async def _read_in_order(self, cursor: _Cursor, window: Window, samples: Integers) -> None:
        """Read a window behind those before it. Looked up at the same time, a later one may be found first,
        and the disk would read it while a batch waits for the earlier one."""
        async with cursor.looking_up:
            await self._read(cursor, window, samples)

    async def _read(self, cursor: _Cursor, window: Window, samples: Integers) -> None:
        """Look up the bytes of a window and queue the reads of each disk."""
        try:
            if self._decoded is not None and cursor.use_decoded and cursor.packed is None:
                program, snapshot = program_digest(cursor.plan.program_text), cursor.snapshot.hash
                samples = samples[~self._decoded.find_all(program, snapshot, samples)]
            if not cursor.dropped:
                name = cursor.plan.hash
                await self._submit(cursor.snapshot, samples, window, plan=name, packed=cursor.packed)
        except Exception:
            _log.exception("cannot read a window of upcoming batches ahead")
            window.give_up()

    async def _submit(
        self,
        snapshot: Snapshot,
        samples: Integers,
        window: Window,
        *,
        background: bool = False,
        plan: str = "",
        packed: PackedReads | None = None,
    ) -> None:
        """Queue the reads of these samples, or packed rows; they set `window.read` when they have ended."""
        try:
            if packed is None:
                reads = await self._lookup.reads_of(snapshot, samples)
            else:
                reads = await self._lookup.reads_of_rows(packed, samples)
            left, loop = len(reads), asyncio.get_running_loop()

            def count_down() -> None:
                nonlocal left
                left -= 1
                if not left:
                    window.finish()

            def finished() -> None:  # in the disk's thread
                loop.call_soon_threadsafe(count_down)

            def advanced() -> None:  # in the disk's thread
                loop.call_soon_threadsafe(self._progress.tell)

            if window.read.is_set():  # the reader was dropped
                return
            metrics.read_ahead_samples.inc(len(samples) if reads else 0)
            if plan and reads:
                plan_read_ahead.labels(plan[:DIGITS]).inc(len(samples))
            for part in reads:
                work = DiskWork(
                    part.device, part.paths, part.reads, finished, window.urgent, background, plan, advanced
                )
                window.works.append(work)
                self._reader(work.device).submit(work)
        finally:
            if not window.works:
                window.finish()

    def _reader(self, device: int) -> DiskReader:
        found = self._readers.get(device)
        if found is None:
            found = self._readers[device] = DiskReader(device, self._clock)
        return found
