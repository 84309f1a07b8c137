"""Page merge: sorted listing pages of several nodes as one page. Pure.

Each name comes from one source; a common prefix may come from several and appears once. A merged page
equals the page of a store that holds everything the sources hold.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from meshd.store.records import EntryPage, UploadPage, VersionPage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.store.records import Record, Upload
    from meshwire.s3.result_types import ObjectEntry

P = TypeVar("P", EntryPage, VersionPage, UploadPage)
Marker = tuple[str, str]
"""The position after which a page begins: a name, and an id among those of the name (empty: after all of
them)."""


class Item(NamedTuple):
    """One line of a listing; `value` is None for a common prefix."""

    name: bytes
    value: object
    marker: Marker


class PageSource(msgspec.Struct, Generic[P]):
    """The pages of one node. `fetch` returns the page after a marker, with at most that many items."""

    fetch: Callable[[Marker, int], Awaitable[P]]
    marker: Marker
    items: list[Item] = msgspec.field(default_factory=list)
    at: int = 0
    more: bool = True

    @property
    def head(self) -> Item | None:
        return self.items[self.at] if self.at < len(self.items) else None

    async def fill(self, limit: int, read: Callable[[P], tuple[list[Item], bool, Marker]]) -> None:
        """Fetch pages until there is a next item, or none is left."""
        while self.at >= len(self.items) and self.more:
            self.items, self.more, self.marker = read(await self.fetch(self.marker, limit))
            self.at = 0


async def merge_sources(
    sources: Sequence[PageSource[P]],
    limit: int,
    read: Callable[[P], tuple[list[Item], bool, Marker]],
) -> tuple[list[Item], bool]:
    """Return the first `limit` items of all sources in order, and whether there are more. The caller fills
    every source once before, all of them concurrently."""
    share = page_share(limit, len(sources))
    heap = [(source.head.name, number) for number, source in enumerate(sources) if source.head is not None]
    heapq.heapify(heap)
    found: list[Item] = []
    rolled: bytes | None = None
    while heap:
        name, number = heap[0]
        source = sources[number]
        item = source.items[source.at]
        again = item.value is None and name == rolled
        if not again:
            if len(found) == limit:
                return found, True
            found.append(item)
            rolled = name if item.value is None else rolled
        source.at += 1
        await source.fill(share, read)
        if source.head is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (source.head.name, number))
    return found, False


def page_share(limit: int, sources: int) -> int:
    """Return how many items to request from each source at a time: a little more than its share of the page.
    The first pages must have this limit, too."""
    return limit if sources < 2 else min(limit, limit // sources + limit // 8 + 2)


def _sort_items(lines: list[Item], prefixes: Sequence[str]) -> list[Item]:
    rolled = [Item(prefix.encode(), None, (prefix, "")) for prefix in prefixes]
    # The sort is stable: versions of one name keep their order.
    return sorted([*lines, *rolled], key=lambda item: item.name) if rolled else lines


# --- the three kinds of pages -----------------------------------------------------------------------------


def read_entries(page: EntryPage) -> tuple[list[Item], bool, Marker]:
    """Return the items, whose values are (entry, owner); whether there are more; and the next marker."""
    lines = [
        Item(entry.key.encode(), (entry, owner), (entry.key, ""))
        for entry, owner in zip(page.entries, page.owners, strict=True)
    ]
    return _sort_items(lines, page.prefixes), page.truncated, (page.next_after, "")


def entry_page(items: Sequence[Item], *, truncated: bool) -> EntryPage:
    """Return the page of merged items."""
    lines: list[tuple[ObjectEntry, str]] = [item.value for item in items if item.value is not None]  # type: ignore[misc]
    return EntryPage(
        tuple(entry for entry, _ in lines),
        tuple(owner for _, owner in lines),
        _prefixes(items),
        truncated,
        items[-1].marker[0] if truncated else "",
    )


def read_versions(page: VersionPage) -> tuple[list[Item], bool, Marker]:
    """Return the items, whose values are (key, record, whether it is the latest), as `read_entries` does."""
    lines = [
        Item(key.encode(), (key, record, latest), (key, record.version or "null"))
        for (key, record), latest in zip(page.entries, page.latest, strict=True)
    ]
    return _sort_items(lines, page.prefixes), page.truncated, (page.next_key, page.next_version)


def version_page(items: Sequence[Item], *, truncated: bool) -> VersionPage:
    """Return the page of merged items."""
    lines: list[tuple[str, Record, bool]] = [item.value for item in items if item.value is not None]  # type: ignore[misc]
    following = items[-1].marker if truncated else ("", "")
    return VersionPage(
        tuple((key, record) for key, record, _ in lines),
        tuple(latest for _, _, latest in lines),
        _prefixes(items),
        truncated,
        *following,
    )


def read_uploads(page: UploadPage) -> tuple[list[Item], bool, Marker]:
    """Return the items, whose values are uploads, as `read_entries` does."""
    lines = [Item(upload.key.encode(), upload, (upload.key, upload.upload_id)) for upload in page.uploads]
    return _sort_items(lines, page.prefixes), page.truncated, (page.next_key, page.next_id)


def upload_page(items: Sequence[Item], *, truncated: bool) -> UploadPage:
    """Return the page of merged items."""
    lines: list[Upload] = [item.value for item in items if item.value is not None]  # type: ignore[misc]
    following = items[-1].marker if truncated else ("", "")
    return UploadPage(tuple(lines), _prefixes(items), truncated, *following)


def _prefixes(items: Sequence[Item]) -> tuple[str, ...]:
    return tuple(item.marker[0] for item in items if item.value is None)
