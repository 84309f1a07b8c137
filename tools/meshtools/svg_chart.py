"""Bar charts as SVG, for reports of tools.

Law: text in, text out; a chart is the same to the byte for the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROW, _LABEL, _BAR, _VALUE, _TITLE = 22, 230, 420, 150, 34
_COLORS = ("#3b6ea8", "#c2703d", "#5c8f4f", "#8a5a9e")


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart: a title, and rows of (label, value, the value as text)."""

    title: str
    rows: Sequence[tuple[str, float, str]]


def bars_svg(charts: Sequence[Bars]) -> str:
    """Return an SVG document with the charts below each other; values are from 0 up."""
    height, body = 0, list[str]()
    for number, chart in enumerate(charts):
        color, largest = _COLORS[number % len(_COLORS)], max((row[1] for row in chart.rows), default=0.0)
        body.append(f'<text x="8" y="{height + 22}" font-weight="bold">{escape(chart.title)}</text>')
        height += _TITLE
        for label, value, told in chart.rows:
            width = _BAR * value / largest if largest else 0.0
            middle = height + 15
            body.append(
                f'<text x="{_LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>'
                f'<rect x="{_LABEL}" y="{height + 3}" width="{width:.1f}" height="16" fill="{color}"/>'
                f'<text x="{_LABEL + width + 6:.1f}" y="{middle}">{escape(told)}</text>'
            )
            height += _ROW
        height += 8
    size = f'width="{_LABEL + _BAR + _VALUE}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
