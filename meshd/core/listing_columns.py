"""A listing of objects as columns: what a data set needs to know of objects that it reads whole.

Invariant: an object takes its key, its ETag and 24 bytes, a tenth of what its record takes.
"""

from __future__ import annotations

from array import array
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

from meshwire.frame.string_builder import StringColumnBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BLOCK: Final = 1000


class KeyFilter(Protocol):
    """Decides whether objects may be in a listing in columns."""

    def begin(self) -> None:
        """Start from zero: the listing begins, or begins again."""

    def accepts(self, keys: list[str]) -> bool:
        """Return whether the objects of a page, by their keys, may be in it."""


class ListingColumns:
    """Objects in order of key. Iteration yields (key, ETag without quotes, size in bytes)."""

    __slots__ = ("_etags", "_keys", "_sizes")

    def __init__(self) -> None:
        self._keys, self._etags = StringColumnBuilder(), StringColumnBuilder()
        self._sizes = array("q")

    def __repr__(self) -> str:
        return f"<ListingColumns of {len(self)} objects>"

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        return zip(self._keys, self._etags, self._sizes, strict=True)

    def extend(self, objects: Sequence[tuple[str, str, int]]) -> None:
        """Add (key, ETag, size) of objects that come after all others."""
        if objects:
            keys, etags, sizes = zip(*objects, strict=True)
            self._keys.extend(keys)
            self._etags.extend(etags)
            self._sizes.extend(sizes)

    @classmethod
    def merged(cls, listings: Sequence[ListingColumns]) -> ListingColumns:
        """Return the objects of several listings, none of which is in two, in order of key."""
        if len(listings) == 1:
            return listings[0]
        found = cls()
        # Code points are in the order of their UTF-8 bytes, which is the order of keys.
        objects = merge(*listings, key=itemgetter(0))
        while block := list(islice(objects, _BLOCK)):
            found.extend(block)
        return found
