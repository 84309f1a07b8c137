"""Metric registry: declares counters, gauges and histograms, bounds their labels, and renders all processes'.

`meshd.cli.serve` sets PROMETHEUS_MULTIPROC_DIR before this module is imported; the processes share their
values in that directory.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics

from meshd.telemetry import mmap_metrics
from meshd.telemetry.exemplars import LATENCY_BOUNDS, ExemplarCollector
from meshd.telemetry.legacy_names import LegacyNamesCollector
from meshd.telemetry.mmap_metrics import merge_dead_processes, scrape_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshd.telemetry.legacy_names import MetricSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

mmap_metrics.install_mmap_dict()
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


def gauge(name: str, documentation: str, *labels: str, mode: str = "livesum") -> Gauge:
    """Declare a gauge. `mode`: how the values of processes become one, as prometheus_client names it."""
    return Gauge(name, documentation, labels, registry=registry, multiprocess_mode=mode)


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
