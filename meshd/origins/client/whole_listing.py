"""WholeListing: every object below a prefix of an origin, listed in several ranges of names at a time.

S3 returns 1,000 names per request, and each request needs the last name of the one before it. The names are
therefore cut at folders, and the ranges between the cuts are listed concurrently.

Law: the ranges cover all names, so where the cuts are changes how long a listing takes, not what it contains.
A source whose names fit one response costs one request. An origin whose names do not ascend is an error,
because a listing that repeats itself would never end.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import obstore

from meshd.origins.client.origin_api import OriginDownError
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    Meta = Mapping[str, Any]

PAGE: Final = 1000  # names of a response
AT_ONCE: Final = 8
"""Ranges of one listing that are requested at a time."""
_MOST_RANGES: Final = 4 * AT_ONCE  # more than that, so that a large one delays the listing less
_ENOUGH_CUTS: Final = 2 * AT_ONCE
_LEVELS: Final = 3
RESPONSE_SECONDS: Final = 60.0
"""Maximum seconds for one response, with its retries."""


class WholeListing:
    """Lists the objects below `prefix` in an origin, `store`, which lists in order of names, from `begin` on.
    `offset` returns where a listing begins that has a name; `ranged`: the origin itself can begin there."""

    def __init__(
        self,
        store: Any,
        name: str,
        prefix: str,
        begin: str,
        offset: Callable[[str], str],
        *,
        ranged: bool,
    ) -> None:
        self._store, self._name, self._prefix = store, name, prefix
        self._begin, self._offset = begin, offset
        self._levels = _LEVELS if ranged else 0
        self._folder = prefix.rpartition("/")[0]
        self._slots = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<WholeListing of {self._name}/{self._prefix}>"

    async def objects(self) -> list[Meta]:
        """Return the objects in order of their names. Raises OriginDownError, TimeoutError and obstore's
        errors."""
        cuts: list[str] = []
        if self._levels:
            page = await self._first_page(self._folder, self._begin)
            if len(page) < PAGE:
                return [found for found in page if found["path"].startswith(self._prefix)]
            cuts = await self._cuts(self._folder, page, self._levels)
        bounds: list[str | None] = ["", *cuts, None]
        ranges = itertools.pairwise(bounds)
        tasks = [asyncio.ensure_future(self._range(first or "", end)) for first, end in ranges]
        try:
            parts = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        return list(itertools.chain.from_iterable(parts))

    async def _cuts(self, folder: str, page: Sequence[Meta], levels: int) -> list[str]:
        """Return folders at which to cut the names in a folder, ascending; none if its first names, `page`,
        are all of them, or are in no folders."""
        start = len(folder) + 1 if folder else 0
        if len(page) < PAGE or not any("/" in found["path"][start:] for found in page):
            return []
        async with self._slots, timeout(RESPONSE_SECONDS * _LEVELS):
            level = await obstore.list_with_delimiter_async(self._store, folder or None)
        found = sorted(f"{name.rstrip('/')}/" for name in level["common_prefixes"])
        if len(found) < _ENOUGH_CUTS and levels > 1:
            below = [name.rstrip("/") for name in found]
            pages = await asyncio.gather(*map(self._first_page, below))
            wanted = zip(below, pages, strict=True)
            deeper = await asyncio.gather(*(self._cuts(*each, levels - 1) for each in wanted))
            found = sorted({*found, *itertools.chain.from_iterable(deeper)})
        inside = [name for name in found if name.startswith(self._prefix)]
        return inside[:: -(-len(inside) // _MOST_RANGES) or 1]

    async def _first_page(self, folder: str, begin: str = "") -> Sequence[Meta]:
        pages = obstore.list(self._store, folder or None, offset=begin or None, chunk_size=PAGE)
        async with self._slots, timeout(RESPONSE_SECONDS):
            found: Sequence[Meta] = await anext(pages, [])
        return found

    async def _pages(self, start: str) -> AsyncGenerator[Sequence[Meta], None]:
        pages = obstore.list(self._store, self._folder or None, offset=start or None, chunk_size=PAGE)
        while True:
            async with timeout(RESPONSE_SECONDS):
                page: Sequence[Meta] | None = await anext(pages, None)
            if page is None:
                return
            yield page

    async def _range(self, first: str, end: str | None) -> list[Meta]:
        """Return the objects from the name `first` to before `end`. Raises OriginDownError."""
        found: list[Meta] = []
        last, prefix = "", self._prefix
        async with self._slots, aclosing(self._pages(self._offset(first) or self._begin)) as pages:
            async for page in pages:
                for each in page:
                    key = each["path"]
                    if key <= last:
                        raise OriginDownError(
                            f"the origin of {self._name} lists its names out of order: {key[:100]!r} after "
                            f"{last[:100]!r}"
                        )
                    last = key
                    if end is not None and key >= end:
                        return found
                    if key >= first and key.startswith(prefix):
                        found.append(each)
                    elif key > prefix and not key.startswith(prefix):
                        return found
        return found
