"""A node's own figures, as its `/metrics` tells them to anybody.

Law: asks without a signature, once; what cannot be read is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshsdk.connections import Connection
from meshsdk.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.settings import Endpoint

_LINE: Final = re.compile(r"([a-z_]+)(?:\{([^}]*)\})? ([0-9.e+-]+|NaN|[+-]Inf)")
_LABEL: Final = re.compile(r'([a-z_]+)="([^"]*)"')
_LONGEST: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Scrape:
    """Values by name, then by labels: a tuple of (label, value), in order."""

    values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for have, value in self.values.get(name, {}).items() if wanted <= set(have))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sums by the values of one label, over all series that have the others."""
        found: dict[str, float] = {}
        wanted = set(labels.items())
        for have, value in self.values.get(name, {}).items():
            if not wanted <= set(have):
                continue
            key = dict(have).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def scrape(endpoint: Endpoint, timeout: float = 5.0) -> Scrape:
    """What a node tells now. Raises ConnectError."""
    connection = Connection(endpoint, timeout)
    try:
        connection.send([f"GET /metrics HTTP/1.1\r\nhost: {endpoint.authority}\r\n\r\n".encode()])
        response = connection.receive()
        if response.status != 200:
            raise ConnectError(f"{endpoint} has no /metrics (it answers {response.status}): is it a meshd?")
        return parse(response.read(_LONGEST).decode("utf-8", "replace"))
    finally:
        connection.close()


def parse(text: str) -> Scrape:
    """The values of Prometheus' text format."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, labels, value in _lines(text):
        values.setdefault(name, {})[labels] = value
    return Scrape(values)


def _lines(text: str) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            yield found[1], tuple(sorted(_LABEL.findall(found[2] or ""))), float(found[3])
