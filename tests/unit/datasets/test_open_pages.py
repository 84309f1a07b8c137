"""The cache of open pages: found by snapshot and number, bounded, and never with bytes that were cut off."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from meshd.datasets import open_pages
from meshd.datasets.open_pages import OpenPageCache
from meshwire.dataset.fields import parse_fields
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.formats.page_formats import open_page
from tests.support.paged_snapshots import MemoryPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.dataset.paged_columns import Page

FIELDS = parse_fields({"text": {"ext": ["txt"]}})


class Opener:
    """Opens pages in a cache, and notes which."""

    def __init__(self) -> None:
        self.source, self.cache = MemoryPages(), OpenPageCache()
        self.documents: dict[bytes, bytearray] = {}
        self.opened: list[int] = []

    def snapshot(self, name: str, count: int) -> PagedSnapshot:
        """A snapshot of so many files, of one line each; the first files of all are equal."""
        files = [(f"d/{number:03}", f"{number:032x}", b"x" * (number + 1)) for number in range(count)]
        files.append((f"d/{name}", "0" * 32, name.encode() * 99))
        found = self.source.build(files, "s3://b/d/", FIELDS).snapshot
        assert isinstance(found, PagedSnapshot)
        return found

    def pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
        return self.cache.pages_of(snapshot, numbers, self._open)

    def _open(self, snapshot: PagedSnapshot, number: int) -> Page:
        digest = snapshot.table.hash_of(number)
        document = self.documents[digest] = bytearray(self.source.documents[digest])
        self.opened.append(number)
        page = open_page(bytes(document), snapshot.kind, snapshot.facts(number))
        self.cache.add(digest, page, document)
        return page


def test_a_page_is_opened_once_for_all_snapshots() -> None:
    opener = Opener()
    first, second = opener.snapshot("x", 4), opener.snapshot("yy", 4)
    pages = opener.pages(first, [2, 0, 2])
    assert pages[0] is pages[2] is opener.pages(second, [2])[0]
    assert opener.opened == [2, 0]


def test_a_page_whose_file_was_cut_off_is_opened_again() -> None:
    opener = Opener()
    snapshot, other = opener.snapshot("x", 4), opener.snapshot("yy", 4)
    for which in (snapshot, other):
        opener.pages(snapshot, [0, 1]), opener.pages(other, [0, 1])
        document = opener.documents[snapshot.table.hash_of(1)]
        document[:] = bytes(len(document))
        opener.opened.clear()
        opener.pages(which, [0, 1])
        opener.pages(other if which is snapshot else snapshot, [0, 1])
        assert opener.opened == [1]


@pytest.mark.parametrize("bound", ["MAX_PAGES", "_MAX_COLUMNS"])
def test_pages_that_were_not_used_are_closed_first(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(open_pages, bound, 8 if bound == "_MAX_COLUMNS" else 4)  # two columns a page
    opener = Opener()
    snapshot = opener.snapshot("x", 12)
    opener.pages(snapshot, range(4))
    opener.pages(snapshot, [4])  # all were used, and get a second chance: page 0 is closed
    opener.pages(snapshot, [1, 3])
    opener.pages(snapshot, [5])  # closes page 2: page 1 was used
    opener.opened.clear()
    opener.pages(snapshot, [1, 3, 4, 5])
    assert opener.opened == []
    opener.pages(snapshot, range(12))
    assert len(opener.cache) == 4


def test_a_closed_page_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_pages, "MAX_PAGES", 2)
    opener = Opener()
    snapshot = opener.snapshot("x", 6)
    columns = [weakref.ref(page.offsets[0]) for page in opener.pages(snapshot, range(6))]
    gc.collect()
    assert sum(column() is not None for column in columns) == 2


def test_lists_of_snapshots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_pages, "_MAX_LISTED", 12)
    opener = Opener()
    snapshots = [opener.snapshot(name, 4) for name in ("x", "xx", "xxx")]
    for _ in range(2):
        for snapshot in snapshots:
            opener.pages(snapshot, range(5))
    assert sum(map(len, opener.cache._lists.values())) <= 12
    assert sorted(set(opener.opened)) == [0, 1, 2, 3, 4]
    assert len(opener.opened) == 4 + 3  # each page once: four are in all snapshots


def test_one_large_snapshot_has_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_pages, "_MAX_LISTED", 2)
    opener = Opener()
    snapshot = opener.snapshot("x", 8)
    opener.pages(snapshot, [3]), opener.pages(snapshot, [3])
    assert opener.opened == [3]
    assert len(opener.cache._lists) == 1


def test_a_page_that_cannot_be_opened_is_asked_for_again() -> None:
    opener = Opener()
    snapshot = opener.snapshot("x", 2)

    def fail(_: PagedSnapshot, number: int) -> Page:
        raise OSError(number)

    with pytest.raises(OSError, match="1"):
        opener.cache.pages_of(snapshot, [1], fail)
    assert opener.pages(snapshot, [1])
    assert opener.opened == [1]
