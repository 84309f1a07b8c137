"""docs/operations.md leaves out no setting, docs/metrics.md no metric. (tests/docs runs their commands.)"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from meshd.config import OPTIONS
from meshd.telemetry.legacy_names import RENAMED_METRICS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
TABLE = (ROOT / "docs" / "metrics.md").read_text()
METRICS = "".join(
    (ROOT / "meshd" / "telemetry" / name).read_text() for name in ("metrics.py", "training_metrics.py")
)
CURRENT, EARLIER = TABLE.split("## Earlier names")


def test_every_setting_is_told() -> None:
    for name in OPTIONS:
        assert f"| `{name}`" in PAGE, f"setting {name} is missing"


def test_every_metric_is_told_and_none_that_is_not_there() -> None:
    metrics = set(re.findall(r'"(meshd_\w+)"', METRICS))
    assert metrics == set(re.findall(r"`(meshd_\w+)`", CURRENT))


def test_every_earlier_name_is_told() -> None:
    told = set(re.findall(r"^\| `(meshd_\w+)` \| `(meshd_\w+)` \|", EARLIER, re.MULTILINE))
    assert told == {(renamed.old, renamed.new) for renamed in RENAMED_METRICS}


def test_every_metric_is_counted_somewhere() -> None:
    code = "".join(path.read_text() for path in (ROOT / "meshd").rglob("*.py"))
    words = Counter(re.findall(r"\w+", code))
    declared = re.findall(r"^(\w+) = (?:latest_)?(?:counter|gauge|histogram)\(", METRICS, re.MULTILINE)
    assert len(declared) > 100
    for name in declared:
        assert f"metrics.{name}" in code or words[name] > 1, f"nobody counts {name}"
