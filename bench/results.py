"""Raw figures, kept one file a row; a row is replaced as a whole, so that its ratios are always of one run.

Law: what a row's file says is all that the report says of it: figures, when, where and with what they were
taken. Only rounds that were finished count.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """What one contender did in one round; `problem` is empty when the figure counts. Without a round (None)
    it is the median of all of them, as a report printed it, the rounds themselves being lost.
    """

    contender: str
    round: int | None
    metrics: Mapping[str, float]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RowResult:
    """All figures of a row, and their provenance.

    `taken`: ISO 8601, UTC; `commit`: of the checkout; `setup`: sizes, how many `rounds`, how `busy` (% of
    the cores) the machine was before; `skipped`: why contenders are absent; `machine`, `versions`: see
    `bench.machine`; `note`: what a reader should know about this row alone. Where rounds are lost,
    `recovered` says from what the medians come, and `ratios` holds those that rounded medians do not give.
    """

    name: str
    title: str
    taken: str
    commit: str
    setup: Mapping[str, Any]
    figures: tuple[Figure, ...]
    skipped: Mapping[str, str]
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    note: str = ""
    recovered: str = ""
    ratios: Mapping[str, float] = field(default_factory=dict)

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
        if (said := self.ratios.get(f"{one} ÷ {other}, {metric}")) is not None:
            return said
        above, below = self.value(one, metric), self.value(other, metric)
        return above / below if above is not None and below else None

    def ratio_of(self, contender: str, above: str, below: str) -> float | None:
        """Median of one metric over median of another, of the same contender."""
        first, second = self.value(contender, above), self.value(contender, below)
        return first / second if first is not None and second else None

    def comparable(self, other: RowResult | None) -> bool:
        """Whether a figure of this row over one of another means anything: both are of one machine."""
        return other is not None and other.machine == self.machine


def finished(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Of a row that was interrupted: the figures of all rounds but the last that was begun."""
    last = max((figure.round or 0 for figure in figures), default=0)
    return tuple(figure for figure in figures if (figure.round or 0) < last)


def load(folder: Path) -> dict[str, RowResult]:
    """The rows kept in the folder, by name; none when there is no folder."""
    return {file.stem: _row(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))}


def _row(fields: dict[str, Any]) -> RowResult:
    return RowResult(**{**fields, "figures": tuple(Figure(**each) for each in fields["figures"])})


def keep(folder: Path, row: RowResult) -> Path:
    """Write the row's file, in place of the one it had; readable JSON, and whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file, new = folder / f"{row.name}.json", folder / f".{row.name}.new"
    new.write_text(json.dumps(asdict(row), indent=1, ensure_ascii=False) + "\n")
    return new.replace(file)
