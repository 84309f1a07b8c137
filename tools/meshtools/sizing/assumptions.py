"""Assumptions: prices and rates by name, each with its source and date.

Law: a name is `table.figure`, in the units that the name says (bytes, seconds, USD); a figure that is not
in the shipped file does not exist.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError
from meshwire.strict_json import suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_ABOVE_ZERO = (
    *("bytes_per", "nic_bytes_per", "drives_per", "most_", "fill", "utilization", "disk_over", "lifetime"),
)
"""How the names of figures begin, without their table, that are not 0."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One figure, with where it comes from and when that was true."""

    value: float
    source: str
    date: str


class Assumptions:
    """Figures by name, such as `rotational.usd_per_drive`."""

    def __init__(self, figures: Mapping[str, Assumption]) -> None:
        self._figures = dict(figures)

    def __repr__(self) -> str:
        return f"<Assumptions: {len(self._figures)} figures>"

    def __getitem__(self, name: str) -> float:
        """Return the value of a figure. Raises ConfigurationError if there is none of this name."""
        return self.figure(name).value

    def figure(self, name: str) -> Assumption:
        """Return a figure with its source. Raises ConfigurationError if there is none of this name."""
        found = self._figures.get(name)
        if found is None:
            raise ConfigurationError(f"there is no assumption {name!r}{suggestion(name, self._figures)}")
        return found

    def items(self) -> Iterator[tuple[str, Assumption]]:
        """Yield all figures in the order of the file."""
        yield from self._figures.items()

    @property
    def ops(self) -> list[str]:
        """The names of ops with known costs: `photo` and so on."""
        return sorted({name.split(".")[1] for name in self._figures if name.startswith("ops.")})

    def changed(self, values: Mapping[str, float], source: str) -> Assumptions:
        """Return a copy with other values. Raises ConfigurationError for names that do not exist, values
        below 0, and 0 where something is divided by it."""
        figures = dict(self._figures)
        for name, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name} is {value}; it must be a number from 0 up")
            if not value and name.rpartition(".")[2].startswith(_ABOVE_ZERO):
                raise ConfigurationError(f"{name} is {value}; it must be above 0")
            if value > 1 and name.startswith("limits."):
                raise ConfigurationError(f"{name} is {value}; it must be at most 1")
            figures[name] = replace(self.figure(name), value=value, source=source, date="")
        return Assumptions(figures)


@cache
def shipped_assumptions() -> Assumptions:
    """Return the assumptions that ship with the package."""
    text = files("meshtools.sizing").joinpath("assumptions.toml").read_text(encoding="utf-8")
    figures = {
        name: Assumption(float(value["value"]), value["source"], value["date"])
        for name, value in _flat(tomllib.loads(text))
    }
    return Assumptions(figures)


def parse_values(text: str, source: str) -> dict[str, float]:
    """Parse TOML whose figures are numbers, or tables with a `value`. Raises ConfigurationError, which names
    `source`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{source} is not TOML: {error}") from None
    found = {}
    for name, value in _flat(document):
        number = value.get("value") if isinstance(value, dict) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ConfigurationError(f"{source}: {name} must be a number")
        found[name] = float(number)
    return found


def _flat(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a TOML document, where tables with a `value` are values."""
    for key, value in document.items():
        if isinstance(value, dict) and "value" not in value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
