"""Grafana panels as values, the JSON they become, and the expressions several dashboards share.

Law: a panel is one question, with its unit; expressions may use `$instance` and `$__rate_interval`. The
schema is that of Grafana 10 and later (schemaVersion 39).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence


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


Unit = Literal["short", "Bps", "bytes", "s", "percentunit", "reqps", "ops", "none"]
Kind = Literal["timeseries", "stat", "table"]
COLUMNS: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one a label set, named by `legend` (`{{label}}`)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`width` of 24 columns. `help` says how to read it, and what to do when it looks bad. `limits`: from
    which values on it turns yellow and red. `empty`: what it shows where the queries give nothing."""

    title: str
    queries: tuple[Query, ...]
    unit: Unit
    help: str
    kind: Kind = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    limits: tuple[float, float] | None = None
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`uid` is its address in every Grafana: it never changes."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]

    def panels(self) -> list[Panel]:
        """All of them, in order."""
        return [panel for row in self.rows for panel in row.panels]


def document(dashboard: Dashboard, others: Sequence[Dashboard] = ()) -> dict[str, Any]:
    """The JSON model Grafana imports. `others` are linked at the top."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["shardmesh"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "links": [
            {"type": "link", "title": other.title, "url": f"/d/{other.uid}", "keepTime": True}
            for other in others
            if other.uid != dashboard.uid
        ],
        "annotations": {"list": []},
        "templating": {"list": [_source_variable(), _instance_variable()]},
        "panels": _laid_out(dashboard.rows),
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instance_variable() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Node",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(meshd_processes_up, instance)", "refId": "instances"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows below each other; within one, panels from left to right, as many as fit."""
    made: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                y, x, tallest = y + tallest, 0, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            made.append(_panel(panel, len(made) + 1, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return made


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "range": panel.kind == "timeseries",
                "instant": panel.kind != "timeseries",
                **({"format": "table"} if table else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limits is not None:
        yellow, red = panel.limits
        if yellow <= red:
            steps += [{"color": "yellow", "value": yellow}, {"color": "red", "value": red}]
        else:  # the less the worse
            steps = [
                {"color": "red", "value": None},
                {"color": "yellow", "value": red},
                {"color": "green", "value": yellow},
            ]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.unit == "percentunit":
        defaults["max"] = 1
    if panel.empty:
        defaults["noValue"] = panel.empty
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.limits is None else "line"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "table":
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
