"""Snapshots whose columns are views of their documents: equal to those that have columns of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset import snapshot as snapshots
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.derive_snapshot import keep_samples, relabel_classes, relative_names
from meshwire.dataset.fields import Source, parse_fields
from meshwire.dataset.sample_columns import BytesColumn, LabelColumn, RecordColumn, Records
from meshwire.dataset.snapshot import ObjectTable, Snapshot
from meshwire.frame.columns import ColumnError, StoredStrings, StringColumn
from meshwire.plan.mix import concat_snapshots
from tests.support.paged_snapshots import MemoryPages

COUNT = 200


def loose() -> Snapshot:
    fields = parse_fields({"image": ["jpg", "png"], "text": "txt", "kind": {"class": "prefix"}})
    listing = [
        (f"d/{'äb'[n % 2]}/{n:04}.{ext}", f"{n:032x}", 40 * n + len(ext))
        for n in range(COUNT)
        for ext in ("jpg", "txt")
    ]
    return build_from_objects(sorted(listing), source=Source("b", "d/"), fields=fields).snapshot


def lines() -> Snapshot:
    fields = parse_fields({"text": "txt", "kind": {"class": "prefix"}})
    files = [(f"d/{n % 3}/{n:03}.txt", f"{n:032x}", b"x" * n + b"\nab\n") for n in range(1, COUNT // 2)]
    found: Any = MemoryPages().build(sorted(files), "s3://b/d/", fields).snapshot
    return found.without_pages()  # type: ignore[no-any-return]


def table() -> Snapshot:
    fields = parse_fields({"x": {"column": "x"}, "y": {"column": "y"}})
    which = np.repeat(np.arange(4, dtype=np.int32), COUNT // 4)
    records = Records(which, np.tile(np.arange(COUNT // 4, dtype=np.int64) * (1 << 31), 4))
    keys = StringColumn.from_strings([f"{n}.parquet" for n in range(4)])
    objects = ObjectTable("b", keys, keys, np.full(4, 1 << 40))
    columns = {"x": RecordColumn(records, 0, 8), "y": RecordColumn(records, 1 << 31, 4)}
    names = StringColumn.from_numbers(np.arange(COUNT))
    starts = np.arange(0, COUNT + 1, COUNT // 4)
    return Snapshot.from_parts("s3://b/", "table", objects, starts, columns, fields, names)


MADE = {
    "objects": loose(),
    "lines": lines(),
    "table": table(),
    "concatenated": concat_snapshots([loose(), loose()]),
}


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_VIEWED", 0)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("viewed")
def test_a_view_is_equal_to_columns_of_its_own(name: str) -> None:
    whole = MADE[name]
    document = whole.to_bytes()
    found = Snapshot.from_bytes(memoryview(document))
    assert (found.hash, found.summary(), found.to_bytes()) == (whole.hash, whole.summary(), document)
    assert type(found.objects.keys) is StoredStrings
    some: Any
    for some in (3, [5, 0, 5], np.array([[1, 2], [3, whole.samples - 1]]), slice(None)):
        for field, expected in whole.fields.items():
            column = found.fields[field]
            if isinstance(expected, LabelColumn):
                assert isinstance(column, LabelColumn)
                pairs = [(column.values_at(some), expected.values_at(some))]
                pairs += [(column.values, expected.values), (column.counts(), expected.counts())]
            else:
                assert isinstance(column, BytesColumn)
                pairs = [
                    (getattr(column, f"{part}s_at")(some), getattr(expected, f"{part}s_at")(some))
                    for part in ("object", "offset", "length")
                    if not isinstance(expected, RecordColumn) or part != "length"
                ]
                pairs += [(getattr(column, p), getattr(expected, p)) for p in ("object", "offset", "length")]
                assert column.total_bytes() == expected.total_bytes()
            for one, other in pairs:
                assert one.dtype == other.dtype
                assert one.tolist() == other.tolist()
    assert [found.sample_name(n) for n in range(found.samples)] == [
        whole.sample_name(n) for n in range(whole.samples)
    ]
    kept = np.arange(1, whole.samples, 3)
    assert keep_samples(found, kept).hash == keep_samples(whole, kept).hash
    assert concat_snapshots([found, found]).hash == concat_snapshots([whole, whole]).hash
    assert list(relative_names(found)) == list(relative_names(whole))
    if "kind" in whole.fields:
        relabels = {"kind": {whole.summary()["fields"]["kind"]["classes"][0]: "other"}}
        assert (
            relabel_classes(found, relabels).snapshot.hash == relabel_classes(whole, relabels).snapshot.hash
        )


@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("viewed")
def test_a_damaged_document_is_refused(name: str) -> None:
    document = MADE[name].to_bytes()
    for wrong in (b"", document[:-1], document + b"\0", document.replace(b"parquet", b"p\xff\xff\xff\xffet")):
        if wrong != document:
            with pytest.raises(ColumnError):
                Snapshot.from_bytes(wrong)


@given(st.lists(st.text(st.sampled_from("aäß0"), max_size=5), max_size=300), st.data())
def test_strings_of_a_document_are_those_of_their_own(texts: list[str], data: st.DataObject) -> None:
    whole = StringColumn.from_strings(texts)
    text = np.frombuffer(whole.blob, np.uint8)
    found = StoredStrings(text, whole.lengths.astype(np.uint8))
    assert (list(found), len(found), found == whole) == (texts, len(texts), True)
    assert found.lengths.tolist() == whole.lengths.tolist()
    places = np.array(
        data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=4)) if texts else [], np.int64
    )
    assert found.take_rows(places) == [texts[at] for at in places]
    assert [found[at] for at in range(-len(texts), len(texts))] == [*texts, *texts]
    with pytest.raises(IndexError):
        found[len(texts)]
    if texts and any(texts):
        with pytest.raises(ColumnError):
            StoredStrings(text[:-1], whole.lengths)
