"""`python -m tests.scale` at a thousandth of its size; the larger figures are in docs/faults.md."""

from __future__ import annotations

import io
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.scale.counts import Counts
from tests.scale.scenes import SCENES
from tests.scale.table import Table, private_bytes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sampled(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", sorted(SCENES))
def test_a_scene_runs_and_prints_figures(scene: str, tmp_path: Path) -> None:
    table = Table(io.StringIO())
    SCENES[scene](tmp_path, Counts.quick(), table)  # asserts what the daemon answers
    assert all(value >= 0 for value in table.figures.values())
    assert {name for name, _ in table.figures} == {scene}


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert private_bytes(os.getpid()) > 0
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert private_bytes(ended.pid) == 0
    assert private_bytes(ended.pid) == 0
