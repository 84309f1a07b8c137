"""The program that fetches helm, on a machine without pytest: CI images are built with it."""

from __future__ import annotations

import subprocess
import sys


def test_it_loads_without_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import tests.kubernetes.helm_binary as it; it.fetch"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
