"""The rules and dashboards that the chart ships, as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "helm" / "shardmesh"
RULES: Final = CHART / "rules" / "shardmesh.yaml"
GROUPS: Final[list[dict[str, Any]]] = yaml.safe_load(RULES.read_text())["groups"]
_GROUPS: Final = {each["name"]: each["rules"] for each in GROUPS}
RECORDINGS: Final[list[dict[str, Any]]] = _GROUPS["shardmesh.recordings"]
ALERTS: Final[list[dict[str, Any]]] = _GROUPS["shardmesh.alerts"]
DASHBOARDS: Final[dict[str, dict[str, Any]]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))
}
PANELS: Final = [
    panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"] if panel["type"] != "row"
]
_SUFFIXES: Final = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def panel_expressions(*, may_be_empty: bool) -> list[str]:
    """Return the expressions of panels that may give nothing when all is well, or of those that may not."""
    chosen = [each for each in PANELS if ("noValue" in each["fieldConfig"]["defaults"]) is may_be_empty]
    return sorted({target["expr"] for panel in chosen for target in panel["targets"]})


def exported_series() -> set[str]:
    """Return the names of all series that daemons and the operator export."""
    found = set[str]()
    declared = "meshd/telemetry/metrics.py", "meshd/telemetry/training_metrics.py"
    for path in (*declared, "operator/meshoperator/metrics.py"):
        text = (ROOT / path).read_text()
        declarations = r'\b(?:latest_)?_?(counter|gauge|histogram)\(\s*"(\w+)"'
        for kind, name in re.findall(declarations, text, re.IGNORECASE):
            found |= {name + suffix for suffix in _SUFFIXES[kind.lower()]}
    return found


def named_series(expr: str) -> set[str]:
    """Return the names of our series, recorded ones included, that an expression uses."""
    return set(
        re.findall(r"(?<![\w:])(?:[\w]+:)?mesh(?:d|_operator)_\w+(?::\w+)?", re.sub(r'"[^"]*"', "", expr))
    )
