"""The chart as tests install it: with the real helm, on API servers that are older than it wants."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.kubernetes.control_plane import ROOT
from tests.support.earlier_release import EARLIER, unpack

if TYPE_CHECKING:
    from pathlib import Path


def earlier(place: Path) -> Path:
    """This repository as it was at that commit. Skips the test where there is no history."""
    return unpack(EARLIER, place, "helm", "meshd", "operator", "sdk")


def copied_chart(place: Path, root: Path = ROOT) -> Path:
    """As it is, but for old API servers, too; the definitions are there already."""
    target = place / "shardmesh"
    shutil.copytree(root / "helm" / "shardmesh", target, ignore=shutil.ignore_patterns("crds"))
    lines = (target / "Chart.yaml").read_text().splitlines()
    (target / "Chart.yaml").write_text("\n".join(line for line in lines if "kubeVersion" not in line))
    return target


def run_helm(*argv: str, given: object = None) -> None:
    done = subprocess.run(
        argv, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
