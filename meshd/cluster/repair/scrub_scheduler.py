"""Scrub scheduler: periodic verification of all stored bytes, comparison with other owners, and repair.

Law: one per node, in its coordinator. A pass starts on schedule or on request (`scrub/NODE` in the
control store); damaged data is fetched from other owners as soon as it is quarantined, during a pass or
not. The rate is limited to a number of bytes per second and lower while clients are active. It publishes
`scrubs/NODE`.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.control.control_api import ControlError, VersionConflictError
from meshd.store.disks.health_monitor import DiskState  # noqa: TC001  msgspec reads the annotations
from meshd.store.errors import StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.control_api import ControlStore
    from meshd.store.store import Store
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.scrubbing")
REQUEST_TOPIC: Final = "scrub"
STATUS_TOPIC: Final = "scrubs"
_POLL_INTERVAL: Final = 0.5  # seconds between two looks at what is asked and what is damaged
_SLICE: Final = 1.0  # seconds of scrubbing in between
_PUBLISH_INTERVAL: Final = 1.0
_COUNT_INTERVAL: Final = 60.0
_RETRY_INTERVAL: Final = 30.0  # seconds until what could not be mended is tried again
_IDLE_FACTOR: Final = 20.0  # a look at the whole quarantine takes at most a part of so many of the time


class ScrubRequest(msgspec.Struct, frozen=True):
    """`scrub/NODE`: the number of the last request for a pass; a higher one is a new request."""

    number: int


class ScrubStatus(msgspec.Struct, frozen=True):
    """`scrubs/NODE`: what the scrubber does. Times in ms since the epoch. `asked`: the last request it
    heeded; `total`: bytes in use; `compared`: whether the node was compared with the other owners after the
    pass; `damaged` and `mended`: versions, since it began; `quarantined`: now, of `lacking` bytes, and `eta`:
    seconds until they are restored, None when nobody knows; `disks`: of this node; `debt`: names of which
    this node decides and fewer copies are there than asked."""

    running: bool = False
    asked: int = 0
    began: int = 0
    ended: int = 0
    bytes: int = 0
    total: int = 0
    damaged: int = 0
    mended: int = 0
    quarantined: int = 0
    compared: bool = True
    lacking: int = 0
    eta: int | None = None
    disks: tuple[DiskState, ...] = ()
    debt: int = 0


async def publish_disks(control: ControlStore, node_id: str, disks: tuple[DiskState, ...]) -> None:
    """What a node that ends says last of its disks; of others stays what it said before. Raises
    ControlError."""
    place = f"{STATUS_TOPIC}/{node_id}"
    entry = await control.get(place)
    told = ScrubStatus() if entry is None else msgspec.json.decode(entry.value, type=ScrubStatus)
    known = {disk.path: disk for disk in (*told.disks, *disks)}
    told = msgspec.structs.replace(told, running=False, disks=tuple(known.values()))
    await control.put(place, msgspec.json.encode(told))


class RateLimiter:
    """At most so many bytes a second, over `rest`."""

    def __init__(self, clock: Clock, rest: Callable[[int], Awaitable[None]], rate: float) -> None:
        self._clock, self._rest, self._rate = clock, rest, rate
        self._free = clock.monotonic()

    async def throttle(self, size: int) -> None:
        """Between two pieces of work of `size` bytes."""
        await self._rest(size)
        now = self._clock.monotonic()
        self._free = max(self._free, now - 1.0) + size / self._rate
        if self._free > now:
            await asyncio.sleep(self._free - now)


class EtaEstimator:
    """How fast a number of bytes that are still to come falls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._most = self._left = 0
        self._began = 0.0

    def observe_remaining(self, left: int) -> None:
        """So many are to come now."""
        if left > self._left:
            self._most, self._began = left, self._clock.monotonic()
        self._left = left

    def eta_seconds(self) -> int | None:
        """Seconds until none are, None when nobody knows."""
        done = self._most - self._left
        if not self._left:
            return 0
        return round(self._left * (self._clock.monotonic() - self._began) / done) if done else None


def _is_over(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()


class ScrubScheduler:
    """See the module. `mend`: tries to restore what is in quarantine, and calls its argument with how many
    were restored as it goes; `compare`: has the node compared with the other owners; `every`: seconds from
    the beginning of one pass to the next."""

    def __init__(
        self,
        node_id: str,
        store: Store,
        control: ControlStore,
        clock: Clock,
        *,
        mend: Callable[[Callable[[int], None]], Awaitable[None]],
        compare: Callable[[], Awaitable[object]],
        rest: Callable[[int], Awaitable[None]],
        every: float,
        debts: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._node_id, self._store, self._control, self._clock = node_id, store, control, clock
        self._mend, self._compare, self._rest, self._every = mend, compare, rest, every
        self._published: ScrubStatus | None = None
        self._version: int | None = None  # of what was told last, None when it is not known
        self._told_at = self._mended_at = -_RETRY_INTERVAL
        self._counted, self._counted_at = 0, inf
        self._mended = 0
        self._expected = 0  # versions in quarantine that nobody could give when all were asked
        self._lacking, self._sweep_at = 0, -_RETRY_INTERVAL
        self._restoring = EtaEstimator(clock)
        self._mending: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[object] | None = None
        self._restored: asyncio.Task[object] | None = None
        self._disks: tuple[DiskState, ...] = ()
        self._debts, self._debt = debts, 0
        self._counting: asyncio.Task[int] | None = None

    def __repr__(self) -> str:
        return f"<Scrubber of {self._node_id}: {self._store.scrub!r}>"

    async def run(self) -> None:
        """For ever."""
        said = False
        try:
            while True:
                try:
                    await self.run_once()
                    said = False
                except (StoreError, ControlError) as error:
                    level = logging.DEBUG if said else logging.WARNING
                    _log.log(level, "the scrub has to wait, and goes on by itself", extra={"why": str(error)})
                    said = True
                await asyncio.sleep(_POLL_INTERVAL)
        finally:
            for task in (self._comparing, self._restored, self._mending, self._counting):
                if task is not None:
                    task.cancel()

    async def run_once(self) -> None:
        """Begin what is due, scrub for a moment, mend. Raises StoreError, ControlError."""
        scrub, asked = self._store.scrub, self._requested_pass()
        if asked > scrub.state.asked or self._is_due():
            self._mended, self._counted_at = 0, inf
            await scrub.start_pass(max(asked, scrub.state.asked))
        if scrub.state.running:
            until = self._clock.monotonic() + _SLICE
            while self._clock.monotonic() < until:
                if not await scrub.scrub_next_file(self._rest):
                    self._finish_pass()
                    break
        await self._repair_if_due()
        self._refresh_under_replication()
        await self._publish()

    def _requested_pass(self) -> int:
        entry = self._control.cached_entries(REQUEST_TOPIC).get(f"{REQUEST_TOPIC}/{self._node_id}")
        return 0 if entry is None else msgspec.json.decode(entry.value, type=ScrubRequest).number

    def _is_due(self) -> bool:
        """The first pass of a new store comes when there has been time for something to rot."""
        state = self._store.scrub.state
        began = max(state.began, self._store.scrub.born)
        return not state.running and self._clock.now_ms() - began > self._every * 1e3

    def _finish_pass(self) -> None:
        state = self._store.scrub.state
        _log.info(
            "scrubbed", extra={"bytes": state.bytes, "extents": state.extents, "damaged": state.damaged}
        )
        self._sweep_at = -_RETRY_INTERVAL  # what is told of a pass that has ended is what is so then
        if self._comparing is None or self._comparing.done():
            self._comparing = asyncio.ensure_future(self._compared())

    async def _compared(self) -> None:
        try:
            await self._compare()
        except Exception:
            _log.exception("the comparison after a scrub failed; the next one is made in its time")

    async def _repair_if_due(self) -> None:
        """Mend what is new in quarantine at once, and what could not be mended now and then. What was lost
        with a disk is more than that: the comparison with the other owners brings it."""
        began = self._clock.monotonic()
        if began >= self._sweep_at:
            await self._store.prune_quarantine()
            self._lacking = await self._store.quarantined_bytes()
            now = self._clock.monotonic()
            self._sweep_at = now + _IDLE_FACTOR * (now - began)
        self._restoring.observe_remaining(self._lacking)
        if self._store.disk_health.take_data_lost_flag() and _is_over(self._restored):
            self._restored = asyncio.ensure_future(self._compared())
        if not _is_over(self._mending) or not _is_over(self._restored):
            return
        ended, self._mending = self._mending, None
        if ended is not None:
            ended.result()
        left = self._store.quarantined_count()
        if left and (left > self._expected or began - self._mended_at > _RETRY_INTERVAL):
            self._mended_at, self._expected = began, left
            self._mending = asyncio.ensure_future(self._mend(self._count_repaired))

    def _count_repaired(self, number: int) -> None:
        """As it happens: a try may have begun before the pass that counts it."""
        self._mended, self._expected = self._mended + number, self._expected - number

    async def _total(self) -> int:
        """Bytes that are compared, of a while ago: every data file is counted for it."""
        now = self._clock.monotonic()
        if not self._counted_at <= now < self._counted_at + _COUNT_INTERVAL:
            self._counted = (await asyncio.to_thread(self._store.stats)).live_bytes
            self._counted_at = now
        return self._counted

    def _refresh_under_replication(self) -> None:
        if self._debts is None or not _is_over(self._counting):
            return
        if self._counting is not None and self._counting.exception() is None:
            self._debt = self._counting.result()
        metrics.cluster_names_short.set(self._debt)
        self._counting = asyncio.ensure_future(self._debts())

    async def _publish(self) -> None:
        state = self._store.scrub.state
        self._disks = tuple(await asyncio.to_thread(self._store.disk_health.disk_states))
        metrics.scrub_ended.set(state.ended / 1e3)
        busy = not all(map(_is_over, (self._comparing, self._mending, self._restored)))
        told = ScrubStatus(
            state.running,
            state.asked,
            state.began,
            state.ended,
            state.bytes,
            await self._total(),
            state.damaged,
            self._mended,
            self._store.quarantined_count(),
            not state.running and not busy,
            self._lacking,
            self._restoring.eta_seconds(),
            self._disks,
            self._debt,
        )
        now = self._clock.monotonic()
        if told == self._published or (state.running and now - self._told_at < _PUBLISH_INTERVAL):
            return
        if await self._put(f"{STATUS_TOPIC}/{self._node_id}", msgspec.json.encode(told)):
            self._published, self._told_at = told, now

    async def _put(self, place: str, told: bytes) -> bool:
        """Not over what was said while this was on its way, the last word of a node that ends: then what is
        so by then is told at the next turn. Raises ControlError."""
        if self._version is None:
            entry = await self._control.get(place)
            self._version = 0 if entry is None else entry.version
        expected, self._version = self._version, None
        try:
            self._version = await self._control.put(place, told, expect=expected)
        except VersionConflictError:
            return False
        return True
