"""docs/operations.md: its commands run, and it leaves out no setting and no metric."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from meshd.config import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operations.md"
METRICS = ROOT / "meshd" / "telemetry" / "metrics.py"


def test_the_commands_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    ending = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"  # whatever fails, no daemon is left
    (tmp_path / "page.sh").write_text("\n".join(["set -euo pipefail", ending, *blocks]))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MESHD_", "AWS_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "page.sh"],
        cwd=tmp_path,
        env=inherited | {"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    log = tmp_path / "meshd.log"
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}\n{log.read_text() if log.exists() else ''}"
    assert "greeting" in run.stdout
    assert 'meshd_processes_up{role="worker"} 1.0' in run.stdout


def test_every_setting_and_every_metric_is_told() -> None:
    text = PAGE.read_text()
    for name in OPTIONS:
        assert f"| `{name}`" in text, f"setting {name} is missing"
    for name in re.findall(r'"(meshd_\w+)"', METRICS.read_text()):
        assert f"`{name}`" in text, f"metric {name} is missing"
