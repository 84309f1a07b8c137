"""Pages of a view, put together again: every key and common prefix once, in order, whatever their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from meshd.views.key_paging import build_page
from meshwire.s3.operations import ListObjects

if TYPE_CHECKING:
    from collections.abc import Iterator

keys = st.lists(st.text("ab/-", min_size=1, max_size=6), max_size=30, unique=True).map(sorted)


@given(
    keys,
    st.sampled_from(["", "a", "a/", "b"]),
    st.sampled_from(["", "/", "/-"]),
    st.integers(1, 5),
    st.data(),
)
def test_pages_are_the_whole(
    every: list[str], prefix: str, delimiter: str, size: int, data: st.DataObject
) -> None:
    visited: list[str] = []

    def walk(beginning: str, after: str) -> Iterator[tuple[str, str]]:
        for key in every:
            if key > after and key.startswith(beginning):
                visited.append(key)
                yield key, key.upper()

    after = data.draw(st.sampled_from(["", *every]))
    shown: list[str] = []
    more, last = True, after
    while more:
        page = build_page(ListObjects("b", 2, prefix, delimiter, size, last), walk)
        assert len(page) <= size
        assert all(value == key.upper() for key, value in page.items)
        part = sorted([*(key for key, _ in page.items), *page.prefixes])
        assert not page.truncated or (part and part[-1] == page.last)
        shown += part
        more, last = page.truncated, page.last
    assert shown == sorted(wanted(every, prefix, delimiter, after))
    assert len(visited) <= 2 * len(shown) + 1 + len(shown) // size


def wanted(every: list[str], prefix: str, delimiter: str, after: str) -> set[str]:
    found = set()
    for key in every:
        if key.startswith(prefix) and key > after:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            found |= {name} if name > after else set()
    return found


def test_no_room_is_no_page() -> None:
    page = build_page(ListObjects("b", 2, max_keys=0), lambda prefix, after: iter([("a", 1)]))
    assert (len(page), page.truncated) == (0, False)
