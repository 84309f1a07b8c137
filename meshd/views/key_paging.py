"""List pages over a view's ordered keys.

Law: the cost of a page is proportional to the entries it shows; keys under a common prefix are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshwire.s3.operations import ListObjects

T = TypeVar("T")
PAGE_LIMIT = 1000
_BEYOND = "\U0010ffff"


class KeyPage(msgspec.Struct, Generic[T]):
    """A page of keys. `items`: (key, its value).

    `last`: the last key or prefix shown, after which the next page begins if this one is `truncated`.
    """

    items: list[tuple[str, T]] = msgspec.field(default_factory=list)
    prefixes: list[str] = msgspec.field(default_factory=list)
    truncated: bool = False
    last: str = ""

    def __len__(self) -> int:
        return len(self.items) + len(self.prefixes)


def build_page(operation: ListObjects, walk: Callable[[str, str], Iterator[tuple[str, T]]]) -> KeyPage[T]:
    """Return the page that `operation` requests.

    `walk(prefix, after)` yields the keys that begin with `prefix` and sort after `after`, in order.
    """
    page: KeyPage[T] = KeyPage()
    limit = min(operation.max_keys, PAGE_LIMIT)
    after: str | None = operation.after if limit > 0 else None
    while after is not None:
        after = _fill(page, operation, walk(operation.prefix, after), limit)
    return page


def _fill(page: KeyPage[T], operation: ListObjects, found: Iterator[tuple[str, T]], limit: int) -> str | None:
    """Add keys up to the first common prefix. Returns where to resume after it; None at the end."""
    prefix, delimiter = operation.prefix, operation.delimiter
    for key, value in found:
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        rolled = key[: cut + len(delimiter)] if cut >= 0 else ""
        if rolled and rolled <= operation.after:  # shown by an earlier page
            return rolled + _BEYOND
        if len(page) == limit:
            page.truncated = True
            return None
        page.last = rolled or key
        if rolled:
            page.prefixes.append(rolled)
            return rolled + _BEYOND
        page.items.append((key, value))
    return None
