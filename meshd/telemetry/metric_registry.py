"""Metric registry: declares counters, gauges and histograms, bounds their labels, and renders all processes'.

`meshd.cli.serve` sets PROMETHEUS_MULTIPROC_DIR before this module is imported; the processes share their
values in that directory, one file per process and type.

Disk space is allocated before it is written to, because a write to unallocated space of a mapped file on a
full disk kills the process (SIGBUS). A value without space is kept in memory and written in full with the
first later change that succeeds. Merging the files of dead processes returns what a scrape would: counters
are summed, gauges keep the latest value, live gauges disappear. A scrape counts a value once, because a lock
in the directory excludes merging while it reads.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
from bisect import bisect_left
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics

from meshd.telemetry.exemplars import LATENCY_BOUNDS, ExemplarCollector
from meshd.telemetry.legacy_names import LegacyNamesCollector
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from meshd.telemetry.legacy_names import MetricSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

registry = CollectorRegistry()


OTHER: Final = "other"
_MAX_NAMES: Final = 200
# Labels whose values users choose.
_names: dict[str, set[str]] = {"op": set(), "loader": set(), "plan": set(), "user": set(), "view": set()}


class _BoundedCounter(Counter):  # type: ignore[misc]  # the library has no types here
    """A counter with labels whose values users choose; `labels` bounds their number."""

    def labels(self, *values: str) -> _BoundedCounter:
        given = zip(self._labelnames, values, strict=True)
        bounded = (bounded_label(name, value) if name in _names else value for name, value in given)
        child: _BoundedCounter = super().labels(*bounded)
        return child


def counter(name: str, documentation: str, *labels: str, zero: Sequence[str] = ()) -> Counter:
    """Declare a counter; its name ends with `_total`. `zero`: values of its label that it has from the start:
    Prometheus sees no increase when a series begins with 1, and so an alert would miss the first."""
    kind = Counter if _names.keys().isdisjoint(labels) else _BoundedCounter
    found = kind(name, documentation, labels, registry=registry)
    for value in zero:
        found.labels(value)
    return found


class SecondsHistogram(Histogram):  # type: ignore[misc]  # the library has no types here
    """A histogram that takes many values at once: one write to shared memory for each of its bounds that they
    reach, instead of two for each value."""

    def observe_all(self, seconds: Sequence[float]) -> None:
        """Observe these values."""
        self._raise_if_not_observable()
        reached: dict[int, int] = {}
        for each in seconds:
            place = bisect_left(self._upper_bounds, each)
            reached[place] = reached.get(place, 0) + 1
        self._sum.inc(sum(seconds))
        for place, number in reached.items():
            self._buckets[place].inc(number)


def histogram(name: str, documentation: str, *labels: str) -> SecondsHistogram:
    """Declare a histogram of seconds."""
    return SecondsHistogram(name, documentation, labels, registry=registry, buckets=LATENCY_BOUNDS)


def gauge(name: str, documentation: str, *labels: str) -> Gauge:
    """Declare a gauge whose value is the sum over the running processes."""
    return Gauge(name, documentation, labels, registry=registry, multiprocess_mode="livesum")


def latest_gauge(name: str, documentation: str, *labels: str) -> Gauge:
    """Declare a gauge whose value is the latest that any process has set."""
    return Gauge(name, documentation, labels, registry=registry, multiprocess_mode="mostrecent")


def bounded_label(kind: str, name: str) -> str:
    """Return `name`, or OTHER if a label whose values users choose has had too many."""
    known = _names[kind]
    if name not in known:
        if len(known) >= _MAX_NAMES:
            return OTHER
        known.add(name)
    return name


def render_metrics(*, legacy_names: bool = True) -> bytes:
    """Render all metrics as Prometheus text: of every process if a shared directory is set, otherwise of this
    one. With `legacy_names`, renamed metrics also appear under their earlier names (see `legacy_names`)."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return _render(registry, legacy_names)
    with scrape_lock(Path(directory)):
        return _render(MultiProcessCollector(CollectorRegistry()), legacy_names)


def render_openmetrics(*, legacy_names: bool = True) -> bytes:
    """Like `render_metrics`, as OpenMetrics, whose buckets of histograms have traces as exemplars."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return _render(registry, legacy_names, openmetrics.generate_latest)
    with scrape_lock(Path(directory)):
        merged = MultiProcessCollector(CollectorRegistry())
        source = ExemplarCollector(merged, Path(directory))
        return _render(source, legacy_names, openmetrics.generate_latest)


def merged_samples() -> list[tuple[str, Mapping[str, str], float]]:
    """Return (name, labels, value) of all series, merged as by `render_metrics`. Blocking."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        found = list(registry.collect())
    else:
        with scrape_lock(Path(directory)):
            found = list(MultiProcessCollector(CollectorRegistry()).collect())
    return [(sample.name, sample.labels, sample.value) for metric in found for sample in metric.samples]


def counter_samples(names: Collection[str]) -> list[tuple[str, Mapping[str, str], float]]:
    """Return the same of the series of some counters, without reading the other metrics. Blocking."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return [sample for sample in merged_samples() if sample[0] in names]
    with scrape_lock(Path(directory)):
        sums = _sums(sorted(Path(directory).glob("counter_*.db")), latest=False)
    found = []
    for key, (value, _) in sums.items():
        if key.split('"', 4)[3] in names:  # ["metric", "name", {labels}, "help"]
            _, name, labels, _ = json.loads(key)
            found.append((name, labels, value))
    return found


def _render(
    source: MetricSource,
    legacy_names: bool,
    generate: Callable[[CollectorRegistry], bytes] = generate_latest,
) -> bytes:
    rendered = CollectorRegistry(auto_describe=False)
    rendered.register(LegacyNamesCollector(source) if legacy_names else source)
    return bytes(generate(rendered))


def drop_dead_processes() -> None:
    """Drop the live gauges of dead processes; their counters stay in the sums. For the supervisor only."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is not None:
        merge_dead_processes(Path(directory))


_INITIAL_SIZE: Final = 1 << 16  # bytes of a new file
_EMPTY: Final = struct.pack("i", 8)  # a file's head: the number of used bytes, including the head
_clock = SystemClock()
_ENTRY_OVERHEAD: Final = 32  # maximum bytes of a series besides its name


class PreallocatedMmapDict(MmapedDict):  # type: ignore[misc]  # the library has no types here
    """A file in the library's format that grows only into allocated disk space."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._path, self._read = Path(filename), read_mode
        self._f: Any = None
        self._m: Any = None
        self._positions: dict[str, int] = {}
        self._capacity = 0

    def _open(self) -> None:
        """Open or create the file. Raises OSError if there is no space."""
        if not self._path.exists():
            draft = self._path.with_suffix(".new")
            try:
                with draft.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _INITIAL_SIZE)
                    file.write(_EMPTY)
                draft.replace(self._path)  # a scrape sees a whole file or none
            except OSError:
                draft.unlink(missing_ok=True)
                raise
        super().__init__(str(self._path), self._read)

    def _init_value(self, key: str) -> None:
        if self._f is None:
            self._open()
            if key in self._positions:
                return
        needed, capacity = self._used + len(key.encode()) + _ENTRY_OVERHEAD, self._capacity
        while needed > capacity:
            os.posix_fallocate(self._f.fileno(), capacity, capacity)
            capacity *= 2
        super()._init_value(key)

    def read_value(self, key: str) -> tuple[float, float]:
        try:
            value, stamp = super().read_value(key)
        except OSError:
            return 0.0, 0.0
        return value, stamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Write a value with the monotonic time. The library uses the wall clock: if that is set back, an
        older value would count as the latest one."""
        try:
            super().write_value(key, value, _clock.monotonic() if timestamp else 0.0)
        except OSError:
            return


values.MmapedDict = PreallocatedMmapDict  # before the first metric is created


DEAD_LABEL: Final = "gone"  # in place of a process id
_LOCK: Final = "lock"
_log = logging.getLogger("meshd.metrics")


@contextmanager
def scrape_lock(directory: Path) -> Iterator[None]:
    """Exclude merging while files are read. Waits milliseconds for a merge in progress."""
    with _lock(directory, fcntl.LOCK_SH):
        yield


def merge_dead_processes(directory: Path) -> None:
    """Merge the files of dead processes into one file per type. Only one process, the supervisor, may call
    it.

    Does not wait for readers: the files are then merged at the next call.
    """
    try:
        with _lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for kind, paths in _dead_files(directory).items():
                _merge_files(directory / f"{kind}_{DEAD_LABEL}.db", paths)
    except BlockingIOError:
        return
    except (OSError, RuntimeError, ValueError, struct.error) as error:
        # A full disk, for example: the files stay, and nothing is lost.
        _log.warning("metric files of dead processes could not be merged", extra={"why": str(error)})


@contextmanager
def _lock(directory: Path, how: int) -> Iterator[None]:
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _dead_files(directory: Path) -> dict[str, list[Path]]:
    """Return the files of dead processes, by type."""
    found: dict[str, list[Path]] = {}
    for path in directory.glob("*.db"):
        kind, _, pid = path.stem.rpartition("_")
        if pid.isdigit() and not _is_alive(int(pid)):
            found.setdefault(kind, []).append(path)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process has the number now: retry later
    return True


def _merge_files(target: Path, paths: list[Path]) -> None:
    if not target.name.startswith("gauge_live"):
        known = [target] if target.exists() else []
        values = _sums([*known, *paths], latest=target.name.startswith("gauge_"))
        fresh = target.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        _write_merged(fresh, values)
        fresh.replace(target)
    for path in paths:
        path.unlink()


def _sums(paths: list[Path], *, latest: bool) -> dict[str, tuple[float, float]]:
    """Return (value, time) by the name of the series."""
    found: dict[str, tuple[float, float]] = {}
    for path in paths:
        for key, value, stamp, _ in MmapedDict.read_all_values_from_file(path):
            before, then = found.get(key, (0.0, 0.0))
            if not latest:
                found[key] = (before + value, 0.0)
            elif stamp >= then:
                found[key] = (value, stamp)
    return found


def _write_merged(path: Path, values: dict[str, tuple[float, float]]) -> None:
    """Write by way of memory: on a full disk, a write to a mapped file would kill the process (SIGBUS)."""
    draft = os.memfd_create("metrics")
    try:
        file = MmapedDict(f"/proc/self/fd/{draft}")
        for key, (value, stamp) in values.items():
            file.write_value(key, value, stamp)
        file.close()
        with open(draft, "rb", closefd=False) as made:
            path.write_bytes(made.read())
    finally:
        os.close(draft)
