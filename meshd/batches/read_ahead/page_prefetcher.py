"""PagePrefetcher: opens the pages of a snapshot before the batches that need them.

A page that is opened for the first time is read and compared with its checksum, some 30 microseconds for
10,000 samples, and a batch of a full shuffle needs as many pages as it has samples. The plan knows which ones
the next batches need.

Law: pages are opened in threads, never on the event loop; those of a batch that waits come before all others.
What is opened ahead is bounded, by batches and by samples; of a small snapshot, whose columns are joined in
memory, it is all pages. A page that cannot be opened is left to the batch that needs it, which reports why.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from meshd.core.api_errors import BatchError
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshd.batches.read_ahead.read_hints import PlannedFrame
    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.frame.columns import Integers

    SamplesAt = Callable[[FrameAddress, Plan, Snapshot], Integers]
    """Returns the samples of a frame. Raises BatchError InvalidPlan."""

AHEAD_STEPS: Final = 32
AHEAD_ROWS: Final = 32_768
"""Steps, and rows of them, whose pages are opened ahead; of one step in any case."""
FEW_PAGES: Final = 64
"""Pages of a snapshot that are not worth opening ahead. Other batches take turns after so many."""
_KNOWN: Final = 4096  # addresses
_QUEUED: Final = 1024  # addresses
_THREADS: Final = 2  # for a batch that waits: pages are hashed without the GIL


class OpenPages(Protocol):
    """Knows which pages this process has opened."""

    def closed_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        """Return those of some pages that are not open, and can be. Takes 0.1 microseconds a page."""
        ...


def coming_frames(plan: Plan, address: FrameAddress) -> Iterator[FrameAddress]:
    """Yield the addresses that the reader of a frame asks for next, in order, without end: those of its
    epoch, then of the epochs after it."""
    while True:
        left = plan.step_count(address.batch, address.origin)
        for step in range(address.step + 1, left):
            yield msgspec.structs.replace(address, step=step)
        if not plan.step_count(address.batch):
            return
        address = msgspec.structs.replace(address, epoch=address.epoch + 1, step=-1, origin=0)


def frames_ahead(plan: Plan, address: FrameAddress) -> list[FrameAddress]:
    """Return the addresses whose pages are opened when the frame at `address` is requested."""
    count = min(AHEAD_STEPS, max(1, AHEAD_ROWS * address.world // address.batch))
    return list(itertools.islice(coming_frames(plan, address), count))


def pages_needed(snapshot: PagedSnapshot, samples: Integers) -> list[int]:
    """Return the pages of some samples, each once, in the order in which the samples need them."""
    numbers, firsts = np.unique(snapshot.pages.numbers_of(samples), return_index=True)
    found: list[int] = numbers[np.argsort(firsts)].tolist()
    return found


class PagePrefetcher:
    """Opens pages ahead for a process that builds frames. Use on one event loop only; `aclose` at the end."""

    def __init__(self, pages: OpenPages, samples_at: SamplesAt) -> None:
        self._pages, self._samples_at = pages, samples_at
        # By frame, or by the hash of a snapshot all of whose pages are opened.
        self._known: OrderedDict[FrameAddress | str, bool] = OrderedDict()  # True: the pages were opened
        self._queue: OrderedDict[FrameAddress | str, tuple[Plan, PagedSnapshot]] = OrderedDict()
        self._waiting = 0  # batches whose pages are being opened
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._running = False
        self._tasks = BackgroundTasks("page-prefetch")

    def __repr__(self) -> str:
        return f"<PagePrefetcher, {len(self._queue)} frames queued>"

    def frame_requested(self, frame: PlannedFrame) -> None:
        """Note that a frame is being built: the pages of those after it are opened. Returns at once."""
        plan, snapshot, address = frame.plan, frame.snapshot, frame.address
        if not isinstance(snapshot, PagedSnapshot) or len(snapshot.table) <= FEW_PAGES:
            return
        self._queue.pop(address, None)
        with suppress(PlanError):  # the builder reports it
            ahead = [snapshot.hash] if snapshot.pages.is_small else frames_ahead(plan, address)
            for coming in ahead:
                if coming not in self._known:
                    self._note(coming, opened=False)
                    self._queue[coming] = plan, snapshot
        while len(self._queue) > _QUEUED:
            self._queue.popitem(last=False)
        if self._queue and not self._running:
            self._running = True
            self._tasks.spawn(self._open_queued(), "open")

    async def open_now(
        self, snapshot: Snapshot, samples: Integers, address: FrameAddress | None = None
    ) -> None:
        """Open the pages of the samples of a frame, which is built next, in threads. `address`: of the
        frame, if its pages may have been opened ahead."""
        if not isinstance(snapshot, PagedSnapshot) or self._known.get(snapshot.hash):
            return
        if address is not None and self._known.get(address):
            return
        pages = range(len(snapshot.table))
        if len(pages) <= FEW_PAGES and not self._pages.closed_pages(snapshot, pages):
            return  # which ones the samples need is the greater part of the work
        closed = self._pages.closed_pages(snapshot, pages_needed(snapshot, samples))
        if not closed:
            return
        self._waiting += 1
        self._nobody_waits.clear()
        try:
            parts = [closed[first::_THREADS] for first in range(_THREADS)]
            await asyncio.gather(*(asyncio.to_thread(_open_all, snapshot, part) for part in parts if part))
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._nobody_waits.set()
        metrics.snapshot_pages_opened.labels("waited").inc(len(closed))

    async def aclose(self) -> None:
        """Stop opening pages ahead."""
        self._queue.clear()
        await self._tasks.aclose()

    def _note(self, name: FrameAddress | str, *, opened: bool) -> None:
        self._known[name] = opened
        self._known.move_to_end(name)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    async def _open_queued(self) -> None:
        try:
            while self._queue:
                name, (plan, snapshot) = self._queue.popitem(last=False)
                try:
                    await self._open_ahead(name, plan, snapshot)
                except BatchError:  # the builder reports it
                    continue
        finally:
            self._running = False

    async def _open_ahead(self, name: FrameAddress | str, plan: Plan, snapshot: PagedSnapshot) -> None:
        if isinstance(name, str):
            needed: Sequence[int] = range(len(snapshot.table))
        else:
            needed = pages_needed(snapshot, self._samples_at(name, plan, snapshot))
        closed, opened = self._pages.closed_pages(snapshot, needed), 0
        for first in range(0, len(closed), FEW_PAGES):
            await self._nobody_waits.wait()
            # Some were opened meanwhile, for a batch that needed them at once.
            some = self._pages.closed_pages(snapshot, closed[first : first + FEW_PAGES])
            opened += await asyncio.to_thread(_open_all, snapshot, some)
        metrics.snapshot_pages_opened.labels("ahead").inc(opened)
        self._note(name, opened=True)
        await asyncio.sleep(0)  # give frames a turn


def _open_all(snapshot: PagedSnapshot, numbers: Sequence[int]) -> int:
    """Open these pages (blocking), and return how many could be."""
    opened = 0
    for number in numbers:
        try:
            snapshot.pages.open(number)
        except BatchError:  # the batch that needs it reports it
            continue
        opened += 1
    return opened
