"""Rules and dashboards as files of the chart; run as a program it writes them.

make reference
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from meshoperator.monitoring.dashboards import DASHBOARDS
from meshoperator.monitoring.panels import document
from meshoperator.monitoring.rules import rule_groups

ROOT = Path(__file__).resolve().parents[2]
_CHART = ROOT / "helm" / "shardmesh"
_HEAD = "# Made of operator/meshoperator/monitoring/rules.py by `make reference`.\n"


def files() -> dict[Path, str]:
    """Path → what should be there."""
    rules = _HEAD + yaml.safe_dump(rule_groups(), sort_keys=False, width=110, allow_unicode=True)
    made = {_CHART / "rules" / "shardmesh.yaml": rules}
    for dashboard in DASHBOARDS:
        text = json.dumps(document(dashboard, DASHBOARDS), indent=1, ensure_ascii=False) + "\n"
        made[_CHART / "dashboards" / f"{dashboard.uid}.json"] = text
    return made


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
