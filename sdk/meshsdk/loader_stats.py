"""Loader statistics: counters, the breakdown of each stall, reports to the nodes, and observers of a loop.

Law: times come from this process's monotonic clock; CPU time covers the prefetch thread and the consumer's
`next`. The timings that a node reports only divide the time spent waiting for it. The training thread calls
observers, in the order wait, batch, wait, …, end. An observer never fails a step, and none survives a fork.
Invariant: `compute` and the three kinds of stall add up to `seconds`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from meshsdk.errors import ConfigurationError
from meshwire.frame.tensor_frame import Status
from meshwire.http_values.mesh_headers import (
    LOADER_NAME,
    LOADER_POSITION_HEADER,
    LOADER_REPORT_HEADER,
    FrameTiming,
    LoaderPosition,
    LoaderReport,
    ServerTiming,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.client.request import Request


_UNKNOWN = ServerTiming(FrameTiming(), 0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a frame arrived: monotonic seconds at which it was requested (`asked`), its response began
    (`began`) and its last byte was received (`done`), and the node's own timings (`server`)."""

    asked: float
    began: float
    done: float
    server: ServerTiming = _UNKNOWN


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds of waiting, by cause; `network` includes copying and checksums."""

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
    """Return the breakdown of a wait from `since` to `until` (monotonic seconds) for a frame."""
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
    """The counters of one prefetcher; only its thread writes them.

    `receiving`: seconds spent receiving responses that had begun; `parted`: frames that arrived in parts;
    `local`: frames handed over by a node on this host; `origins`: frames by how the node obtained them.
    """

    retries: int = 0
    bytes: int = 0
    local: int = 0
    cpu: float = 0.0
    receiving: float = 0.0
    parted: int = 0
    origins: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Statistics of this rank since the loader was created; `print(stats)` summarizes them in one line.

    The difference of two, `later - earlier`, is the statistics of the time between. `scalars` gives the
    figures that a dashboard of experiments shows.

    Attributes:
        samples, batches: what the program has received.
        bytes: size of the received frames.
        seconds: time spent inside `for` loops over the loader.
        waited: the part of `seconds` spent waiting for a batch.
        cpu: CPU seconds that loading took in this process.
        retries: requests that were sent again.
        overflows: batches that needed memory beyond the arena.
        flagged: rows that are substituted, masked or padding.
        frames: number of frames by how the node obtained them: "miss" (built for this request), "joined"
            (another request was already building it), "hit" (built earlier).
        local: frames handed over as shared memory by a node on this host instead of over the network.
        stand_ins: flagged rows that replace a bad sample: substituted or masked, but not padding.
        preprocessing, fetch: seconds spent waiting while nodes ran ops, or while they fetched the sources.
        au: accelerator utilization as MLPerf Storage defines it, 0…1: compute as a share of the loop's time,
            without the first step of each loop.
        parted: frames that arrived in parts, because each node sent the rows whose bytes it stores.
        steady, steady_waited: as `seconds` and `waited`, without the first step of each loop.
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
    steady: float = 0.0
    steady_waited: float = 0.0

    def __sub__(self, earlier: LoaderStats) -> LoaderStats:
        """Return the statistics of the time since `earlier`, which are of the same loader."""
        gained: dict[str, Any] = {
            name: getattr(self, name) - getattr(earlier, name) for name in (*_NAMES, "overflows")
        }
        frames = {how: count - earlier.frames.get(how, 0) for how, count in self.frames.items()}
        steady, waited = self.steady - earlier.steady, self.steady_waited - earlier.steady_waited
        return LoaderStats(
            **gained,
            frames={how: count for how, count in frames.items() if count},
            au=utilization(steady, waited),
            steady=steady,
            steady_waited=waited,
        )

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """Return the figures worth a curve, by name: rates, shares of the loop's time (0…1) and counts.

        Give them to `wandb.log`, `mlflow.log_metrics` or a `SummaryWriter`, as a window of the last steps.
        """
        whole = self.seconds or 1.0
        figures = {
            "samples_per_second": self.samples_per_second,
            "bytes_per_second": self.bytes / whole,
            "wait_share": self.wait_share,
            "wait_network": self.network / whole,
            "wait_preprocessing": self.preprocessing / whole,
            "wait_fetch": self.fetch / whole,
            "au": self.au,
            "cpu_per_1000": self.cpu_per_1000,
            "retries": float(self.retries),
            "stand_ins": float(self.stand_ins),
        }
        return {f"{prefix}{name}": value for name, value in figures.items()}

    @property
    def compute(self) -> float:
        """Seconds of the loop spent outside the loader."""
        return max(self.seconds - self.waited, 0.0)

    @property
    def network(self) -> float:
        """Seconds spent waiting for the network, including copying and checksums in this process."""
        return max(self.waited - self.preprocessing - self.fetch, 0.0)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of this rank, over the loop's time; 0 before the first batch."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the loop's time spent waiting for batches, 0…1."""
        return self.waited / self.seconds if self.seconds else 0.0

    @property
    def cpu_per_1000(self) -> float:
        """CPU seconds of this process per 1000 samples."""
        return 1000 * self.cpu / self.samples if self.samples else 0.0

    @property
    def hits(self) -> int:
        """Frames that were already built, or being built for another request, when requested."""
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


def utilization(seconds: float, waited: float) -> float:
    """Return compute as a share of the loop's time, 0…1; 0 without any."""
    return max(1 - waited / seconds, 0.0) if seconds > 0 else 0.0


@dataclass(slots=True)
class Meter:
    """The running numbers behind LoaderStats; those of a running prefetcher are added in `snapshot`."""

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
    reached: tuple[int, int] = (-1, 0)
    """The epoch of the last batch that the loop received, and the step after it."""
    _began: float | None = None
    _steady: float = 0.0
    _steady_waited: float = 0.0
    _steady_since: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def mark_steady(self, now: float) -> None:
        """Record that the first step of the loop has ended."""
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
        """Add the wait for a batch; `stall`: its breakdown as far as it is known."""
        self.waited += seconds
        self.preprocessing += stall.preprocessing
        self.fetch += stall.fetch
        if steady:
            self._steady_waited += seconds

    def add_rows(self, status: Any) -> None:
        """Count a delivered batch and its rows, by their status flags."""
        flags = np.asarray(status)  # a tensor's own operations cost ten times as much
        self.batches += 1
        self.samples += len(flags)
        if flagged := int(np.count_nonzero(flags)):
            self.flagged += flagged
            self.stand_ins += flagged - int(np.count_nonzero(flags == Status.PAD))

    def absorb(self, tally: Tally) -> None:
        """Add the counters of a finished prefetcher."""
        self.retries += tally.retries
        self.parted += tally.parted
        self.bytes += tally.bytes
        self.local += tally.local
        self.cpu += tally.cpu
        self.receiving += tally.receiving
        for origin, count in tally.origins.items():
            self.frames[origin] = self.frames.get(origin, 0) + count

    def snapshot(self, running: Tally | None, overflows: int) -> LoaderStats:
        """Return the current numbers, including those of a running prefetcher."""
        now = Meter(**{name: getattr(self, name) for name in _NAMES}, frames=dict(self.frames))
        if running is not None:
            now.absorb(running)
        if self._began is not None:
            now.seconds += time.monotonic() - self._began
        seconds, waited = self.steady_seconds(time.monotonic())
        return LoaderStats(
            **{name: getattr(now, name) for name in _NAMES},
            frames=now.frames,
            overflows=overflows,
            au=utilization(seconds, waited),
            steady=seconds,
            steady_waited=waited,
        )

    def steady_seconds(self, now: float) -> tuple[float, float]:
        """Return the seconds of loops without their first steps, and the part of them spent waiting."""
        since = self._steady_since
        return self._steady + (now - since if since is not None else 0.0), self._steady_waited


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
    """A delivered batch.

    `since`, `until`: monotonic seconds between which the loop waited for it; `arrival`: when its frame
    arrived; `origin`: how the node obtained the frame (hit, joined, miss).
    """

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
    """Observes the loop of one loader; `pid` is the process that it belongs to. Times: monotonic seconds."""

    pid: int

    def on_wait(self, now: float) -> None:
        """Called when the loop requests a batch."""

    def on_batch(self, step: Step, meter: Meter) -> None:
        """Called when the loop has received the batch."""

    def on_end(self, now: float, meter: Meter) -> None:
        """Called at the end of a loop; another may follow."""

    def close(self) -> None:
        """Called when the loader is closed. Idempotent."""


_EVERY: Final = 1.0  # minimum seconds between reports
_REPORT_HEADERS: Final = (LOADER_REPORT_HEADER, LOADER_POSITION_HEADER)


def without_report(request: Request) -> Request:
    """Return a request that reports nothing, for the other nodes of those that get a frame's request."""
    if LOADER_REPORT_HEADER not in request.headers:
        return request
    kept = {name: value for name, value in request.headers.items() if name not in _REPORT_HEADERS}
    return replace(request, headers=kept)


class LoaderReporter:
    """Makes the report headers of one loader, on any thread. Raises ConfigurationError for a bad name."""

    def __init__(
        self, name: str, stats: Callable[[], LoaderStats], reached: Callable[[], tuple[int, int]]
    ) -> None:
        if LOADER_NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"report={name!r}: expected a name for this job in the metrics, of up to 63 letters, digits "
                "and . _ - /"
            )
        self._name, self._stats, self._reached = name, stats, reached
        self._sent: LoaderStats | None = None
        self._due = 0.0

    def __repr__(self) -> str:
        return f"<LoaderReporter {self._name}>"

    def headers(self, epoch: int, origin: int, batch: int, *, last: bool = False) -> Mapping[str, str]:
        """Return the headers to add to a request: at most one report per second, otherwise none; `last`: the
        loop has ended, so it is due.

        `epoch`: the one that is being read; `origin`: the position of its step 0; `batch`: samples of a step.
        """
        now = time.monotonic()
        if now < self._due and not last:
            return {}
        stats = self._stats()
        before, self._sent, self._due = self._sent, stats, now + _EVERY

        def gained(figure: str, most: float) -> float:
            since = float(getattr(before, figure)) if before is not None else 0.0
            return min(max(float(getattr(stats, figure)) - since, 0.0), most)

        samples = stats.samples - (before.samples if before is not None else 0)
        seconds = gained("seconds", math.inf)
        waited = gained("waited", seconds)
        preprocessing = gained("preprocessing", waited)
        fetch = gained("fetch", waited - preprocessing)
        report = LoaderReport(self._name, samples, waited, seconds, preprocessing, fetch)
        at, steps = self._reached()
        position = LoaderPosition(epoch, origin + (steps * batch if at == epoch else 0))
        return {
            LOADER_REPORT_HEADER: report.to_header(),
            LOADER_POSITION_HEADER: position.to_header(),
        }
