"""Loader statistics: counters, the split of each stall, and the observers of a training loop.

Law: times come from this process's monotonic clock; CPU time covers the prefetch thread and the
consumer's `next`. A node's own timings only divide the time waited for it. The training thread calls
observers, in the order wait, batch, wait, …, end; an observer never fails a step, and none outlives a
fork.
Invariant: `compute` and the three kinds of stall add up to `seconds`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from meshwire.frame.tensor_frame import Status
from meshwire.http_values.mesh_headers import FrameTiming, ServerTiming

if TYPE_CHECKING:
    from collections.abc import Mapping


_UNKNOWN = ServerTiming(FrameTiming(), 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a frame came: monotonic seconds when it was asked for, its answer began, its last byte was in
    place; and what the node says of the time in between."""

    asked: float
    began: float
    done: float
    server: ServerTiming = _UNKNOWN


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds of waiting by what they were spent on; `network`: with copying and checking."""

    network: float = 0.0
    preprocessing: float = 0.0
    fetch: float = 0.0

    def __add__(self, other: Stall) -> Stall:
        return Stall(
            self.network + other.network,
            self.preprocessing + other.preprocessing,
            self.fetch + other.fetch,
        )

    @property
    def seconds(self) -> float:
        return self.network + self.preprocessing + self.fetch


def attribute_stall(since: float, until: float, arrival: Arrival) -> Stall:
    """A wait from `since` to `until` for a frame that came so."""
    waited = max(until - since, 0.0)
    answering = max(arrival.began - arrival.asked, 0.0)
    within = max(min(until, arrival.began) - max(since, arrival.asked), 0.0)
    server = arrival.server
    if within <= 0.0 or server.total <= 0.0:
        return Stall(waited)
    share = within / max(answering, server.total)
    preprocessing, fetch = share * server.preprocessing, share * server.fetch
    return Stall(max(waited - preprocessing - fetch, 0.0), preprocessing, fetch)


@dataclass(slots=True)
class Tally:
    """What a reader has done so far; written by its thread only. `receiving`: seconds from when it
    turned to answers that had begun until they were in place; `parted`: frames that came in parts; `local`:
    those taken over from a node on this host."""

    retries: int = 0
    bytes: int = 0
    local: int = 0
    cpu: float = 0.0
    receiving: float = 0.0
    parted: int = 0
    origins: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Since the loader was made, of this rank; `print(stats)` tells it in a line.

    Attributes:
        samples, batches, bytes: received by the program; bytes of whole frames.
        seconds: inside `for` loops.
        waited: of these, spent waiting for a batch.
        cpu: seconds of processor time that loading took in this process.
        retries: requests asked again.
        overflows: batches for which memory beyond the arena was taken.
        flagged: rows that are substitutes, masked or pads.
        frames: how the nodes came by the frames: "miss" (prepared for this request), "joined" (together with
            another job), "hit" (prepared before).
        local: frames taken over as shared memory from a node on this host, not received.
        stand_ins: of the flagged rows, those in place of a sample that could not be prepared: substitutes and
            masked ones, not pads.
        preprocessing, fetch: seconds waited while nodes ran ops, or got sources.
        au: accelerator utilisation as MLPerf Storage defines it, 0…1: compute as a share of the loop's
            time, the first step of each loop left out.
        parted: frames that came in parts, each node sending the rows whose bytes it has.
    """

    samples: int
    batches: int
    bytes: int
    seconds: float
    waited: float
    cpu: float
    retries: int
    overflows: int
    flagged: int
    frames: Mapping[str, int]
    preprocessing: float = 0.0
    fetch: float = 0.0
    au: float = 0.0
    parted: int = 0
    local: int = 0
    stand_ins: int = 0

    @property
    def compute(self) -> float:
        """Seconds of the loop outside the loader."""
        return max(self.seconds - self.waited, 0.0)

    @property
    def network(self) -> float:
        """Seconds waited for the network, and for copying and checking here."""
        return max(self.waited - self.preprocessing - self.fetch, 0.0)

    @property
    def samples_per_second(self) -> float:
        """Of this rank, over the loop's time; 0 before the first batch."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Part of the loop's time that the consumer waited, 0…1."""
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def cpu_per_1000(self) -> float:
        """Client CPU seconds a 1000 samples."""
        return 1000 * self.cpu / self.samples if self.samples else 0.0

    @property
    def hits(self) -> int:
        """Frames that were ready or shared with another job when asked for."""
        return self.frames.get("hit", 0) + self.frames.get("joined", 0)

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.samples_per_second:.0f}/s, waited {self.wait_share:.0%} "
            f"({self._parts()}), client CPU {self.cpu_per_1000:.3f} s a 1000, {self.retries} retries, "
            f"{self.hits} hits{f', stand-ins: {self.stand_ins}' if self.stand_ins else ''}"
        )

    def _parts(self) -> str:
        parts = {"network": self.network, "preprocessing": self.preprocessing, "fetch": self.fetch}
        whole = self.seconds or 1.0
        return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items())


@dataclass(slots=True)
class Meter:
    """The running numbers behind LoaderStats; `receiving`: see Tally, of finished readers."""

    samples: int = 0
    batches: int = 0
    bytes: int = 0
    local: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    cpu: float = 0.0
    retries: int = 0
    flagged: int = 0
    stand_ins: int = 0
    preprocessing: float = 0.0
    fetch: float = 0.0
    parted: int = 0
    receiving: float = 0.0
    frames: dict[str, int] = field(default_factory=dict)
    _began: float | None = None
    _steady: float = 0.0
    _steady_waited: float = 0.0
    _steady_since: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def mark_steady(self, now: float) -> None:
        """The first step of the loop is over."""
        self._steady_since = now

    def stop(self) -> None:
        now = time.monotonic()
        if self._began is not None:
            self.seconds += now - self._began
            self._began = None
        if self._steady_since is not None:
            self._steady += now - self._steady_since
            self._steady_since = None

    def add_wait(self, seconds: float, stall: Stall, *, steady: bool) -> None:
        """A batch was waited for; `stall`: why, as far as it is known."""
        self.waited += seconds
        self.preprocessing += stall.preprocessing
        self.fetch += stall.fetch
        if steady:
            self._steady_waited += seconds

    def add_rows(self, status: Any) -> None:
        """A batch was given, with these flags."""
        self.batches += 1
        self.samples += len(status)
        if flagged := int((status != 0).sum()):
            self.flagged += flagged
            self.stand_ins += flagged - int((status == Status.PAD).sum())

    def absorb(self, tally: Tally) -> None:
        """Adds what a finished reader did."""
        self.retries += tally.retries
        self.parted += tally.parted
        self.bytes += tally.bytes
        self.local += tally.local
        self.cpu += tally.cpu
        self.receiving += tally.receiving
        for origin, count in tally.origins.items():
            self.frames[origin] = self.frames.get(origin, 0) + count

    def snapshot(self, running: Tally | None, overflows: int) -> LoaderStats:
        """The numbers now, those of a running reader included."""
        now = Meter(**{name: getattr(self, name) for name in _NAMES}, frames=dict(self.frames))
        if running is not None:
            now.absorb(running)
        if self._began is not None:
            now.seconds += time.monotonic() - self._began
        return LoaderStats(
            **{name: getattr(now, name) for name in _NAMES},
            frames=now.frames,
            overflows=overflows,
            au=self._utilisation(),
        )

    def steady_seconds(self, now: float) -> tuple[float, float]:
        """Seconds of loops without their first steps, and what of them was waited."""
        since = self._steady_since
        return self._steady + (now - since if since is not None else 0.0), self._steady_waited

    def _utilisation(self) -> float:
        seconds, waited = self.steady_seconds(time.monotonic())
        return max(1 - waited / seconds, 0.0) if seconds > 0 else 0.0


_NAMES = (
    "samples",
    "batches",
    "bytes",
    "local",
    "seconds",
    "waited",
    "cpu",
    "retries",
    "flagged",
    "stand_ins",
    "preprocessing",
    "fetch",
    "parted",
)


@dataclass(frozen=True, slots=True)
class Step:
    """A batch handed over: `since`, `until`: monotonic seconds in which it was waited for; `arrival`: how its
    frame came, `origin`: how the node came by it."""

    epoch: int
    step: int
    rows: int
    bytes: int
    since: float
    until: float
    stall: Stall
    arrival: Arrival | None
    origin: str


class Observer(Protocol):
    """One loader's, in process `pid`."""

    pid: int

    def on_wait(self, now: float) -> None:
        """The loop asks for a batch."""

    def on_batch(self, step: Step, meter: Meter) -> None:
        """It has it."""

    def on_end(self, now: float, meter: Meter) -> None:
        """The loop is over; another may begin."""

    def close(self) -> None:
        """The loader is closed. Idempotent."""
