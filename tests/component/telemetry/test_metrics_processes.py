"""Metrics of several processes in one answer. In processes of its own: the library chooses at import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, sys
from meshd.telemetry import metric_registry, metrics
metrics.http_requests.labels("Get", "200").inc()
metrics.http_connections.inc(3)
child = os.fork()
if child == 0:
    metrics.http_requests.labels("Get", "200").inc(4)
    metrics.http_connections.inc(5)
    metrics.http_seconds.labels("Get").observe(0.2)
    metrics.peer_cache_fetches.labels("hit").inc(2)
    os._exit(0)
os.waitpid(child, 0)
print(metric_registry.render_metrics().decode())
print("=====")
metric_registry.drop_dead_processes()
print(metric_registry.render_metrics().decode())
"""


def test_counters_add_up_and_gauges_of_the_dead_go(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after = run.stdout.split("=====")
    for text in (before, after):
        assert 'meshd_http_requests_total{operation="Get",status="200"} 5.0' in text
        assert 'meshd_http_request_seconds_count{operation="Get"} 1.0' in text
        assert 'meshd_peer_cache_fetches_total{result="hit"} 2.0' in text
        assert 'meshd_origin_lends_total{result="given"} 2.0' in text
    assert "meshd_http_connections 8.0" in before
    assert "meshd_http_connections 3.0" in after


def test_one_process_without_a_directory() -> None:
    from meshd.telemetry import metric_registry, metrics

    metrics.frames.labels("hit").inc()
    assert b'meshd_frames_total{result="hit"}' in metric_registry.render_metrics()
