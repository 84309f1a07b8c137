"""Dates in the formats of HTTP, S3's XML and SigV4.

Law: pure conversions between text and integers; the current time is always an argument. All times are UTC.
"""

from __future__ import annotations

import re
from calendar import timegm
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

# RFC 9110 §5.6.7: IMF-fixdate, then the two obsolete forms (RFC 850 and asctime) that recipients must
# accept.
_IMF = re.compile(
    r"(?:\w{3}, )?(\d{1,2}) (\w{3}) (\d{4}) (\d\d):(\d\d):(\d\d)(?: (?:GMT|UTC|[+-]0000))?\Z", re.A
)
_RFC850 = re.compile(r"\w{6,9}, (\d\d)-(\w{3})-(\d\d) (\d\d):(\d\d):(\d\d) GMT\Z", re.A)
_ASCTIME = re.compile(r"\w{3} (\w{3}) ([ \d]\d) (\d\d):(\d\d):(\d\d) (\d{4})\Z", re.A)
_ISO = re.compile(r"\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):\d\d:\d\d(?:\.\d{1,9})?Z\Z", re.A)
_AMZ = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z\Z", re.A)


def _at(seconds: int) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _seconds(year: int, month: int, day: int, hour: int, minute: int, second: int) -> int | None:
    try:
        return timegm(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timetuple())
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def format_http(seconds: int) -> str:
    """Format as IMF-fixdate, e.g. `Fri, 24 May 2013 00:00:00 GMT`."""
    t = _at(seconds)
    return (
        f"{_DAYS[t.weekday()]}, {t.day:02} {_MONTHS[t.month - 1]} {t.year:04} "
        f"{t.hour:02}:{t.minute:02}:{t.second:02} GMT"
    )


def parse_http(text: str) -> int | None:
    """Parse an HTTP date into seconds since the epoch, or None if it is invalid (RFC 9110 ignores such a
    condition)."""
    text = text.strip()
    if match := _IMF.match(text):
        day, month, year, *clock = match.groups()
    elif match := _RFC850.match(text):
        day, month, short_year, *clock = match.groups()
        year = ("19" if short_year >= "70" else "20") + short_year
    elif match := _ASCTIME.match(text):
        month, day, *clock, year = match.groups()
    else:
        parsed = parse_iso(text)
        return None if parsed is None else parsed // 1000
    if month not in _MONTHS:
        return None
    return _seconds(int(year), _MONTHS.index(month) + 1, int(day), *map(int, clock))


def format_iso(milliseconds: int) -> str:
    """Format as in S3's XML, e.g. `2011-02-26T01:56:20.000Z`."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_iso_seconds(seconds)}.{rest:03}Z"


_MILLISECONDS = tuple(f".{number:03}Z" for number in range(1000))


def format_iso_many(times: Iterable[int]) -> list[str]:
    """Apply `format_iso` to each time; consecutive times within the same second share most of the work."""
    found = []
    latest, written = None, ""
    for milliseconds in times:
        seconds = milliseconds // 1000
        if seconds != latest:
            latest, written = seconds, _iso_seconds(seconds)
        found.append(written + _MILLISECONDS[milliseconds % 1000])
    return found


@lru_cache(maxsize=4096)
def _iso_seconds(seconds: int) -> str:
    return _at(seconds).isoformat()[:19]


def parse_iso(text: str) -> int | None:
    """Parse an ISO 8601 time in UTC into milliseconds since the epoch (finer digits are cut), or None."""
    if _ISO.match(text) is None:  # fromisoformat takes other forms, too
        return None
    try:
        return (datetime.fromisoformat(text) - _EPOCH) // _MILLISECOND
    except ValueError:
        return None


@lru_cache(maxsize=1024)
def format_amz(seconds: int) -> str:
    """Format as in SigV4, e.g. `20130524T000000Z`."""
    return f"{_at(seconds):%Y%m%dT%H%M%SZ}"


@lru_cache(maxsize=1024)
def parse_amz(text: str) -> int | None:
    """Parse a SigV4 time into seconds since the epoch, or None."""
    match = _AMZ.match(text)
    return None if match is None else _seconds(*map(int, match.groups()))
