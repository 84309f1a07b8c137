"""Snapshots of objects and of tars: what makes a sample, what is skipped, what the document refuses."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.build_snapshot import (
    SAMPLES_PER_SHARD,
    BytesColumn,
    EmptySnapshotError,
    LabelColumn,
    Snapshot,
    build_from_objects,
)
from meshwire.dataset.fields import parse_fields
from meshwire.formats.tar import TarMember
from meshwire.frame.columns import ColumnError
from meshwire.frame.tensor_frame import parse_frame_header
from meshwire.strict_json import PlanError
from tests.support.paged_snapshots import build_from_tars

if TYPE_CHECKING:
    from meshwire.dataset.archive_index import ShardIndex

FIELDS = parse_fields({"image": ["jpg", "jpeg"], "label": {"class": "prefix"}})
SIDECAR = parse_fields({"image": "jpg", "label": "cls"})


def listing(*keys: str) -> list[tuple[str, str, int]]:
    return [(key, f"etag-{index}", 100 + index) for index, key in enumerate(sorted(keys))]


def shard(*names: str) -> ShardIndex:
    return index_tar(
        TarMember(name, 10 + at, 512 + 1024 * at, 1024 * (at + 1), 0, "0") for at, name in enumerate(names)
    )


def bytes_of(snapshot: Snapshot, field: str) -> list[tuple[str, int, int]]:
    column = snapshot.fields[field]
    assert isinstance(column, BytesColumn)
    keys = [snapshot.objects.keys[number] for number in column.object.tolist()]
    return list(zip(keys, column.offset.tolist(), column.length.tolist(), strict=True))


def test_objects_with_classes_by_folder() -> None:
    keys = ["train/dog/2.JPG", "train/cat/1.jpg", "train/élan/3.jpeg", "train/README.md", "train/cat/"]
    built = build_from_objects(listing(*keys), source="s3://photos/train", fields=FIELDS)
    snapshot = built.snapshot
    assert built.skipped == 0
    assert (snapshot.samples, snapshot.shards, len(snapshot.objects)) == (3, 1, 3)
    labels = snapshot.fields["label"]
    assert isinstance(labels, LabelColumn)
    assert labels.classes == ("cat", "dog", "élan")
    assert labels.values.tolist() == [0, 1, 2]
    assert snapshot.sample_name(1) == "train/dog/2"
    assert snapshot.source == "s3://photos/train/"
    assert bytes_of(snapshot, "image")[0] == ("train/cat/1.jpg", 0, 102)
    assert snapshot.summary()["fields"] == {
        "image": {"kind": "bytes"},
        "label": {"kind": "label", "classes": ["cat", "dog", "élan"]},
    }


def test_sidecars_join_by_name_and_incomplete_samples_are_counted() -> None:
    keys = ["a/1.jpg", "a/1.cls", "a/2.jpg", "a/3.cls", "a/4.cls", "a/4.jpg", "a/4.txt"]
    built = build_from_objects(listing(*keys), source="s3://b/a", fields=SIDECAR)
    assert [name for name, _, _ in bytes_of(built.snapshot, "label")] == ["a/1.cls", "a/4.cls"]
    assert list(built.snapshot.objects.keys) == ["a/1.cls", "a/1.jpg", "a/4.cls", "a/4.jpg"]
    assert built.skipped == 2
    assert built.examples == ("'a/2' lacks label", "'a/3' lacks image")


def test_only_the_first_few_skipped_are_named() -> None:
    keys = [f"{number:03}.jpg" for number in range(100)]
    built = build_from_objects(listing(*keys, "000.cls"), source="s3://b", fields=SIDECAR)
    assert (built.skipped, len(built.examples)) == (99, 5)


def test_samples_whose_names_other_names_split_still_join() -> None:
    keys = ["a.+x", "a./b.jpg", "a.cls", "a.jpg"]  # the folder `a.` sorts between the sample's files
    fields = parse_fields({"x": "+x", "image": "jpg"})
    assert build_from_objects(listing(*keys), source="s3://b", fields=fields).snapshot.samples == 1


def test_the_preferred_extension_wins() -> None:
    built = build_from_objects(listing("d/1.jpeg", "d/1.jpg", "d/2.jpeg"), source="s3://b", fields=FIELDS)
    assert [name for name, _, _ in bytes_of(built.snapshot, "image")] == ["d/1.jpg", "d/2.jpeg"]


def test_shards_of_plain_objects_are_runs() -> None:
    keys = [f"c/{number:05}.jpg" for number in range(2 * SAMPLES_PER_SHARD + 5)]
    snapshot = build_from_objects(listing(*keys), source="s3://b", fields=FIELDS).snapshot
    assert np.diff(snapshot.shard_starts).tolist() == [SAMPLES_PER_SHARD, SAMPLES_PER_SHARD, 5]
    whole = build_from_objects(listing(*keys[:SAMPLES_PER_SHARD]), source="s3://b", fields=FIELDS).snapshot
    assert whole.shard_starts.tolist() == [0, SAMPLES_PER_SHARD]


def test_tars_are_read_by_offset() -> None:
    shards = [
        ("train/a.tar", "e1", 10_000, shard("1.jpg", "1.cls", "2.jpg", "x/3.jpg", "x/3.cls")),
        ("train/b.tar", "e2", 10_000, shard("README", "4.jpg")),
        ("train/c.tar", "e3", 10_000, shard("4.cls", "4.jpg")),
    ]
    built = build_from_tars(shards, source="s3://b/train", fields=SIDECAR)
    snapshot = built.snapshot
    assert bytes_of(snapshot, "image") == [
        ("train/a.tar", 512, 10),
        ("train/a.tar", 512 + 3072, 13),
        ("train/c.tar", 512 + 1024, 11),
    ]
    assert list(snapshot.objects.keys) == ["train/a.tar", "train/c.tar"]
    assert snapshot.shard_starts.tolist() == [0, 2, 3]
    assert snapshot.sample_name(1) == "train/a.tar/x/3"
    assert (built.skipped, built.examples) == (2, ("'2' lacks label", "'4' lacks label"))
    assert snapshot.total_bytes == 10 + 11 + 13 + 14 + 11 + 10


def test_classes_of_tars_come_from_their_folder_or_from_within() -> None:
    shards = [("t/cat/0.tar", "e", 9999, shard("1.jpg")), ("t/x.tar", "e", 9999, shard("dog/2.jpg", "3.jpg"))]
    built = build_from_tars(shards, source="s3://b/t", fields=FIELDS)
    labels = built.snapshot.fields["label"]
    assert isinstance(labels, LabelColumn)
    assert labels.classes == ("cat", "dog")
    assert built.skipped == 1


def test_a_stale_index_is_refused() -> None:
    with pytest.raises(PlanError, match="index it again"):
        build_from_tars([("a.tar", "e", 100, shard("1.jpg"))], source="s3://b", fields=FIELDS)


def test_listings_out_of_order_are_refused() -> None:
    rows = [("b.jpg", "e", 1), ("a.jpg", "e", 1)]
    with pytest.raises(PlanError, match="out of order"):
        build_from_objects(rows, source="s3://b", fields=FIELDS)
    tars = [("b.tar", "e", 9999, shard("1.jpg")), ("b.tar", "e", 9999, shard("1.jpg"))]
    with pytest.raises(PlanError, match="out of order"):
        build_from_tars(tars, source="s3://b", fields=FIELDS)


def test_an_empty_result_says_what_was_looked_for_and_what_there_is() -> None:
    with pytest.raises(EmptySnapshotError) as caught:
        build_from_objects(listing("t/1.png", "t/2.png", "t/x.txt"), source="s3://b/t", fields=FIELDS)
    for part in ("s3://b/t/", "image: .jpg or .jpeg", "label: a folder", ".png (2)", ".txt (1)"):
        assert part in str(caught.value)
    with pytest.raises(EmptySnapshotError, match="lacks label"):
        build_from_objects(listing("t/1.jpg"), source="s3://b/t", fields=FIELDS)
    with pytest.raises(EmptySnapshotError, match="it is empty"):
        build_from_tars([], source="s3://b/t", fields=FIELDS)


def some(kind: str) -> Snapshot:
    if kind == "tar":
        shards = [("t/a.tar", "e1", 10_000, shard("c/1.jpg", "c/ü.jpg", "d/3.jpg"))]
        return build_from_tars(shards, source="s3://b/t", fields=FIELDS).snapshot
    keys = ["t/c/1.jpg", "t/c/ü.jpg", "t/d/3.jpg"]
    return build_from_objects(listing(*keys), source="s3://b/t", fields=FIELDS).snapshot


@pytest.mark.parametrize("kind", ["objects", "tar"])
def test_the_document_goes_round(kind: str) -> None:
    snapshot = some(kind)
    document = snapshot.to_bytes()
    back = Snapshot.from_bytes(document)
    assert snapshot.hash == back.hash == hashlib.sha256(document).hexdigest()
    assert back.to_bytes() == document
    assert back.summary() == snapshot.summary()
    assert back.specs == FIELDS
    assert bytes_of(back, "image") == bytes_of(snapshot, "image")
    assert [back.sample_name(i) for i in range(3)] == [snapshot.sample_name(i) for i in range(3)]
    assert [*back.objects.etags] == [*snapshot.objects.etags]
    with pytest.raises(IndexError):
        back.sample_name(3)


def test_a_document_is_not_encoded_again_to_be_stored() -> None:
    snapshot = some("objects")
    with mock.patch("meshwire.dataset.snapshot._document", side_effect=AssertionError("encoded again")):
        document = snapshot.to_bytes()
    assert hashlib.sha256(document).hexdigest() == snapshot.hash
    assert snapshot.to_bytes() == document  # it is not kept in memory, so this time it is encoded


def test_any_change_of_content_changes_the_hash() -> None:
    base = listing("c/1.jpg", "c/2.jpg")
    hashes = {
        build_from_objects(rows, source=source, fields=FIELDS).snapshot.hash
        for rows, source in (
            (base, "s3://b"),
            (base, "s3://b2"),
            ([base[0], ("c/2.jpg", "other", 101)], "s3://b"),
            ([base[0], ("c/2.jpg", "etag-1", 999)], "s3://b"),
            ([base[0], ("c/3.jpg", "etag-1", 101)], "s3://b"),
        )
    }
    assert len(hashes) == 5


def poke(document: bytes, column: str, value: Any) -> bytes:
    changed = bytearray(document)
    parse_frame_header(document).tensors[column].view(changed)[0] = value
    return bytes(changed)


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        ("objects", "fields.image.object", 9),
        ("objects", "fields.label.values", 9),
        ("objects", "fields.label.classes.lengths", 9),
        ("objects", "objects.keys.lengths", 8),
        ("objects", "shards", 200),
        ("tar", "shards", 2),
        ("tar", "fields.image.offset", 65_000),
        ("tar", "fields.image.length", 255),
        ("tar", "names.lengths", 1),
    ],
)
def test_documents_that_lie_are_refused(kind: str, column: str, value: int) -> None:
    document = some(kind).to_bytes()
    changed = poke(document, column, value)
    if column == "fields.image.length":
        changed = poke(changed, "fields.image.offset", 9_900)
    with pytest.raises(ColumnError):
        Snapshot.from_bytes(changed)
