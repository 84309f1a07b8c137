"""Markdown tables and how figures are written in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BARS_HEAD = ("", "figure", "bar")
MISSED = "**missed**"
"""How a verdict says so."""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    rule = ["---", *(["---:"] * (len(head) - 1))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def number(value: float | None, places: int = 2, unit: str = "") -> str:
    """A figure, or a dash."""
    return "–" if value is None else f"{value:,.{places}f}{unit}"


def percent(part: float | None, whole: float) -> str:
    """A share of a limit."""
    return number(100 * part / whole if part is not None else None, 0, " %")


def verdict(value: float | None, bar: float | None, *, at_most: bool = False) -> str:
    """The bar, and whether it is met."""
    if bar is None:
        return ""
    sign = "≤" if at_most else "≥"
    if value is None:
        return f"{sign} {bar:g}"
    met = value <= bar if at_most else value >= bar
    return f"{sign} {bar:g} {'met' if met else MISSED}"
