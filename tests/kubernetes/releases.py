"""The chart as tests install it: with the real helm, on API servers that are older than it wants."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.control_plane import ROOT

if TYPE_CHECKING:
    from pathlib import Path


# Before volumes that grow and neighbours on one disk: rights and definitions have changed since.
EARLIER = "a78d64589d71f8770ebadb6a409fe819a39c6c10"


def earlier(place: Path) -> Path:
    """This repository as it was at that commit. Skips the test where there is no history."""
    parts = ("helm", "meshd", "operator", "sdk")
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER, *parts], capture_output=True, check=False, timeout=60
    )
    if done.returncode:
        pytest.skip(f"the history of this checkout does not reach back to {EARLIER[:7]}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place


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
