"""OpenPageCache: the pages of snapshots that this process has open.

Law: a page whose document was cut off in its file is not returned. What is cut off reads as zeros once the
file is longer again, so the last byte that is no zero is looked at before each use.
Invariant: the pages, and the columns of them, are bounded; the least recently used ones are closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from meshwire.dataset.paged_columns import Page
    from meshwire.frame.tensor_frame import Buffer

MAX_PAGES: Final = 131_072
_MAX_COLUMNS: Final = 2 * MAX_PAGES
"""Pages that a process keeps open, and columns of them, which take about 600 bytes each. To open a page costs
as much as to use it 25 times."""
_PORTION: Final = 4096  # bytes


class _OpenPage(NamedTuple):
    page: Page
    witness: memoryview  # one byte, the last of the page's document that is no zero


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


class OpenPageCache:
    """Open pages by the SHA-256 of their documents. Any thread may use it."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, _OpenPage] = OrderedDict()
        self._columns = 0  # of all pages
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<OpenPageCache, {len(self._pages)} open>"

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def get(self, digest: bytes) -> Page | None:
        """Return a page; None if it is not open, or its file was cut off."""
        found = self._pages.get(digest)
        if found is None:
            return None
        page, witness = found
        if not witness[0]:
            self.close(digest)
            return None
        if self._columns > _MAX_COLUMNS // 2:  # their order matters only where pages are closed
            with self._lock:
                if digest in self._pages:
                    self._pages.move_to_end(digest)
        return page

    def add(self, digest: bytes, page: Page, document: Buffer) -> None:
        """Keep an open page, whose document is not empty."""
        opened = _OpenPage(page, _last_byte(document))
        with self._lock:
            self._remove(digest)
            self._pages[digest] = opened
            self._columns += _column_count(page)
            while len(self._pages) > MAX_PAGES or (self._columns > _MAX_COLUMNS and len(self._pages) > 1):
                self._remove(next(iter(self._pages)))

    def close(self, digest: bytes) -> None:
        """Forget a page, if it is open."""
        with self._lock:
            self._remove(digest)

    def clear(self) -> None:
        """Forget all pages."""
        with self._lock:
            self._pages.clear()
            self._columns = 0

    def _remove(self, digest: bytes) -> None:
        found = self._pages.pop(digest, None)
        self._columns -= 0 if found is None else _column_count(found.page)
