"""Renamed metrics keep their earlier names for one release, as copies marked as deprecated."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

import meshd.telemetry.metrics  # noqa: F401  declares the metrics that are rendered
from meshd.telemetry import metric_registry
from meshd.telemetry.legacy_names import RENAMED_METRICS, LegacyNamesCollector


def lines(text: bytes, name: str) -> list[str]:
    return [line for line in text.decode().splitlines() if re.match(rf"(# \w+ )?{name}[ {{]", line)]


def test_a_renamed_counter_appears_under_both_names_with_the_old_label_values() -> None:
    registry = CollectorRegistry()
    fetches = Counter("meshd_peer_cache_fetches_total", "Reads of the cache.", ["result"], registry=registry)
    fetches.labels("hit").inc(3)
    fetches.labels("other").inc()
    text = generate_latest(LegacyNamesCollector(registry))
    assert lines(text, "meshd_peer_cache_fetches_total") == [
        "# HELP meshd_peer_cache_fetches_total Reads of the cache.",
        "# TYPE meshd_peer_cache_fetches_total counter",
        'meshd_peer_cache_fetches_total{result="hit"} 3.0',
        'meshd_peer_cache_fetches_total{result="other"} 1.0',
    ]
    assert lines(text, "meshd_origin_lends_total") == [
        "# HELP meshd_origin_lends_total Deprecated, use meshd_peer_cache_fetches_total. Reads of the cache.",
        "# TYPE meshd_origin_lends_total counter",
        'meshd_origin_lends_total{result="given"} 3.0',
        'meshd_origin_lends_total{result="other"} 1.0',
    ]


def test_a_metric_that_was_not_renamed_appears_once() -> None:
    registry = CollectorRegistry()
    Gauge("meshd_cluster_map_version", "Version.", registry=registry).set(7)
    assert generate_latest(LegacyNamesCollector(registry)) == generate_latest(registry)


def test_samples_of_a_renamed_role_appear_under_both_roles() -> None:
    registry = CollectorRegistry()
    ready = Gauge("meshd_processes_up", "Ready.", ["role"], registry=registry)
    memory = Gauge("meshd_process_memory_bytes", "Memory.", ["role"], registry=registry)
    for role in ("worker", "coordinator", "rebalancer"):
        ready.labels(role).set(1)
        memory.labels(role).set(5)
    text = generate_latest(LegacyNamesCollector(registry))
    roles = [line.split('"')[1] for line in lines(text, "meshd_processes_up")[2:]]
    assert roles == ["worker", "coordinator", "rebalancer", "steward", "mover"]
    assert len(lines(text, "meshd_process_memory_bytes")) == 2 + 3  # a sum over roles counts nothing twice


def test_every_earlier_name_is_exported_until_the_setting_removes_it() -> None:
    both, new = metric_registry.render_metrics(), metric_registry.render_metrics(legacy_names=False)
    for renamed in RENAMED_METRICS:
        assert lines(both, renamed.old)[0].startswith(f"# HELP {renamed.old} Deprecated, use {renamed.new}.")
        assert lines(both, renamed.new), f"{renamed.new} is not a metric"
        assert lines(new, renamed.new)
        assert not lines(new, renamed.old)
