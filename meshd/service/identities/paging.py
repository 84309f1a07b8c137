"""Pages of lists that are kept in order of their names.

Law: what is added or removed between two pages neither repeats nor hides anything else.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_PAGE = 1000

T = TypeVar("T")


class Page(msgspec.Struct, frozen=True):
    """One page of a list; `next` is what to ask `after`, empty on the last page."""

    items: tuple[dict[str, Any], ...]
    next: str = ""


def page(entries: Mapping[str, T], after: str, limit: int, show: Callable[[T], dict[str, Any]]) -> Page:
    """Up to `limit` of the entries after a name; `entries` are in order."""
    names = [name for name in entries if name > after]
    shown = tuple(show(entries[name]) for name in names[:limit])
    return Page(shown, names[limit - 1] if len(names) > limit else "")


def iso_time(ms: int) -> str:
    """Milliseconds since 1970 as people and programs read them."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
