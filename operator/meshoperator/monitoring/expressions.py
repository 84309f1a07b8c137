"""Expressions that several dashboards have: of the nodes that are chosen in the dashboard."""

from __future__ import annotations

from typing import Final

AT: Final = 'instance=~"$instance"'
INTERVAL: Final = "$__rate_interval"


def rate(metric: str, *labels: str, more: str = "") -> str:
    """Increase a second, summed by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    chosen = f"{AT}, {more}" if more else AT
    return f"sum{by} (rate({metric}{{{chosen}}}[{INTERVAL}]))"


def quantile(q: float, metric: str, *labels: str, more: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', *labels, 'le', more=more)})"


OP_TIME: Final = rate("meshd_op_seconds_total", "op")
FAILED: Final = rate("meshd_http_requests_total", more='status=~"5.."')
FAILED_BY: Final = rate("meshd_http_requests_total", "instance", "operation", "status", more='status=~"5.."')
KEPT: Final = 'result="hit"'
HITS: Final = rate("meshd_cache_reads_total", more='result="hit"')
AWAY: Final = f'max(sum by (instance) (meshd_cluster_nodes{{state=~"away|down", {AT}}}))'
ORIGIN_FAILED: Final = rate("meshd_origin_errors_total", "instance")
ORIGIN_ASKED: Final = (
    f"{rate('meshd_origin_fetches_total', 'instance')} + {rate('meshd_origin_checks_total', 'instance')}"
    f" + {ORIGIN_FAILED}"
)
BATCHES: Final = 'operation=~"(GET|POST) /-/plans/"'
"""Requests for batches, and for rows of one's choice."""
ASKED_BATCHES: Final = rate("meshd_http_requests_total", "instance", more=BATCHES)
REFUSED_BATCHES: Final = rate("meshd_http_requests_total", "instance", more=f'{BATCHES}, status="503"')
TRANSFORMS: Final = f'sum by (instance) (meshd_processes_up{{role="transform", {AT}}})'
