"""Cron's five fields: minute, hour, day, month, day of the week; UTC. Pure.

Law: as POSIX crontab has it: where both day and day of the week are restricted, either will do; 0 and 7 are
Sunday. Names (jan, mon) and steps (*/5) as in Vixie's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime

_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: Final[tuple[tuple[str, int, int, dict[str, int]], ...]] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of the week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)
_FARTHEST: Final = 366 * 9  # days: a 29th of February may be eight years away


class ScheduleError(ValueError):
    """Not a schedule; the message names the field."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`either`: both days are restricted."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    def after(self, moment: datetime) -> datetime | None:
        """The first minute later than `moment`; None: there is none."""
        first = (moment.astimezone(UTC) + timedelta(minutes=1)).replace(second=0, microsecond=0)
        day = first.replace(hour=0, minute=0)
        for _ in range(_FARTHEST):
            if self._on(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        found = day.replace(hour=hour, minute=minute)
                        if found >= first:
                            return found
            day += timedelta(days=1)
        return None

    def _on(self, day: datetime) -> bool:
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        wanted = (by_day or by_weekday) if self.either else (by_day and by_weekday)
        return day.month in self.months and wanted


def parse_schedule(text: str) -> Schedule:
    """Raises ScheduleError."""
    parts = text.lower().split()
    if len(parts) != len(_FIELDS):
        raise ScheduleError(f"{text!r} has not five fields: minute hour day month weekday")
    minutes, hours, days, months, weekdays = (
        _field(part, *field) for part, field in zip(parts, _FIELDS, strict=True)
    )
    either = not parts[2].startswith("*") and not parts[4].startswith("*")
    return Schedule(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either)


def _field(text: str, name: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _number(step_text, name, 1, high, {}) if slash else 1
        if span == "*":
            first, last = low, high
        else:
            begin, dash, end = span.partition("-")
            first = _number(begin, name, low, high, names)
            last = _number(end, name, low, high, names) if dash else (high if slash else first)
        if last < first:
            raise ScheduleError(f"{name}: {span!r} ends before it begins")
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(text: str, name: str, low: int, high: int, names: dict[str, int]) -> int:
    value = names.get(text, int(text) if text.isdecimal() and len(text) < 4 else -1)
    if not low <= value <= high:
        raise ScheduleError(f"{name}: {text!r} is not from {low} to {high}")
    return value
