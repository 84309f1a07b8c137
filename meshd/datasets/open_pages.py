"""OpenPageCache: the pages of snapshots that this process has open.

Law: a page whose document was cut off in its file is not returned. What is cut off reads as zeros once the
file is longer again, so the last byte that is no zero is looked at before each use.
Invariant: the pages, and the columns of them, are bounded. Those that were not used for long are closed
first, as far as a flag on each tells (CLOCK).

A batch of a full shuffle needs a thousand pages of a hundred thousand, none of which is in the processor's
caches: what is read to find a page costs more than the instructions. So there is a list of the pages of each
snapshot in use, by their numbers, beside the table of all pages by the hashes of their documents.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PagedSnapshot
    from meshwire.frame.tensor_frame import Buffer

MAX_PAGES: Final = 131_072
_MAX_COLUMNS: Final = 2 * MAX_PAGES
"""Pages that a process keeps open, and columns of them, which take about 600 bytes each. To open a page costs
as much as to use it 25 times."""
_MAX_LISTED: Final = 4 * MAX_PAGES
"""Pages, open or not, of all snapshots that have a list; one snapshot has it in any case."""
_MAX_SECOND_CHANCES: Final = 64  # for one page that is closed
_PORTION: Final = 4096  # bytes
_ZERO: Final = memoryview(b"\0")


class _Entry:
    """A page, None once it is closed. `witness`: one byte, the last of the document that is no zero;
    `referenced`: it was opened or used since it got its last second chance."""

    __slots__ = ("page", "referenced", "witness")

    def __init__(self, page: Page | None, witness: memoryview) -> None:
        self.page, self.witness, self.referenced = page, witness, True


_CLOSED: Final = _Entry(None, _ZERO)


class OpenPageCache:
    """Open pages by the SHA-256 of their documents. Any thread may use it."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, _Entry] = OrderedDict()
        self._columns = 0  # of all pages
        self._lists: OrderedDict[str, list[_Entry]] = OrderedDict()  # by the hash of the snapshot
        self._listed = 0  # pages of all lists
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<OpenPageCache, {len(self._pages)} open>"

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def pages_of(
        self,
        snapshot: PagedSnapshot,
        numbers: Sequence[int],
        open_page: Callable[[PagedSnapshot, int], Page],
    ) -> list[Page]:
        """Return pages of a snapshot. `open_page` opens and adds one that is closed, or whose file was cut
        off; it may raise what it likes."""
        entries = self._list_of(snapshot)
        found: list[Page] = []
        for number in numbers:
            entry = entries[number]
            page = entry.page
            if page is None or not entry.witness[0]:
                digest = snapshot.table.hash_of(number)
                page = self._page(digest)
                if page is None:
                    page = open_page(snapshot, number)
                entry = entries[number] = self._pages.get(digest, _CLOSED)
            entry.referenced = True
            found.append(page)
        return found

    def add(self, digest: bytes, page: Page, document: Buffer) -> None:
        """Keep an open page, whose document is not empty."""
        entry = _Entry(page, _last_byte(document))
        with self._lock:
            self._close(digest)
            self._pages[digest] = entry
            self._columns += _column_count(page)
            while len(self._pages) > MAX_PAGES or (self._columns > _MAX_COLUMNS and len(self._pages) > 1):
                self._close(self._choose_victim())

    def clear(self) -> None:
        """Close all pages."""
        with self._lock:
            while self._pages:
                self._close(next(iter(self._pages)))

    def _page(self, digest: bytes) -> Page | None:
        """Return a page that is open, for another snapshot or since it was closed; one whose file was cut off
        is closed."""
        with self._lock:
            entry = self._pages.get(digest, _CLOSED)
            if entry.page is not None and not entry.witness[0]:
                self._close(digest)
            return entry.page

    def _choose_victim(self) -> bytes:
        """Return the page to close next; a page that was used gets a second chance."""
        for _ in range(_MAX_SECOND_CHANCES):
            digest, entry = next(iter(self._pages.items()))
            if not entry.referenced:
                break
            entry.referenced = False
            self._pages.move_to_end(digest)
        return next(iter(self._pages))

    def _close(self, digest: bytes) -> None:
        entry = self._pages.pop(digest, _CLOSED)
        if entry.page is not None:
            self._columns -= _column_count(entry.page)
            entry.page, entry.witness = None, _ZERO

    def _list_of(self, snapshot: PagedSnapshot) -> list[_Entry]:
        """Return the pages of a snapshot, by number: as they were when they were last used."""
        entries, lists = self._lists.get(snapshot.hash), self._lists
        if entries is not None:
            return entries
        with self._lock:
            entries = lists[snapshot.hash] = [_CLOSED] * len(snapshot.table)
            self._listed = sum(map(len, lists.values()))
            while self._listed > _MAX_LISTED and len(lists) > 1:
                self._listed -= len(lists.popitem(last=False)[1])
            return entries


def _column_count(page: Page) -> int:
    """Return the number of arrays of a page."""
    return 2 * len(page.offsets) + 2 * (page.names is not None) + (page.classes is not None)


def _last_byte(document: Buffer) -> memoryview:
    """Return the last byte of a document that is no zero; it begins with one."""
    values, first, at = np.frombuffer(document, np.uint8), len(document), 0
    while first:
        first, end = max(0, first - _PORTION), first
        if (found := np.flatnonzero(values[first:end])).size:
            at, first = first + int(found[-1]), 0
    return memoryview(document)[at : at + 1]
