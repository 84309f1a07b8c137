"""Snapshots of snapshots, and of lines: equal content has equal hashes, and documents read back."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.build_snapshot import (
    BytesColumn,
    EmptySnapshotError,
    LabelColumn,
    Snapshot,
    build_from_objects,
)
from meshwire.dataset.derive_snapshot import (
    join_snapshots,
    keep_samples,
    relabel_classes,
    relative_names,
    rename_fields,
    select_fields,
)
from meshwire.dataset.fields import parse_fields
from meshwire.formats.json_lines import LineIndex, index_lines
from meshwire.formats.tar import TarMember
from meshwire.frame.columns import ColumnError
from meshwire.strict_json import PlanError
from tests.support.paged_snapshots import MemoryPages, build_from_tars

if TYPE_CHECKING:
    from collections.abc import Iterable


def tag(key: str) -> str:
    return hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()


def of_objects(source: str, keys: Iterable[str], **fields: object) -> Snapshot:
    listing = [(key, tag(key), len(key)) for key in sorted(keys)]
    return build_from_objects(listing, source=source, fields=parse_fields(fields)).snapshot


def photos() -> Snapshot:
    keys = [f"train/{kind}/{number}.{ext}" for kind in "ab" for number in range(3) for ext in ("jpg", "txt")]
    return of_objects("s3://photos/train", keys, image="jpg", text="txt", label={"class": "prefix"})


def same(snapshot: Snapshot) -> Snapshot:
    """The snapshot, read back from its document."""
    again = Snapshot.from_bytes(snapshot.to_bytes())
    assert again.hash == snapshot.hash
    assert again.objects.buckets == snapshot.objects.buckets
    return again


def keys_of(snapshot: Snapshot, field: str) -> list[str]:
    column = snapshot.fields[field]
    assert isinstance(column, BytesColumn)
    return [
        f"{snapshot.objects.bucket_of(number)}/{snapshot.objects.keys[number]}"
        for number in column.object.tolist()
    ]


# --- fields ----------------------------------------------------------------------------------------------


def test_selected_fields_leave_no_objects_behind() -> None:
    few = same(select_fields(photos(), ["image", "label"]))
    assert sorted(few.fields) == ["image", "label"]
    assert (few.samples, len(few.objects)) == (6, 6)
    assert keys_of(few, "image") == keys_of(photos(), "image")
    assert few.hash == select_fields(photos(), ["label", "image", "label"]).hash
    alone = of_objects(
        "s3://photos/train",
        [f"train/{kind}/{number}.jpg" for kind in "ab" for number in range(3)],
        image="jpg",
        label={"class": "prefix"},
    )
    assert few.hash == alone.hash


def test_renamed_fields_keep_their_content() -> None:
    named = same(rename_fields(photos(), {"image": "picture", "label": "animal"}))
    assert sorted(named.fields) == ["animal", "picture", "text"]
    assert keys_of(named, "picture") == keys_of(photos(), "image")
    assert rename_fields(named, {"picture": "image", "animal": "label"}).hash == photos().hash
    swapped = same(rename_fields(photos(), {"image": "text", "text": "image"}))
    assert keys_of(swapped, "image") == keys_of(photos(), "text")


def test_wrong_fields_are_refused() -> None:
    for wrong, complaint in [(["imag"], "did you mean 'image'"), (["label"], "a label alone")]:
        with pytest.raises(PlanError, match=complaint):
            select_fields(photos(), wrong)
    for names, complaint in [
        ({"imag": "x"}, "did you mean 'image'"),
        ({"image": "text"}, "the same name"),
        ({"image": "no-name"}, "letters, digits"),
    ]:
        with pytest.raises(PlanError, match=complaint):
            rename_fields(photos(), names)


# --- samples ---------------------------------------------------------------------------------------------


def test_kept_samples_keep_order_classes_and_shards() -> None:
    many = of_objects("s3://b/", [f"{number:05}.x" for number in range(3000)], x="x")
    kept = np.array([3, 5, 1024, 2999])
    few = same(keep_samples(many, kept))
    assert keys_of(few, "x") == [f"b/{number:05}.x" for number in kept]
    assert few.shard_starts.tolist() == [0, 2, 3, 4]
    gone = same(keep_samples(many, np.array([0, 2999])))
    assert gone.shard_starts.tolist() == [0, 1, 2]
    some = keep_samples(photos(), np.array([4, 5]))
    label = some.fields["label"]
    assert isinstance(label, LabelColumn)
    assert (label.classes, label.values.tolist()) == (("a", "b"), [1, 1])
    with pytest.raises(EmptySnapshotError, match="none of the 3000"):
        keep_samples(many, np.zeros(0, np.int64))


def test_classes_are_renamed_merged_and_left_out() -> None:
    one = same(relabel_classes(photos(), {"label": {"a": "z"}}).snapshot)
    label = one.fields["label"]
    assert isinstance(label, LabelColumn)
    assert (label.classes, label.values.tolist()) == (("b", "z"), [1, 1, 1, 0, 0, 0])
    merged = relabel_classes(photos(), {"label": {"a": "b"}}).snapshot.fields["label"]
    assert isinstance(merged, LabelColumn)
    assert (merged.classes, merged.values.tolist()) == (("b",), [0] * 6)
    built = relabel_classes(photos(), {"label": {"a": None}})
    assert built.skipped == 3
    assert keys_of(same(built.snapshot), "image") == [f"photos/train/b/{number}.jpg" for number in range(3)]
    for maps, complaint in [
        ({"label": {"c": "x"}}, "no class 'c'"),
        ({"image": {"a": "x"}}, "not a class label"),
        ({"lable": {"a": "x"}}, "did you mean 'label'"),
    ]:
        with pytest.raises(PlanError, match=complaint):
            relabel_classes(photos(), maps)
    with pytest.raises(EmptySnapshotError):
        relabel_classes(photos(), {"label": {"a": None, "b": None}})


# --- joins -----------------------------------------------------------------------------------------------


def tar_snapshot() -> Snapshot:
    members = [TarMember(f"a/{number}.json", 512 * number, 512 * number, 10, 0, "0") for number in (2, 0, 7)]
    index = index_tar(members)
    shards = [("texts/0.tar", "etag", 1 << 20, index)]
    fields = parse_fields({"meta": "json"})
    return build_from_tars(shards, source="s3://texts/texts", fields=fields).snapshot


def test_two_buckets_are_joined_by_name() -> None:
    right = tar_snapshot()
    left = select_fields(photos(), ["image", "label"])
    built = join_snapshots(left, right, relative_names(left), relative_names(right))
    both = same(built.snapshot)
    assert built.skipped == 4
    assert "train/a/1" in built.examples[0]
    assert sorted(both.fields) == ["image", "label", "meta"]
    assert both.objects.buckets == ("photos", "texts")
    assert keys_of(both, "image") == ["photos/train/a/0.jpg", "photos/train/a/2.jpg"]
    assert keys_of(both, "meta") == ["texts/texts/0.tar"] * 2
    meta = both.fields["meta"]
    assert isinstance(meta, BytesColumn)
    assert meta.offset.tolist() == [0, 1024]
    assert [both.sample_name(sample) for sample in range(2)] == ["a/0", "a/2"]
    assert dict((bucket, list(keys)) for bucket, keys in both.objects.keys_by_bucket()) == {
        "photos": ["train/a/0.jpg", "train/a/2.jpg"],
        "texts": ["texts/0.tar"],
    }
    # Of a joined one again.
    one = same(select_fields(keep_samples(both, np.array([1])), ["meta"]))
    assert one.objects.buckets == ("texts",)
    third = of_objects("s3://third/", ["a/2.cls"], cls="cls")
    again = join_snapshots(both, third, relative_names(both), relative_names(third)).snapshot
    assert same(again).objects.buckets == ("photos", "texts", "third")


def test_what_cannot_be_joined_is_said() -> None:
    left = photos()
    other = rename_fields(left, {"image": "i", "text": "t", "label": "l"})
    names = relative_names(left)
    with pytest.raises(PlanError, match="both have a field 'image'"):
        join_snapshots(left, left, names, names)
    with pytest.raises(PlanError, match="have the same key 'a'"):
        join_snapshots(left, other, names, ["a"] * 6)
    with pytest.raises(EmptySnapshotError, match="no key in common"):
        join_snapshots(left, other, names, [f"x{name}" for name in names])
    with pytest.raises(EmptySnapshotError):
        join_snapshots(left, other, [None] * 6, [None] * 6)


def test_a_joined_document_that_lies_is_refused() -> None:
    left = select_fields(photos(), ["image"])
    document = join_snapshots(
        left, tar_snapshot(), relative_names(left), ["a/0", "a/1", "a/2"]
    ).snapshot.to_bytes()
    for wrong in (b"[]", b"[1]", b"7", b"null"):
        with pytest.raises(ColumnError):
            Snapshot.from_bytes(document.replace(b'[\\"texts\\"]', wrong.ljust(11)))


# --- lines -----------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc", b'{"x": 1}']), max_size=40), st.data())
def test_lines_are_those_of_the_file_however_it_is_read(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    index = LineIndex.from_bytes(index_lines(pieces).to_bytes())
    numbers = np.arange(1, index.lengths.size + 1) if index.numbers is None else index.numbers
    found = [
        (number, text[start : start + length])
        for number, start, length in zip(
            numbers.tolist(), index.offsets.tolist(), index.lengths.tolist(), strict=True
        )
    ]
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    assert found == [(number, line) for number, line in enumerate(lines, 1) if line]


def test_a_folder_of_lines_is_a_snapshot() -> None:
    text = b'{"a": 1}\n\n{"a": 2}\r\n{"a": 3}'
    files, pages = [(f"d/{kind}/x.jsonl", tag(kind), text) for kind in "pq"], MemoryPages()
    fields = parse_fields({"n": "jsonl", "m": "jsonl", "kind": {"class": "prefix"}})
    built = pages.build(files, "s3://b/d", fields).snapshot
    snapshot = pages.read(built.to_bytes())
    assert (snapshot.hash, snapshot.to_bytes()) == (built.hash, built.to_bytes())
    assert (snapshot.samples, snapshot.shards, pages.opened) == (6, 2, {})
    assert snapshot.sample_name(4) == "d/q/x.jsonl/000000003"
    column = snapshot.fields["n"]
    assert isinstance(column, BytesColumn)
    spans = zip(column.offset.tolist()[:3], column.length.tolist()[:3], strict=True)
    assert [text[at : at + size] for at, size in spans] == [b'{"a": 1}', b'{"a": 2}', b'{"a": 3}']
    label = snapshot.fields["kind"]
    assert isinstance(label, LabelColumn)
    assert label.values.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(EmptySnapshotError, match=r"that end in \.txt"):
        pages.build([], "s3://b/d", parse_fields({"n": "txt"}))
