"""Exemplars: traces as examples of a histogram's buckets, shared by the processes of a node as files.

prometheus_client drops exemplars when several processes share their metrics (its values are numbers in mapped
files). So each process writes its own, a few kilobytes, next to them; a scrape in OpenMetrics adds those of
the live processes to the merged buckets. Only processes that record traces have any.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from prometheus_client.samples import Exemplar as OpenMetricsExemplar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from meshd.telemetry.legacy_names import MetricSource

LATENCY_BOUNDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets of every histogram, in seconds; the last bucket has none."""
SeriesKey: TypeAlias = "tuple[str, tuple[str, ...], int]"
"""A histogram, the values of its labels, and the number of the bucket."""
_PREFIX: Final = "exemplars_"


class Exemplar(NamedTuple):
    """A span that was observed: its value in seconds, and when, in seconds since 1970."""

    trace_id: int
    span_id: int
    value: float
    at: float


def write_exemplars(directory: Path, exemplars: Mapping[SeriesKey, Exemplar]) -> None:
    """Replace this process's file. Raises OSError."""
    entries = [
        [metric, labels, bucket, f"{found.trace_id:032x}", f"{found.span_id:016x}", found.value, found.at]
        for (metric, labels, bucket), found in exemplars.items()
    ]
    draft = directory / f"{_PREFIX}{os.getpid()}.new"
    draft.write_text(json.dumps(entries))
    draft.replace(draft.with_suffix(".json"))


class ExemplarCollector:
    """Adds the exemplars in `directory` to the buckets of `source`. Files of dead processes are removed."""

    def __init__(self, source: MetricSource, directory: Path) -> None:
        self._source, self._directory = source, directory

    def __repr__(self) -> str:
        return f"<ExemplarCollector of {self._directory}>"

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the latest exemplar of a bucket counts."""
        known = self._read()
        for metric in self._source.collect():
            if metric.type == "histogram" and metric.name in known:
                series = known[metric.name]
                metric.samples = [
                    sample._replace(exemplar=series.get(_bucket_of(sample.labels)))
                    if sample.name.endswith("_bucket")
                    else sample
                    for sample in metric.samples
                ]
            yield metric

    def _read(self) -> dict[str, dict[tuple[tuple[str, ...], int], OpenMetricsExemplar]]:
        found: dict[str, dict[tuple[tuple[str, ...], int], OpenMetricsExemplar]] = {}
        for path in self._directory.glob(f"{_PREFIX}*.json"):
            if not Path("/proc", path.stem.removeprefix(_PREFIX)).exists():
                path.unlink(missing_ok=True)
                continue
            for metric, labels, bucket, trace_id, span_id, value, at in json.loads(path.read_bytes()):
                series, place = found.setdefault(metric, {}), (tuple(labels), bucket)
                before = series.get(place)
                if before is None or before.timestamp <= at:
                    told = {"trace_id": trace_id, "span_id": span_id}
                    series[place] = OpenMetricsExemplar(told, value, at)
        return found


def _bucket_of(labels: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the labels' values, without the bound, and the number of the bucket."""
    bound = float(labels["le"])
    rest = tuple(value for name, value in sorted(labels.items()) if name != "le")
    number = len(LATENCY_BOUNDS) if bound == float("inf") else LATENCY_BOUNDS.index(bound)
    return rest, number
