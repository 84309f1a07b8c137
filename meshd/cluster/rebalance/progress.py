"""Rebalance progress: the document `moves/NODE` in the control store.

Law: write-only for the rebalancer, which never reads it back; while the control store is unreachable
nothing is published. Invariant: the numbers belong to the last map (`version`) that made this node
compare.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.cluster.rebalance.anti_entropy import SyncStats
from meshd.control.control_api import ControlError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.control.control_api import ControlStore
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.moving")
PROGRESS_TOPIC: Final = "moves"
_WINDOW: Final = 10.0  # seconds over which the rate is measured
_PUBLISH_INTERVAL: Final = 1.0  # seconds between two publications
_PUBLISHING_NODES: Final = 100  # nodes that may publish a second: every node gets what each of them publishes
_EARLIER: Final = 8
_MIN_RATE: Final = 1.0  # seconds of work before the remaining time is estimated
_LOG_INTERVAL: Final = 60.0  # seconds between two log lines about one reason to wait
_MOST_REASONS: Final = 100
Phase = Literal["idle", "comparing", "repairing", "dropping", "waiting"]


class Progress(msgspec.Struct, frozen=True):
    """Progress of a node's rebalancer.

    `slots`: slots compared; `differing`: those in which something was missing; `blocked`: slots for which no
    complete peer answers. `total`: bytes to receive in all, as far as known; `bytes`: received so far;
    `rate`: bytes per second lately; `eta`: seconds until all have arrived, None if unknown. `names`: names
    compared; `lacked`: versions, parts and metadata found missing; `entered`: those received. `dropped`:
    names dropped because others own them now; `kept`: names kept until their owners have them; `clear`: the
    newest map under which none were left; `complete`: the newest under which the node had all its data, from
    before the map says so (`meshd.cluster.batched_map_changes`). `why`: what the node waits for, also while
    it tries again to store what could not be stored. `began`, `updated`: ms since the epoch. `earlier`:
    version and received bytes of the last maps before this one that asked for a comparison.
    """

    doing: Phase = "idle"
    version: int = 0
    slots: int = 0
    differing: int = 0
    blocked: int = 0
    names: int = 0
    lacked: int = 0
    entered: int = 0
    bytes: int = 0
    total: int = 0
    eta: int | None = None
    rate: int = 0
    failed: int = 0
    dropped: int = 0
    kept: int = 0
    clear: int = 0
    complete: int = 0
    why: str = ""
    began: int = 0
    updated: int = 0
    earlier: tuple[tuple[int, int], ...] = ()

    def bytes_since(self, version: int) -> int:
        """Returns the bytes received under maps from `version` on."""
        came = (*self.earlier, (self.version, self.bytes))
        return sum(size for under, size in came if under >= version)


def publish_interval(nodes: int) -> float:
    """Returns the seconds between two reports of a node on what goes on, in a mesh of so many nodes."""
    return max(_PUBLISH_INTERVAL, nodes / _PUBLISHING_NODES)


def without_numbers(text: str) -> str:
    """Returns a text that is the same for a failure that repeats with another object of another size."""
    return re.sub("[0-9]+", "", text)


class ProgressReporter:
    """Publishes the progress of one rebalancer. The sync in progress updates `stats`."""

    def __init__(self, node_id: str, control: ControlStore, clock: Clock) -> None:
        self._key, self._control, self._clock = f"{PROGRESS_TOPIC}/{node_id}", control, clock
        self._published_at = -_PUBLISH_INTERVAL
        self._stuck_at: int | None = None  # bytes received when missing data could last not be stored
        self._seen: deque[tuple[float, int]] = deque()
        self.stats = SyncStats()
        self.progress = Progress()
        self._interval = _PUBLISH_INTERVAL
        self._logged: dict[str, float] = {}  # when reasons to wait were logged, by their text without numbers

    def __repr__(self) -> str:
        return f"<ProgressReporter of {self._key}: {self.progress.doing}>"

    async def begin_phase(self, doing: Phase, version: int, slots: int = 0, since: int | None = None) -> None:
        """Begins a phase. A comparison that the map has demanded since a version newer than the last one
        resets the numbers; otherwise they are kept."""
        if doing == "comparing":
            if self.progress.version < (version if since is None else since):
                earlier = (*self.progress.earlier, (self.progress.version, self.stats.bytes))[-_EARLIER:]
                self.stats = SyncStats()
                self.progress = Progress(
                    began=self._clock.now_ms(), clear=self.progress.clear, earlier=earlier
                )
            self.progress = msgspec.structs.replace(self.progress, version=version)
        slots = slots if doing == "comparing" else self.progress.slots
        why = self.progress.why if doing == "comparing" and self._is_stuck() else ""
        self.progress = msgspec.structs.replace(self.progress, doing=doing, slots=slots, why=why, blocked=0)
        await self.publish()

    async def update_counts(self, *, kept: int = 0, dropped: int = 0) -> None:
        """Sets these counts and publishes at once."""
        self.progress = msgspec.structs.replace(self.progress, kept=kept, dropped=dropped)
        await self.publish()

    async def mark_clear(self, version: int) -> None:
        """Records that nothing that others own is left here."""
        self.progress = msgspec.structs.replace(self.progress, clear=version, kept=0)
        await self.publish()

    def adapt_to(self, nodes: int) -> None:
        """Sets how often to publish in a mesh of so many nodes."""
        self._interval = publish_interval(nodes)

    async def publish_if_due(self) -> None:
        """Publishes at intervals."""
        if self._clock.monotonic() - self._published_at > self._interval:
            await self.publish()

    async def mark_complete(self, version: int) -> None:
        """Records that the node has all its data of map `version`, and that nothing more will arrive: items
        that were missing and did not arrive have been overwritten or removed. Publish this before the map
        changes, so that readers of the map find final numbers."""
        self.stats.total = self.stats.bytes
        self.progress = msgspec.structs.replace(self.progress, complete=version)
        await self.publish()

    async def end_phase(self) -> None:
        """Ends the phase: nothing more to do or to receive."""
        if self.progress.doing in ("comparing", "waiting"):
            self.stats.total = self.stats.bytes
        self.progress = msgspec.structs.replace(self.progress, doing="idle", why="", blocked=0)
        await self.publish()

    async def report_unstorable(self, why: str) -> None:
        """Reports that missing data cannot be stored. A retry keeps the reason until something was stored:
        it looks like progress, and the remaining time is unknown."""
        self._stuck_at = self.stats.bytes
        await self.report_blocked(why)

    def _is_stuck(self) -> bool:
        return self._stuck_at == self.stats.bytes

    async def report_blocked(self, why: str, blocked: int = 0) -> None:
        """Reports that the rebalancer cannot continue now and will retry."""
        now, reason = self._clock.monotonic(), without_numbers(why)
        if now - self._logged.get(reason, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            if len(self._logged) >= _MOST_REASONS:
                self._logged.clear()
            self._logged[reason] = now
            _log.warning("rebalancing is blocked", extra={"why": why})
        self.progress = msgspec.structs.replace(self.progress, doing="waiting", why=why, blocked=blocked)
        await self.publish()

    async def publish(self) -> None:
        """Publishes the current progress."""
        self._published_at, stats, now = self._clock.monotonic(), self.stats, self._clock.now_ms()
        total = max(stats.total, stats.bytes)
        why = self.progress.why if self.progress.doing != "comparing" or self._is_stuck() else ""
        left = _seconds_left(total - stats.bytes, stats.bytes, (now - self.progress.began) / 1000)
        self.progress = msgspec.structs.replace(
            self.progress,
            differing=stats.differing,
            names=stats.names,
            lacked=stats.lacked,
            entered=stats.entered,
            bytes=stats.bytes,
            total=total,
            rate=self._rate(stats.bytes),
            eta=None if why else left,
            why=why,
            failed=stats.failed,
            dropped=self.progress.dropped or stats.dropped,
            updated=now,
        )
        metrics.rebalance_missing.set(max(0, stats.lacked - stats.entered))
        metrics.rebalance_missing_bytes.set(total - stats.bytes)
        try:
            await self._control.put(self._key, msgspec.json.encode(self.progress))
        except ControlError as error:
            _log.debug("cannot publish progress: %s", error)

    def _rate(self, size: int) -> int:
        """Returns bytes per second over the last seconds."""
        now = self._published_at
        if self._seen and size < self._seen[-1][1]:
            self._seen.clear()  # the numbers were reset
        self._seen.append((now, size))
        while now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        began, before = self._seen[0]
        return round((size - before) / (now - began)) if now > began and self.progress.doing != "idle" else 0


def _seconds_left(size: int, done: int, seconds: float) -> int | None:
    """Returns the seconds for `size` bytes at the rate of those done."""
    if not size:
        return 0
    return round(size * seconds / done) if done and seconds > _MIN_RATE else None
