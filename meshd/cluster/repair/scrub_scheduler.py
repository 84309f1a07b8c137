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

from meshd.cluster.repair.decaying_disks import DecayingDisks
from meshd.control.control_api import ControlError, VersionConflictError
from meshd.store.disks.health_monitor import DiskState  # noqa: TC001  msgspec reads the annotations
from meshd.store.errors import StoreError
from meshd.telemetry import metric_registry, metrics
from meshd.util.async_tasks import sleep_to_tick

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.control_api import ControlStore
    from meshd.store.store import Store
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.scrubbing")
REQUEST_TOPIC: Final = "scrub"
STATUS_TOPIC: Final = "scrubs"
_POLL_INTERVAL: Final = 0.5  # seconds between checks for requests and damage during a pass or a repair
_IDLE_INTERVAL: Final = 1.0  # and otherwise
_SLICE: Final = 1.0  # seconds of scrubbing between such checks
_DISKS_INTERVAL: Final = 5.0  # seconds between two looks at how full disks are that all serve
_COUNT_INTERVAL: Final = 60.0
_RETRY_INTERVAL: Final = 30.0  # seconds until a failed repair is retried
_IDLE_FACTOR: Final = 20.0  # scanning the whole quarantine takes at most 1/20 of the time


class ScrubRequest(msgspec.Struct, frozen=True):
    """`scrub/NODE`: the number of the last request for a pass; a higher number is a new request."""

    number: int


class ScrubStatus(msgspec.Struct, frozen=True):
    """`scrubs/NODE`: the state of a node's scrub. Times in ms since the epoch. `asked`: the last request
    served; `total`: bytes in use; `compared`: the node was compared with the other owners after the pass;
    `damaged` and `mended`: versions since it began; `quarantined`: versions now, of `lacking` bytes, and
    `eta`: seconds until they are restored, None if unknown; `disks`: the node's disks; `debt`: names that
    this node is primary of with too few copies."""

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
    """Publishes the final disk states of a node that is about to stop, next to what it published of its other
    disks. Raises ControlError."""
    key = f"{STATUS_TOPIC}/{node_id}"
    entry = await control.get(key)
    status = ScrubStatus() if entry is None else msgspec.json.decode(entry.value, type=ScrubStatus)
    known = {disk.path: disk for disk in (*status.disks, *disks)}
    status = msgspec.structs.replace(status, running=False, disks=tuple(known.values()))
    await control.put(key, msgspec.json.encode(status))


class RateLimiter:
    """Limits a byte rate, in addition to `throttle`."""

    def __init__(self, clock: Clock, throttle: Callable[[int], Awaitable[None]], rate: float) -> None:
        self._clock, self._throttle, self._rate = clock, throttle, rate
        self._free = clock.monotonic()

    async def throttle(self, size: int) -> None:
        """Accounts for `size` bytes of work and waits as long as the rate requires."""
        await self._throttle(size)
        now = self._clock.monotonic()
        self._free = max(self._free, now - 1.0) + size / self._rate
        if self._free > now:
            await asyncio.sleep(self._free - now)


class EtaEstimator:
    """Estimates the remaining time from how fast a number of remaining bytes falls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._most = self._left = 0
        self._began = 0.0

    def observe_remaining(self, left: int) -> None:
        """Records the number of remaining bytes."""
        if left > self._left:
            self._most, self._began = left, self._clock.monotonic()
        self._left = left

    def eta_seconds(self) -> int | None:
        """Returns the seconds until none remain; None if unknown."""
        done = self._most - self._left
        if not self._left:
            return 0
        return round(self._left * (self._clock.monotonic() - self._began) / done) if done else None


def _is_over(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()


class ScrubScheduler:
    """Schedules scrubs; see the module. `repair` tries to restore what is in quarantine and calls its
    argument with the number of restored versions as it goes; `compare` compares the node with the other
    owners; `every`: seconds between the starts of two passes; `publish_interval`: seconds for which a report
    waits in which nothing but amounts has changed."""

    def __init__(
        self,
        node_id: str,
        store: Store,
        control: ControlStore,
        clock: Clock,
        *,
        repair: Callable[[Callable[[int], None]], Awaitable[None]],
        compare: Callable[[], Awaitable[object]],
        throttle: Callable[[int], Awaitable[None]],
        every: float,
        count_under_replicated: Callable[[], Awaitable[int]] | None = None,
        publish_interval: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._node_id, self._store, self._control, self._clock = node_id, store, control, clock
        self._repair, self._compare, self._throttle, self._every = repair, compare, throttle, every
        self._published: ScrubStatus | None = None
        self._version: int | None = None  # of the published document, None if unknown
        self._published_at = self._repaired_at = -_RETRY_INTERVAL
        self._counted, self._counted_at = 0, inf
        self._repaired = 0
        self._expected = 0  # quarantined versions that no node could supply at the last attempt
        self._lacking, self._sweep_at = 0, -_RETRY_INTERVAL
        self._repair_eta = EtaEstimator(clock)
        self._repairing: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[object] | None = None
        self._disk_loss_comparison: asyncio.Task[object] | None = None
        self._disks: tuple[DiskState, ...] = ()
        self._disk_silent = False
        self._disks_at, self._decaying = -_DISKS_INTERVAL, DecayingDisks(clock, store.scrub.state.damage)
        self._count_under_replicated, self._under_replicated = count_under_replicated, 0
        self._publish_interval = publish_interval
        self._counting: asyncio.Task[int] | None = None

    def __repr__(self) -> str:
        return f"<ScrubScheduler of {self._node_id}: {self._store.scrub!r}>"

    async def run(self) -> None:
        """Runs forever."""
        said = False
        try:
            while True:
                try:
                    await self.run_once()
                    said = False
                except Exception as error:  # of a disk, a peer, the control store
                    is_usual = isinstance(error, (StoreError, ControlError))
                    level = logging.DEBUG if said else logging.WARNING if is_usual else logging.ERROR
                    _log.log(
                        level,
                        "the scrub is blocked and will resume by itself",
                        extra={"why": str(error)},
                        exc_info=None if is_usual else error,
                    )
                    said = True
                busy = self._store.scrub.state.running or self._is_repairing
                await sleep_to_tick(_POLL_INTERVAL if busy else _IDLE_INTERVAL)
        finally:
            for task in (self._comparing, self._disk_loss_comparison, self._repairing, self._counting):
                if task is not None:
                    task.cancel()

    async def run_once(self) -> None:
        """Starts a pass if one is due, scrubs for a moment and repairs. Raises StoreError, ControlError."""
        scrub, asked = self._store.scrub, self._requested_pass()
        if asked > scrub.state.asked or self._is_due():
            self._repaired, self._counted_at = 0, inf
            await scrub.start_pass(max(asked, scrub.state.asked))
        if scrub.state.running:
            until = self._clock.monotonic() + _SLICE
            while self._clock.monotonic() < until:
                if not await scrub.scrub_next_file(self._throttle):
                    self._finish_pass()
                    break
        await self._repair_if_due()
        self._refresh_under_replication()
        await self._publish()

    @property
    def _is_repairing(self) -> bool:
        return not all(map(_is_over, (self._comparing, self._repairing, self._disk_loss_comparison)))

    def _requested_pass(self) -> int:
        entry = self._control.cached_entries(REQUEST_TOPIC).get(f"{REQUEST_TOPIC}/{self._node_id}")
        return 0 if entry is None else msgspec.json.decode(entry.value, type=ScrubRequest).number

    def _is_due(self) -> bool:
        """Returns True if a pass is due. A new store waits one interval for its first pass."""
        state = self._store.scrub.state
        began = max(state.began, self._store.scrub.born)
        return not state.running and self._clock.now_ms() - began > self._every * 1e3

    def _finish_pass(self) -> None:
        state = self._store.scrub.state
        _log.info(
            "scrubbed", extra={"bytes": state.bytes, "extents": state.extents, "damaged": state.damaged}
        )
        self._sweep_at = -_RETRY_INTERVAL  # the report on a finished pass needs current numbers
        if self._comparing is None or self._comparing.done():
            self._comparing = asyncio.ensure_future(self._run_comparison())

    async def _run_comparison(self) -> None:
        try:
            await self._compare()
        except Exception:
            _log.exception("the comparison after a scrub failed; the next pass repeats it")

    async def _compare_after_loss(self) -> None:
        """Compares, and only then forgets the loss: a node that ends before compares after its next start."""
        try:
            await self._compare()
            await self._store.disk_health.forget_loss()
        except Exception:
            _log.exception("the comparison after a loss of data failed; the next start repeats it")

    async def _repair_if_due(self) -> None:
        """Repairs new quarantine entries at once and failed ones at intervals. After a disk loss it compares
        with the other owners instead, because more than the quarantine is missing."""
        began = self._clock.monotonic()
        if began >= self._sweep_at:
            self._lacking = 0
            if self._store.quarantine.count():
                await self._store.quarantine.prune()
                self._lacking = await self._store.quarantine.damaged_bytes()
            now = self._clock.monotonic()
            self._sweep_at = now + _IDLE_FACTOR * (now - began)
        self._repair_eta.observe_remaining(self._lacking)
        if self._store.disk_health.take_data_lost_flag() and _is_over(self._disk_loss_comparison):
            self._disk_loss_comparison = asyncio.ensure_future(self._compare_after_loss())
        if not _is_over(self._repairing) or not _is_over(self._disk_loss_comparison):
            return
        ended, self._repairing = self._repairing, None
        if ended is not None and not ended.cancelled():
            ended.result()
        left = self._store.quarantine.count()
        if left and (left > self._expected or began - self._repaired_at > _RETRY_INTERVAL):
            self._repaired_at, self._expected = began, left
            self._repairing = asyncio.ensure_future(self._repair(self._count_repaired))

    def _count_repaired(self, number: int) -> None:
        """Counts repairs as they happen, because an attempt may have begun before the pass that counts
        them."""
        self._repaired, self._expected = self._repaired + number, self._expected - number

    async def _total(self) -> int:
        """Returns the bytes in use, refreshed at intervals because counting visits every data file."""
        now = self._clock.monotonic()
        if not self._counted_at <= now < self._counted_at + _COUNT_INTERVAL:
            self._counted = (await asyncio.to_thread(self._store.stats)).live_bytes
            self._counted_at = now
        return self._counted

    def _refresh_under_replication(self) -> None:
        if self._count_under_replicated is None or not _is_over(self._counting):
            return
        counted, self._counting = self._counting, None
        if counted is not None and not counted.cancelled() and counted.exception() is None:
            self._under_replicated = counted.result()
        metrics.cluster_names_short.set(self._under_replicated)
        self._counting = asyncio.ensure_future(self._count_under_replicated())

    async def _refresh_disks(self) -> None:
        """Looks at the disks again: at intervals while all of them serve, else each time."""
        health, now = self._store.disk_health, self._clock.monotonic()
        known = health.all_serve and self._disks and all(disk.serves for disk in self._disks)
        silent = health.silent_seconds() > 0
        known, self._disk_silent = known and not silent and not self._disk_silent, silent
        if not known or not self._disks_at <= now < self._disks_at + _DISKS_INTERVAL:
            self._disks, self._disks_at = tuple(await asyncio.to_thread(health.disk_states)), now
        if self._decaying.is_due():
            found = await asyncio.to_thread(metric_registry.counter_samples, {"meshd_store_damage_total"})
            self._decaying.observe({labels["disk"]: count for _, labels, count in found})
            await self._store.scrub.save_damage(dict(self._decaying.damage))
        self._disks = self._decaying.mark_decaying(self._disks)

    async def _publish(self) -> None:
        state = self._store.scrub.state
        await self._refresh_disks()
        metrics.scrub_ended.set(state.ended / 1e3)
        status = ScrubStatus(
            state.running,
            state.asked,
            state.began,
            state.ended,
            state.bytes,
            await self._total(),
            state.damaged,
            self._repaired,
            self._store.quarantine.count(),
            not state.running and not self._is_repairing,
            self._lacking,
            self._repair_eta.eta_seconds(),
            self._disks,
            self._under_replicated,
        )
        now = self._clock.monotonic()
        if status == self._published or now < self._published_at + self._wait_of(status):
            return
        if await self._put(f"{STATUS_TOPIC}/{self._node_id}", msgspec.json.encode(status)):
            self._published, self._published_at = status, now

    def _wait_of(self, status: ScrubStatus) -> float:
        """Returns the seconds between the last report and this one. Every process of every node gets each
        report, so in a large mesh amounts, which change all the time, are reported less often."""
        wait = self._publish_interval()
        if self._published is None or (wait > 1 and _events(status) != _events(self._published)):
            return 0.0
        return wait if wait > 1 or status.running else 0.0

    async def _put(self, key: str, status: bytes) -> bool:
        """Writes the report unless another process has written one meanwhile: the final report of a node that
        is about to stop must not be overwritten; the next turn publishes the current state. Raises
        ControlError."""
        if self._version is None:
            entry = await self._control.get(key)
            self._version = 0 if entry is None else entry.version
        expected, self._version = self._version, None
        try:
            self._version = await self._control.put(key, status, expect=expected)
        except VersionConflictError:
            return False
        return True


def _events(status: ScrubStatus) -> ScrubStatus:
    """Returns the report without the amounts that change while nothing is wrong."""
    disks = tuple(msgspec.structs.replace(disk, size=0, full=disk.full // 10) for disk in status.disks)
    return msgspec.structs.replace(status, bytes=0, total=0, lacking=0, eta=None, debt=0, disks=disks)
