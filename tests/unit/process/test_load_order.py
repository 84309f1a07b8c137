"""`meshd serve` loads what recovers a store first, and the rest beside the recovery."""

from __future__ import annotations

import os
import subprocess
import sys

_AFTERWARDS = ("meshd.process.worker", "meshd.batches", "meshd.transform", "meshd.jobs", "cv2")


def test_what_only_later_processes_run_is_not_loaded_before_the_recovery() -> None:
    code = f"import sys, meshd.process.serve; print([name for name in {_AFTERWARDS} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
