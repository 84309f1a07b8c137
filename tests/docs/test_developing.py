"""The exercises of docs/developing.md: their patches fit the code, and do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "developing.md").read_text()
PATCHES = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"test_developing.py.*?-->\n```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_exercises_do_what_the_page_says(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for package in ("meshd", "sdk"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for patch in PATCHES:
        done = subprocess.run(
            ["git", "apply", "-"], input=patch, cwd=copy, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(copy), str(copy / "sdk")])
    node = Daemon(tmp_path / "data", (), {}, 1)
    node.prefix = ("env", f"PYTHONPATH={path}", "PYTHONSAFEPATH=1")  # not the code of its working directory
    with node:
        node.up()
        env = {**os.environ, "PYTHONPATH": path, "MESH_ENDPOINT": node.endpoint}
        env |= {"AWS_ACCESS_KEY_ID": node.access_key, "AWS_SECRET_ACCESS_KEY": node.secret_key}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        lines = [line for block in BLOCKS for line in block.splitlines()]
        assert len(lines) == 3
        for line in lines:
            command, _, expected = line.rpartition("  # ")
            told = subprocess.run(
                ["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            assert told.returncode == 0, told.stderr
            assert expected in " ".join(told.stdout.split()), told.stdout
