"""Rebalance progress: the document `moves/NODE` in the control store.

Law: write-only for the rebalancer, which never reads it back; while the control store is unreachable
nothing is published. Invariant: the numbers belong to the last map (`version`) that made this node
compare.
"""

from __future__ import annotations

import logging
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
_WINDOW: Final = 10.0  # seconds over which a rate is told
_PUBLISH_INTERVAL: Final = 1.0  # seconds between two words about progress
_EARLIER: Final = 8
_MIN_RATE: Final = 1.0  # seconds of work before it says how long the rest takes
Phase = Literal["idle", "comparing", "repairing", "dropping", "waiting"]


class Progress(msgspec.Struct, frozen=True):
    """`slots`: compared; `differing`: of those, slots in which something was lacking; `blocked`:
    slots of which nobody can be asked. `total`: bytes to come in all, as far as is known, `bytes` of them are
    here, and `rate` a second have come of late; `eta`: seconds until they all are, None when nobody knows.
    `names` were compared, `lacked` versions, parts and facts were found lacking, `entered` of them are here.
    `dropped`: names that others own by now, let go of; `kept`: names that stay until their owners have them;
    `clear`: the newest map under which none were left. `why`: what it waits for. `began`, `updated`: ms since
    the epoch. `earlier`: of the last maps before that asked, the version and the bytes that came under it."""

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
    why: str = ""
    began: int = 0
    updated: int = 0
    earlier: tuple[tuple[int, int], ...] = ()

    def bytes_since(self, version: int) -> int:
        """Bytes that have come under maps not older than this."""
        came = (*self.earlier, (self.version, self.bytes))
        return sum(size for under, size in came if under >= version)


class ProgressReporter:
    """One a mover. `tally` is counted by whoever pulls."""

    def __init__(self, node_id: str, control: ControlStore, clock: Clock) -> None:
        self._key, self._control, self._clock = f"{PROGRESS_TOPIC}/{node_id}", control, clock
        self._told = -_PUBLISH_INTERVAL
        self._seen: deque[tuple[float, int]] = deque()
        self.stats = SyncStats()
        self.progress = Progress()

    def __repr__(self) -> str:
        return f"<Reporter of {self._key}: {self.progress.doing}>"

    async def begin_phase(self, doing: Phase, version: int, slots: int = 0, since: int | None = None) -> None:
        """Another errand, or the same one again: of comparing, if the map has asked for it `since` a version
        that is not newer than the last. What was carried stays told until the map asks for more."""
        if doing == "comparing":
            if self.progress.version < (version if since is None else since):
                earlier = (*self.progress.earlier, (self.progress.version, self.stats.bytes))[-_EARLIER:]
                self.stats = SyncStats()
                self.progress = Progress(
                    began=self._clock.now_ms(), clear=self.progress.clear, earlier=earlier
                )
            self.progress = msgspec.structs.replace(self.progress, version=version)
        slots = slots if doing == "comparing" else self.progress.slots
        self.progress = msgspec.structs.replace(self.progress, doing=doing, slots=slots, why="", blocked=0)
        await self.publish()

    async def update_counts(self, *, kept: int = 0, dropped: int = 0) -> None:
        """Numbers, at once."""
        self.progress = msgspec.structs.replace(self.progress, kept=kept, dropped=dropped)
        await self.publish()

    async def mark_clear(self, version: int) -> None:
        """Nothing that others own is left here."""
        self.progress = msgspec.structs.replace(self.progress, clear=version, kept=0)
        await self.publish()

    async def publish_if_due(self) -> None:
        """Numbers, now and then."""
        if self._clock.monotonic() - self._told > _PUBLISH_INTERVAL:
            await self.publish()

    async def mark_complete(self) -> None:
        """Nothing more is to come: what was lacking, and is not here, was written anew meanwhile, or is gone.
        Told before the map says so: who reads the map finds the numbers right."""
        self.stats.total = self.stats.bytes
        await self.publish()

    async def end_phase(self) -> None:
        """Nothing more is to be done, or to come."""
        if self.progress.doing in ("comparing", "waiting"):
            self.stats.total = self.stats.bytes
        self.progress = msgspec.structs.replace(self.progress, doing="idle", why="", blocked=0)
        await self.publish()

    async def report_blocked(self, why: str, blocked: int = 0) -> None:
        """It cannot go on; it is tried again."""
        if (self.progress.doing, self.progress.why) != ("waiting", why):
            _log.warning("movement waits", extra={"why": why})
        self.progress = msgspec.structs.replace(self.progress, doing="waiting", why=why, blocked=blocked)
        await self.publish()

    async def publish(self) -> None:
        """The document, as things are."""
        self._told, tally, now = self._clock.monotonic(), self.stats, self._clock.now_ms()
        total = max(tally.total, tally.bytes)
        self.progress = msgspec.structs.replace(
            self.progress,
            differing=tally.differing,
            names=tally.names,
            lacked=tally.lacked,
            entered=tally.entered,
            bytes=tally.bytes,
            total=total,
            rate=self._rate(tally.bytes),
            eta=_seconds_left(total - tally.bytes, tally.bytes, (now - self.progress.began) / 1000),
            failed=tally.failed,
            dropped=self.progress.dropped or tally.dropped,
            updated=now,
        )
        metrics.moves_lacking.set(max(0, tally.lacked - tally.entered))
        metrics.moves_lacking_bytes.set(total - tally.bytes)
        try:
            await self._control.put(self._key, msgspec.json.encode(self.progress))
        except ControlError as error:
            _log.debug("progress is not told: %s", error)

    def _rate(self, size: int) -> int:
        """Bytes a second, over the last seconds."""
        now = self._told
        if self._seen and size < self._seen[-1][1]:
            self._seen.clear()  # another errand
        self._seen.append((now, size))
        while now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        began, before = self._seen[0]
        return round((size - before) / (now - began)) if now > began and self.progress.doing != "idle" else 0


def _seconds_left(size: int, done: int, seconds: float) -> int | None:
    """Seconds for `size` bytes, at the rate of those that are done."""
    if not size:
        return 0
    return round(size * seconds / done) if done and seconds > _MIN_RATE else None
