"""Recording rules, and all rules as the file Prometheus reads.

Law: ratios are of sums, so a quiet node weighs less than a busy one. The scrape job is `shardmesh`, or
whatever replaces `SCRAPES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshoperator.monitoring.alerts import DAEMONS, KUBERNETES, Recording
from meshoperator.monitoring.panels import BATCHES

if TYPE_CHECKING:
    from meshoperator.monitoring.alerts import Alert


def _share(part: str, whole: str) -> str:
    """Of each instance; 0 where there was nothing of the part yet."""
    every = f"sum by (instance) (rate({whole}[5m]))"
    return f"(sum by (instance) (rate({part}[5m])) or 0 * {every}) / {every}"


RECORDINGS: Final = (
    Recording(
        "instance_operation:meshd_http_requests:rate5m",
        "sum by (instance, operation) (rate(meshd_http_requests_total[5m]))",
    ),
    Recording(
        "instance:meshd_http_errors:ratio5m",
        _share('meshd_http_requests_total{status=~"5.."}', "meshd_http_requests_total"),
    ),
    Recording(
        "operation:meshd_http_request_seconds:p99_5m",
        "histogram_quantile(0.99, sum by (operation, le) (rate(meshd_http_request_seconds_bucket[5m])))",
    ),
    Recording(
        "instance:meshd_frames_kept:ratio5m",
        _share('meshd_frames_total{result!="miss"}', "meshd_frames_total"),
    ),
    Recording(
        "instance:meshd_batches_refused:ratio5m",
        _share(
            f'meshd_http_requests_total{{{BATCHES}, status="503"}}', f"meshd_http_requests_total{{{BATCHES}}}"
        ),
    ),
    Recording(
        "loader:meshd_loader_stall:ratio5m",
        "sum by (loader) (rate(meshd_loader_waited_seconds_total[5m]))"
        " / sum by (loader) (rate(meshd_loader_seconds_total[5m]))",
    ),
    Recording(
        "instance_disk:meshd_store_disk_free:ratio",
        "meshd_store_disk_free_bytes / meshd_store_disk_bytes",
    ),
    Recording(
        "instance:meshd_store_sync_seconds:p99_5m",
        "histogram_quantile(0.99, sum by (instance, le) (rate(meshd_store_sync_seconds_bucket[5m])))",
    ),
    Recording(
        "instance:meshd_origin_errors:ratio5m",
        "sum by (instance) (rate(meshd_origin_errors_total[5m]))"
        " / (sum by (instance) (rate(meshd_origin_fetches_total[5m]))"
        " + sum by (instance) (rate(meshd_origin_checks_total[5m]))"
        " + sum by (instance) (rate(meshd_origin_errors_total[5m])))",
    ),
    Recording(
        "instance:meshd_bad_samples:ratio5m",
        _share("meshd_transform_failures_total", 'meshd_transform_samples_total{op="row"}'),
    ),
)

ALERTS: Final = (*DAEMONS, *KUBERNETES)


def rule_groups() -> dict[str, Any]:
    """The document Prometheus reads, and the `spec` of a PrometheusRule."""
    recordings = [{"record": rule.record, "expr": rule.expr} for rule in RECORDINGS]
    return {
        "groups": [
            {"name": "shardmesh.recordings", "interval": "30s", "rules": recordings},
            {"name": "shardmesh.alerts", "rules": [_alert(alert) for alert in ALERTS]},
        ]
    }


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": alert.runbook,
        },
    }
