"""The row of samples that are decoded once at toy size, and what its report holds against its bars."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench import kept_row as row
from bench.photo_dataset import make_album
from bench.results import Figure, RowResult
from bench.rows import QUICK

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)
SCALE = replace(QUICK, photographs=48, batch=8)


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_ways_at_toy_size(tmp_path: Path) -> None:
    """All samples come whatever is kept; where nothing may be, nothing is."""
    album = make_album(tmp_path, SCALE.photographs)
    figures = {figure.contender: figure for figure in row.measure(album, SCALE, tmp_path, lambda _: None)}
    assert list(figures) == [way.name for way in row.WAYS]
    for figure in figures.values():
        assert not figure.problem, figure
        assert figure.metrics["rate"] > 0
        assert figure.metrics["later_cpu"] > 0
    assert figures[row.NOTHING.name].metrics["kept"] == 0
    assert figures[row.TARS.name].metrics["kept"] == 0
    assert figures[row.ALL.name].metrics["kept"] > SCALE.photographs * 100_000


def result() -> RowResult:
    rates = {
        row.NOTHING: (1000.0, 1100.0, 0.0),
        row.ALL: (900.0, 2600.0, 2e9),
        row.TARS: (1000.0, 1000.0, 0.0),
        row.SOME: (950.0, 1200.0, 5e8),
    }
    figures = [
        Figure(way.name, 0, {"rate": first, "later_rate": later, "cpu": 1.5, "later_cpu": 0.6, "kept": kept})
        for way, (first, later, kept) in rates.items()
    ]
    setup = {"photographs": 4096, "batch": 256}
    return RowResult(row.NAME, "Kept", "2026-01-01T00:00:00+00:00", "abc", setup, tuple(figures), {})


def test_the_bars_of_the_row() -> None:
    bars = {title: told for title, *told in row.bars(result())}
    assert bars["all kept: a later epoch ÷ a first with nothing kept"] == ["2.60×", "≥ 2.5 met"]
    assert bars["room for 30 %: a later epoch ÷ with nothing kept"] == ["1.20×", "≥ 1.25 **missed**"]
    assert bars["bytes kept with room for 30 % ÷ all"] == ["0.25×", ""]
    assert bars["the first epoch, in which all is kept ÷ with nothing kept"] == ["0.90×", "≥ 0.97 **missed**"]
    text = "\n".join(row.section({row.NAME: result()}))
    assert "| loose photographs, all kept | 900 | 2,600 | 1.50 | 0.60 | 2,000 |" in text
    assert row.section({}) == []
