"""Filters of table rows: conditions on columns, all of which must hold, as pyarrow's `filters` writes them.

Law: pure. A condition on a null does not hold. Numbers are compared as numbers, texts as texts; those
that are compared with dates or times are of ISO 8601.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.strict_json import PlanError, checked_choice, checked_text, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OPERATORS: Final = (*_COMPARE, "in", "not in")
MAX_CONDITIONS: Final = 64
MAX_VALUES: Final = 10_000
Scalar = bool | int | float | str
_TIMES: Final = re.compile(r"date32\[day\]|timestamp\[(s|ms|us|ns)[],]")
_NANOSECONDS: Final = re.compile(r"(.*[.,]\d{6})(\d{1,18})([^\d].*|)", re.ASCII)
_MICROSECONDS: Final[dict[str | None, int | Fraction]] = {
    "s": 10**6,
    "ms": 10**3,
    "us": 1,
    "ns": Fraction(1, 1000),
    None: 86_400 * 10**6,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: `column` `operator` one of the `values` (one, except for `in` and `not in`)."""

    column: str
    operator: str
    values: tuple[Scalar, ...]

    def for_kind(self, kind: str) -> Condition:
        """Return the condition for a column of this kind: of dates and times, with texts as the numbers that
        the column holds. Times without a zone are in UTC. Texts that are no dates stay."""
        unit = _TIMES.match(kind)
        if unit is None or not any(isinstance(value, str) for value in self.values):
            return self
        return replace(self, values=tuple(_moment(value, unit[1]) for value in self.values))

    def require_kind(self, path: str, kind: str, *, text: bool) -> None:
        """Raises PlanError if the values cannot be compared with a column of this kind."""
        fits = all(isinstance(value, str) == text for value in self.values)
        if not fits:
            found = shown_value(next(value for value in self.values if isinstance(value, str) != text))
            hint = "; write dates and times as 2026-01-31 or 2026-01-31T12:00" if _TIMES.match(kind) else ""
            raise PlanError(path, f"{self.column!r} is {kind}, which is not compared with {found}{hint}")

    def holds(self, column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return for each value of a column (numbers, or texts as objects) whether the condition holds."""
        value = self.values[0] if self.values else None
        if self.operator in ("in", "not in"):
            found = _is_one_of(column, self.values)
            return found if self.operator == "in" else ~found
        compared = self.operator
        if column.dtype.kind in "iu" and isinstance(value, float) and math.isfinite(value):
            compared, value = _among_integers(compared, value)
        made: Any = _COMPARE[compared](column, value)
        return np.asarray(made, np.bool_)

    def may_hold(self, low: Scalar, high: Scalar) -> bool:
        """Return whether the condition may hold for a value of a column that lies in [low, high].

        True if that cannot be told. Floats may have a NaN beyond their range, which differs from everything,
        and may be of 32 bits, to which values are rounded where they are compared.
        """
        if any(isinstance(value, str) != isinstance(low, str) for value in self.values):
            return True
        if isinstance(low, float) and isinstance(high, float):
            low, high = low - _rounding(low), high + _rounding(high)
        if self.operator == "in":
            return any(low <= value <= high for value in self.values)  # type: ignore[operator]
        value: Any = self.values[0] if self.values else None
        first: Any = low
        last: Any = high
        if self.operator == "==":
            return bool(first <= value <= last)
        if self.operator in ("<", "<="):
            return bool(_COMPARE[self.operator](first, value))
        return self.operator not in (">", ">=") or bool(_COMPARE[self.operator](last, value))


def _among_integers(compared: str, value: float) -> tuple[str, Scalar]:
    """Return a comparison of integers with an integer, or with NaN, that is true where that with `value` is:
    as floats, integers above 2^53 would be rounded."""
    below = math.floor(value)
    if below == value:
        return compared, below
    if compared in ("==", "!="):
        return compared, math.nan  # which differs from all
    return ("<=" if compared in ("<", "<=") else ">"), below


def _rounding(value: float) -> float:
    """Return more than the distance of a float32 from a number that is rounded to it."""
    return abs(value) * 2.0**-23 + 2.0**-149


def _is_one_of(column: npt.NDArray[Any], values: Sequence[Scalar]) -> npt.NDArray[np.bool_]:
    if column.dtype == object:  # of which NumPy would compare each with each
        chosen = frozenset(values)
        return np.fromiter((text in chosen for text in column), np.bool_, column.size)
    return np.isin(column, _of_type(values, column.dtype))


def _of_type(values: Sequence[Scalar], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return those values that a column of this type may have, as it has them: in a common type of all, large
    integers would equal others, and 0.1 no number of a float32 column."""
    if dtype.kind not in "iub":
        return np.array(values, dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    numbers = (each for each in values if not isinstance(each, str))
    return np.array([int(each) for each in numbers if low <= each <= high and each == int(each)], dtype)


def _moment(value: Scalar, unit: str | None) -> Scalar:
    if not isinstance(value, str):
        return value
    finer = _NANOSECONDS.fullmatch(value)  # of which `fromisoformat` cuts off what it cannot hold
    try:
        found = datetime.fromisoformat(value if finer is None else finer[1] + finer[3])
    except ValueError:
        return value
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    micros = since // timedelta(microseconds=1) + Fraction("0." + finer[2] if finer else 0)
    number = micros / _MICROSECONDS[unit]
    return int(number) if number.denominator == 1 else float(number)


def parse_filter(value: Any) -> tuple[Condition, ...]:
    """Parse a list of [column, operator, value]. Raises PlanError with the path of the bad part."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CONDITIONS:
        raise PlanError(
            "filter", f'expected a list of 1…{MAX_CONDITIONS} conditions, such as [["price", ">", 3]]'
        )
    return tuple(_condition(item, f"filter[{number}]") for number, item in enumerate(value))


def _condition(item: Any, path: str) -> Condition:
    if not isinstance(item, list) or len(item) != 3:
        raise PlanError(path, 'a condition is [column, operator, value], such as ["price", ">", 3]')
    column = checked_text(item[0], f"{path}[0]", at_most=500)
    if item[1] == "=":
        raise PlanError(f"{path}[1]", "'=' is no operator; compare with '=='")
    chosen = checked_choice(item[1], f"{path}[1]", OPERATORS)
    several = chosen in ("in", "not in")
    values = item[2] if several else [item[2]]
    if not isinstance(values, list) or len(values) > MAX_VALUES:
        raise PlanError(f"{path}[2]", f"{chosen!r} takes a list of at most {MAX_VALUES} values")
    for value in values:
        if type(value) not in (bool, int, float, str):
            hint = "; a condition on a null never holds" if value is None else ""
            told = f"expected a number, a text or a bool, got {shown_value(value)}{hint}"
            raise PlanError(f"{path}[2]", told)
    return Condition(column, chosen, tuple(values))
