"""A page of an archive's names, with S3's prefix, delimiter and marker.

Law: the names are sorted and each stands once; a page costs what it returns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_BEYOND = "\U0010ffff"


class NamePage(NamedTuple):
    """`places`: of the names; `next_after`: the last name or prefix given, None at the end."""

    places: list[int]
    prefixes: list[str]
    next_after: str | None


def name_page(names: Sequence[str], prefix: str, delimiter: str, after: str, limit: int) -> NamePage:
    """At most `limit` names and common prefixes that begin with `prefix` and come after `after`."""
    found = NamePage([], [], None)
    at = max(bisect_left(names, prefix), bisect_right(names, after) if after else 0)
    last = ""
    while at < len(names) and names[at].startswith(prefix):
        cut = names[at].find(delimiter, len(prefix)) if delimiter else -1
        rolled = names[at][: cut + len(delimiter)] if cut >= 0 else ""
        if rolled and rolled <= after:  # given on an earlier page
            at = bisect_left(names, rolled + _BEYOND, at + 1)
            continue
        if len(found.places) + len(found.prefixes) == limit:
            return found._replace(next_after=last)
        if rolled:
            found.prefixes.append(rolled)
            last, at = rolled, bisect_left(names, rolled + _BEYOND, at + 1)
        else:
            found.places.append(at)
            last, at = names[at], at + 1
    return found
