"""`python -m tests.scale` at a thousandth of its size; the larger figures are in docs/faults.md."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from tests.scale.counts import Counts
from tests.scale.scenes import SCENES
from tests.scale.table import Table

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scene", sorted(SCENES))
def test_a_scene_runs_and_prints_figures(scene: str, tmp_path: Path) -> None:
    table = Table(io.StringIO())
    SCENES[scene](tmp_path, Counts.quick(), table)  # asserts what the daemon answers
    assert all(value >= 0 for value in table.figures.values())
    assert {name for name, _ in table.figures} == {scene}
