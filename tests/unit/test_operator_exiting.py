"""An operator whose loop does not end is ended; one that ends is not kept."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("then", "status"),
    [("threading.Event().wait(60)", 1), ("pass", 0), ("sys.exit(3)", 3)],
    ids=["hangs", "ends", "fails"],
)
def test_the_process_ends_by_itself_or_is_ended(then: str, status: int) -> None:
    patience = 0.2 if status == 1 else 3600
    program = (
        f"import sys, threading; from meshoperator.forced_exit import exit_within; exit_within({patience}); "
    )
    ended = subprocess.run(
        [sys.executable, "-c", program + then], timeout=60, capture_output=True, check=False
    )
    assert ended.returncode == status
    assert (b"does not end" in ended.stderr) == (status == 1)
