"""Raw figures, kept in one JSON file; a row is replaced as a whole, so that its ratios are always of one
run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """What one contender did in one round; `problem` is empty when the figure counts."""

    contender: str
    round: int
    metrics: Mapping[str, float]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RowResult:
    """All figures of a row, with when and at which commit it was taken; `skipped` says why contenders are
    absent.
    """

    name: str
    title: str
    taken: str
    commit: str
    setup: Mapping[str, Any]
    figures: tuple[Figure, ...]
    skipped: Mapping[str, str]

    def contenders(self) -> list[str]:
        """Those with figures, in order of appearance."""
        return list(dict.fromkeys(figure.contender for figure in self.figures))

    def problem(self, contender: str) -> str:
        """The first thing that went wrong for the contender, or why it was skipped; empty when all is
        well.
        """
        if contender in self.skipped:
            return self.skipped[contender]
        return next(
            (each.problem for each in self.figures if each.contender == contender and each.problem), ""
        )

    def value(self, contender: str, metric: str) -> float | None:
        """The median over the rounds; None when the contender has a problem or no such metric."""
        if self.problem(contender):
            return None
        found = [each.metrics.get(metric) for each in self.figures if each.contender == contender]
        numbers = [number for number in found if number is not None]
        return median(numbers) if numbers else None

    def ratio(self, one: str, other: str, metric: str) -> float | None:
        """Median of one over median of the other."""
        above, below = self.value(one, metric), self.value(other, metric)
        return above / below if above is not None and below else None

    def ratio_of(self, contender: str, above: str, below: str) -> float | None:
        """Median of one metric over median of another, of the same contender."""
        first, second = self.value(contender, above), self.value(contender, below)
        return first / second if first is not None and second else None


def load(path: Path) -> dict[str, RowResult]:
    """The rows of the file; none when it does not exist."""
    if not path.exists():
        return {}
    return {name: _row(fields) for name, fields in json.loads(path.read_text()).items()}


def _row(fields: dict[str, Any]) -> RowResult:
    return RowResult(**{**fields, "figures": tuple(Figure(**each) for each in fields["figures"])})


def save(path: Path, rows: Mapping[str, RowResult]) -> None:
    """Write all rows; readable JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1))
