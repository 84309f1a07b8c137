"""Columns of pages are those of all samples, and a page that lies or contradicts itself is refused."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.fields import parse_fields
from meshwire.dataset.page_document import page_document_facts
from meshwire.dataset.paged_snapshot import PagedSnapshot, PageTable, read_snapshot
from meshwire.dataset.sample_columns import BytesColumn, LabelColumn
from meshwire.dataset.snapshot import Snapshot
from meshwire.formats.json_lines import line_page_facts
from meshwire.formats.page_formats import mark_page, open_marked_page, open_page
from meshwire.formats.tar import TarMember
from meshwire.frame.columns import ColumnError, ColumnWriter, StringColumn
from meshwire.plan.mix import concat_snapshots
from tests.support.page_samples import PAGES
from tests.support.paged_snapshots import MemoryPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.dataset.snapshot import SnapshotKind

FIELDS = parse_fields({"text": "txt", "kind": {"class": "prefix"}})


def paged(*texts: bytes, pages: MemoryPages | None = None) -> PagedSnapshot:
    files = [(f"d/{number % 2}/{number:03}.txt", f"{number:032x}", text) for number, text in enumerate(texts)]
    files.sort()
    found = (pages or MemoryPages()).build(files, "s3://b/d/", FIELDS).snapshot
    assert isinstance(found, PagedSnapshot)
    return found


def paged_tars(*texts: bytes) -> PagedSnapshot:
    """The snapshot of tars with a sample of two parts for each text, whose classes are folders of the tar,
    but for one tar in a folder of its own."""
    shards = []
    for number, text in enumerate(texts):
        rows = [*text.split(b"\n"), b"x"]
        names = [f"{'ab'[len(row) % 2]}/{at}" for at, row in enumerate(rows)]
        members = [
            TarMember(f"{name}.{ext}", len(row) + twice, 512 + 2000 * at + 500 * twice, 0, 0, "0")
            for at, (name, row) in enumerate(zip(names, rows, strict=True))
            for twice, ext in enumerate(["txt", "jpg"])
        ]
        key = f"d/{'c/' if not number else ''}{number:03}.tar"
        shards.append((key, f"{number:032x}", 1 << 20, index_tar(members)))
    fields = parse_fields({"text": "txt", "image": ["png", "jpg"], "kind": {"class": "prefix"}})
    found = MemoryPages().build_tars(sorted(shards, key=lambda shard: shard[0]), "s3://b/d/", fields).snapshot
    assert isinstance(found, PagedSnapshot)
    return found


@pytest.mark.parametrize("build", [paged, paged_tars])
@given(
    files=st.lists(
        st.lists(st.sampled_from([b"a", b"bc", b"", b"d" * 300]), min_size=1), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_columns_of_pages_are_those_of_all_samples(
    build: Callable[..., PagedSnapshot], files: list[list[bytes]], data: st.DataObject
) -> None:
    snapshot = build(*(b"\n".join([b"x", *rows]) for rows in files))
    again = read_snapshot(snapshot.to_bytes(), lambda _, numbers: snapshot.pages.open_all(numbers))
    whole = Snapshot.from_bytes(snapshot.without_pages().to_bytes())
    assert again.hash == snapshot.hash != whole.hash
    assert again.summary() == {**whole.summary(), "snapshot": again.hash}
    count = whole.samples
    wanted = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=30)), np.int64)
    for name, expected in whole.fields.items():
        column = again.fields[name]
        if isinstance(expected, LabelColumn):
            assert isinstance(column, LabelColumn)
            assert column.values_at(wanted).tolist() == expected.values[wanted].tolist()
            assert column.counts().tolist() == expected.counts().tolist()
            continue
        assert isinstance(column, BytesColumn)
        for some, all_of in (
            (column.objects_at, expected.object),
            (column.offsets_at, expected.offset),
            (column.lengths_at, expected.length),
        ):
            assert some(wanted).tolist() == all_of[wanted].tolist()
            assert int(some(count - 1)) == int(all_of[-1])
        for _ in range(count):  # until the columns of pages are joined
            column.lengths_at([0])
        assert column.objects_at(wanted).tolist() == expected.object[wanted].tolist()
        for outside in (count, -1):
            with pytest.raises(IndexError):
                column.lengths_at([outside])
            with pytest.raises(IndexError):
                column.objects_at([outside])
    assert again.names_at(wanted) == whole.names_at(wanted)
    assert [again.sample_name(at) for at in range(count)] == [whole.sample_name(at) for at in range(count)]
    assert concat_snapshots([again, whole]).hash == concat_snapshots([whole, again]).hash
    assert concat_snapshots([again, whole]).hash == concat_snapshots([whole, whole]).hash


def test_the_objects_of_samples_are_known_without_their_pages() -> None:
    pages = MemoryPages()
    snapshot = paged(*(b"line\n" * 9000 for _ in range(200)), pages=pages)  # too many samples to be joined
    assert not snapshot.pages.is_small
    pages.opened.clear()
    samples = np.array([1_799_999, 0, 9000, 17_999, 0])
    column: Any = snapshot.fields["text"]
    assert column.objects_at(samples).tolist() == [199, 0, 1, 1, 0]
    assert not pages.opened
    assert column.offsets_at(samples).tolist() == [44_995, 0, 0, 44_995, 0]
    assert pages.opened  # one: they are equal


def test_a_foreign_document_is_refused() -> None:
    snapshot, pages = paged(b"a\nb", b"c"), MemoryPages()
    document = snapshot.to_bytes()
    for table in (
        replace(snapshot.table, samples=np.array([2**31 - 1, 1])),
        replace(snapshot.table, samples=np.array([2**62, 1])),
        replace(snapshot.table, samples=np.array([0, 1])),
        replace(snapshot.table, totals=(np.array([2**40, 1]),)),
        replace(snapshot.table, hashes=snapshot.table.hashes[:-1]),
        PageTable.from_facts([snapshot.facts(0)]),
    ):
        lying: Any = object.__new__(PagedSnapshot)
        for name in ("source", "kind", "objects", "specs", "fields"):
            object.__setattr__(lying, name, getattr(snapshot, name))
        object.__setattr__(lying, "table", table)
        with pytest.raises(ColumnError):
            pages.read(lying.to_bytes())
    for wrong in (b"", document[:-1], document + b"\0", document.replace(b'"version":"2"', b'"version":"9"')):
        with pytest.raises(ColumnError):
            pages.read(wrong)


@pytest.mark.parametrize("kind", PAGES)
def test_a_lying_page_is_refused(kind: SnapshotKind) -> None:
    document, facts, expected = PAGES[kind]
    assert facts == expected
    assert len(open_page(document, kind, facts)) == facts.samples
    for lie in (
        replace(facts, digest=bytes(32)),
        replace(facts, samples=2**62),
        replace(facts, totals=(*facts.totals[1:], 9)),
        replace(facts, totals=()),
        replace(facts, size=13),
        replace(facts, classes=("c", "x")),
    ):
        with pytest.raises(ColumnError):
            open_page(document, kind, lie)


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_of_an_unknown_version_is_refused(kind: SnapshotKind) -> None:
    document, facts, _ = PAGES[kind]
    later = re.sub(rb'"version":"\d+"', b'"version":"9"', document)
    assert later != document
    with pytest.raises(ColumnError, match="version"):
        open_page(later, kind, replace(facts, digest=hashlib.sha256(later).digest()))


@pytest.mark.parametrize("kind", PAGES)
def test_a_marked_page_is_the_page_of_its_facts_alone(kind: SnapshotKind) -> None:
    document, facts, _ = PAGES[kind]
    mark = mark_page(document, kind, facts)
    page, checked = open_marked_page(document, kind, facts, mark), open_page(document, kind, facts)
    assert page is not None
    for part, places in enumerate(checked.offsets):
        assert page.offsets[part].tolist() == places.tolist()
        assert page.lengths[part].tolist() == checked.lengths[part].tolist()
    assert page.all_names() == checked.all_names()
    for lie in (
        replace(facts, digest=bytes(32)),
        replace(facts, samples=2**62),
        replace(facts, totals=(*facts.totals[1:], 9)),
        replace(facts, totals=()),
        replace(facts, size=8),
        replace(facts, classes=("c", "x")),
    ):
        assert open_marked_page(document, kind, lie, mark) is None
    for wrong in ("", "-", mark[:-1] + "x", mark.partition("-")[0], "0" * 64 + "-9"):
        assert open_marked_page(document, kind, facts, wrong) is None


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("lines", {"offsets": [0, 1], "lengths": [2, 1]}),
        ("lines", {"offsets": [3, 0], "lengths": [1, 1]}),
        ("tar", {"ends": [2, 1]}),
        ("tar", {"ends": [1, 3]}),
        ("tar", {"names": [0xC3, 0x28]}),
        ("tar", {"class": [0, 1]}),
        ("tar", {"lengths.0": [1]}),
        ("tar", {"numbers": [1, 0]}),
    ],
)
def test_a_page_that_contradicts_itself_is_refused(kind: SnapshotKind, columns: dict[str, list[int]]) -> None:
    if kind == "lines":
        writer, facts = ColumnWriter("shardmesh.lines", 2, {}), line_page_facts
    else:
        writer = ColumnWriter("shardmesh.page", 1, {"parts": "1", "notes": "[0,[],0,{}]"})
        columns = {"offsets.0": [0, 5], "lengths.0": [5, 5], "names": [65, 66], "ends": [1, 2]} | columns
        writer.add_strings("classes", StringColumn.from_strings(["c"]))
        facts = page_document_facts
    for name, values in columns.items():
        writer.add_integers(name, np.array(values))
    document = writer.to_bytes()
    with pytest.raises(ColumnError):
        open_page(document, kind, facts(document, 100))
