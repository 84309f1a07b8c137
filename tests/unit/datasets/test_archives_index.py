"""The index of an archive: files found among few and many, pages of names, keys that lead into one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.archive_index import ArchiveIndex, index_tar
from meshwire.dataset.archive_paths import archive_kind, member_paths, name_page
from meshwire.formats.tar import TarMember
from meshwire.frame.columns import ColumnError


def index_of(names: list[str]) -> ArchiveIndex:
    members = [TarMember(name, 7, 512 * at, 0, 0, "0") for at, name in enumerate(names)]
    return ArchiveIndex("tar", index_tar(members), 512 * len(names) + 7, inflated=False)


@pytest.mark.parametrize("count", [0, 5, 1999, 2000, 5000])
def test_every_name_is_found_of_doubled_ones_the_last(count: int) -> None:
    names = [f"{number % 1500:05}.{'ü' if number % 3 else 'jpg'}" for number in range(count)]
    index = index_of(names)
    last = {name: at for at, name in enumerate(names)}
    for name in random.Random(1).sample(names, min(count, 300)):
        assert index.find(name) == (512 * last[name], 7)
    for name in ("", "none", "00000", "\udc80"):
        assert index.find(name) is None
    read = ArchiveIndex.from_bytes(index.to_bytes())
    assert read.to_bytes() == index.to_bytes()
    assert read.ordered[0] == sorted(set(names))


def test_an_index_that_reaches_beyond_its_archive_is_refused() -> None:
    with pytest.raises(ColumnError):
        ArchiveIndex("tar", index_tar([TarMember("a", 7, 512, 0, 0, "0")]), 518, inflated=False)


names = st.text("ab/", min_size=1, max_size=5)


@given(
    st.lists(names, unique=True, max_size=25), st.text("ab/", max_size=2), st.booleans(), st.integers(1, 4)
)
def test_pages_together_are_the_whole_listing(
    known: list[str], prefix: str, rolled: bool, limit: int
) -> None:
    ordered, delimiter = sorted(known), "/" if rolled else ""
    expected: list[str] = []
    for name in ordered:
        if name.startswith(prefix):
            cut = name.find("/", len(prefix)) if rolled else -1
            shown = name[: cut + 1] if cut >= 0 else name
            expected += [shown] if shown not in expected else []
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = name_page(ordered, prefix, delimiter, after, limit)
        shown_now = sorted([*page.prefixes, *(ordered[place] for place in page.places)])
        assert len(shown_now) <= limit
        found, after = found + shown_now, page.next_after
    assert found == expected


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("a.tar", "tar"),
        ("a/b.TAR.GZ", "tgz"),
        ("x.tgz", "tgz"),
        ("x.tar.zst", "tar.zst"),
        ("x.tzst", "tar.zst"),
        ("x.Zip", "zip"),
        ("x.gz", None),
        ("x.tar.xz", None),
        ("tar", None),
        ("", None),
    ],
)
def test_the_ending_tells_the_kind(key: str, kind: str | None) -> None:
    assert archive_kind(key) == kind


def test_a_key_may_lead_into_several_archives() -> None:
    assert member_paths("a.tar/-/b") == [("a.tar", "b")]
    assert member_paths("a.tar/-/b.zip/-/c") == [("a.tar", "b.zip/-/c"), ("a.tar/-/b.zip", "c")]
    assert member_paths("a/-/b") == []
    assert member_paths("a.tar/b") == []
