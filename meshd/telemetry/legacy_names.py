"""Earlier names of metrics, which are exported next to the new ones for one release.

An old series is a copy of the new one, made when metrics are rendered, so the two never differ. Its HELP text
begins with "Deprecated" and names the new metric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from prometheus_client import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class RenamedMetric(msgspec.Struct, frozen=True):
    """A metric with an earlier name. `values`: label values that changed with it, from new to old."""

    old: str
    new: str
    values: Mapping[str, str] = msgspec.field(default_factory=dict)


RENAMED_METRICS: Final = (
    RenamedMetric("meshd_cluster_doubts_total", "meshd_cluster_read_barrier_checks_total"),
    RenamedMetric("meshd_cluster_moving", "meshd_cluster_rebalancing"),
    RenamedMetric(
        "meshd_replication_ceded_total",
        "meshd_replication_writes_forwarded_total",
        {"done": "decided", "retry": "again"},
    ),
    RenamedMetric(
        "meshd_origin_lends_total", "meshd_peer_cache_fetches_total", {"hit": "given", "miss": "none"}
    ),
    RenamedMetric("meshd_origin_lent_bytes_total", "meshd_peer_cache_bytes_total"),
    RenamedMetric("meshd_near_reads_total", "meshd_near_cache_reads_total"),
    RenamedMetric("meshd_near_refused_total", "meshd_near_cache_refused_total"),
    RenamedMetric("meshd_scrub_mended_total", "meshd_scrub_repaired_total"),
    RenamedMetric("meshd_store_displaced_total", "meshd_store_off_home_writes_total"),
    RenamedMetric("meshd_moves_entered_total", "meshd_rebalance_applied_total"),
    RenamedMetric("meshd_moves_bytes_total", "meshd_rebalance_bytes_total"),
    RenamedMetric("meshd_moves_lacking", "meshd_rebalance_missing"),
    RenamedMetric("meshd_moves_lacking_bytes", "meshd_rebalance_missing_bytes"),
    RenamedMetric("meshd_moves_dropped_total", "meshd_rebalance_dropped_total"),
    RenamedMetric("meshd_moves_kept", "meshd_rebalance_retained"),
    RenamedMetric("meshd_moves_blocked_slots", "meshd_rebalance_blocked_slots"),
    RenamedMetric("meshd_moves_pause_seconds", "meshd_rebalance_pause_seconds"),
    RenamedMetric("meshd_moves_rounds_total", "meshd_rebalance_rounds_total"),
    RenamedMetric("meshd_moves_repaired_total", "meshd_rebalance_repaired_total"),
)
RENAMED_ROLES: Final = {"coordinator": "steward", "rebalancer": "mover"}
"""Values of the label `role` that have changed. Only metrics that are not summed over roles repeat them."""
_WITH_ROLES: Final = ("meshd_processes_up", "meshd_process_restarts")
_BY_FAMILY: Final = {renamed.new.removesuffix("_total"): renamed for renamed in RENAMED_METRICS}


class MetricSource(Protocol):
    """A source of metrics: a registry, or the library's collector of several processes."""

    def collect(self) -> Iterable[Metric]: ...


class LegacyNamesCollector:
    """Collects from `source` and adds each renamed metric under its earlier name."""

    def __init__(self, source: MetricSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            if metric.name in _WITH_ROLES:
                _repeat_roles(metric)
            yield metric
            if renamed := _BY_FAMILY.get(metric.name.removesuffix("_total")):
                yield _under_old_name(metric, renamed)


def _repeat_roles(metric: Metric) -> None:
    """Add each sample of a renamed role under its earlier name."""
    for sample in list(metric.samples):
        if role := RENAMED_ROLES.get(sample.labels.get("role", "")):
            metric.add_sample(sample.name, sample.labels | {"role": role}, sample.value)


def _under_old_name(metric: Metric, renamed: RenamedMetric) -> Metric:
    text = f"Deprecated, use {renamed.new}. {metric.documentation}"
    copy = Metric(renamed.old.removesuffix("_total"), text, metric.type)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            labels = {name: renamed.values.get(value, value) for name, value in sample.labels.items()}
            copy.add_sample(renamed.old, labels, sample.value)
    return copy
