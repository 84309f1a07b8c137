"""The commands of docs/scale.md that `python -m bench --targets` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bench import scale_targets
from bench.__main__ import MISSED, WITHOUT_FIGURE, measured_targets

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def test_the_page_lists_these_commands() -> None:
    table = PAGE.read_text().partition("## Targets, and how to measure them")[2]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    kinds = [f"bench.open_cost --samples 1000000 {kind}" for kind in ("--kind tar", "--kind objects")]
    listed = [found for row in rows for found in re.findall(r"python -m (bench\.[^`]+)`", row)]
    assert set(listed) - {"bench.open_cost --samples 1000000"} == set(scale_targets.COMMANDS) - set(kinds)
    assert any("`--kind tar` and `--kind objects`" in row for row in rows)


def test_what_is_missed_and_what_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "met.py").write_text("print('1 s; <= 2 met')")
    (tmp_path / "late.py").write_text("import sys; print('3 s; <= 2 **missed**', file=sys.stderr)")
    (tmp_path / "broken.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    assert scale_targets.measure(["met", "late", "broken"], said.append) == (["late"], ["broken"])
    assert said == [
        "[1/3] python -m met",
        "1 s; <= 2 met",
        "[2/3] python -m late",
        "3 s; <= 2 **missed**",
        "[3/3] python -m broken",
        "ended with exit code 7",
    ]
    assert measured_targets(["met", "late"], strict=False) == 0
    assert measured_targets(["met", "late"], strict=True) == MISSED
    assert measured_targets(["late", "broken"], strict=True) == WITHOUT_FIGURE
    assert "a target is missed: python -m late" in capfd.readouterr().out
