"""TFRecords of others: the features that lie there, or a refusal; never a wrong place, whatever the bytes."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.build_snapshot import BytesColumn, EmptySnapshotError
from meshwire.dataset.fields import parse_fields
from meshwire.formats import tf_example, tfrecord_index
from meshwire.formats.record_index import RecordIndex
from meshwire.formats.shard_encoding import encode_varint, masked_crc
from meshwire.formats.tf_example import ExampleError, parse_features, parse_numbers
from meshwire.formats.tfrecord_index import MAX_RECORD_BYTES, TfrecordError, index_records, is_tfrecord
from meshwire.frame.columns import ColumnError
from meshwire.strict_json import PlanError
from tests.support.paged_snapshots import MemoryPages
from tests.support.tf_example_writer import BytesList, FloatList, Int64List, example, record

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
FLOAT = st.floats(width=32, allow_nan=False)


def message(image: bytes, label: int) -> bytes:
    return example({"image": BytesList([image]), "label": Int64List([label]), "box": FloatList([0.5, label])})


def taken(data: bytes, index: RecordIndex, name: str) -> list[bytes]:
    offsets, lengths = index.places[name]
    return [data[at : at + size] for at, size in zip(offsets.tolist(), lengths.tolist(), strict=True)]


@given(st.lists(st.tuples(st.binary(max_size=300), INT64), max_size=8), st.data())
def test_features_lie_where_the_index_says_however_the_file_is_read(
    rows: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    file = b"".join(record(message(*row)) for row in rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(file)), max_size=5)))
    pieces = [file[a:b] for a, b in zip([0, *cuts], [*cuts, len(file)], strict=True)]
    index = RecordIndex.from_bytes(index_records(pieces, ["image", "label", ""]).to_bytes())
    assert taken(file, index, "image") == [image for image, _ in rows]
    assert [parse_numbers(item).tolist() for item in taken(file, index, "label")] == [
        [label] for _, label in rows
    ]
    assert taken(file, index, "") == [message(*row) for row in rows]
    assert index.numbers.tolist() == list(range(len(rows)))


@given(st.lists(INT64), st.lists(FLOAT))
def test_numbers_packed_or_not(integers: list[int], floats: list[float]) -> None:
    for packed in (True, False):
        assert parse_numbers(Int64List(integers).feature(packed=packed)).tolist() == integers
        assert parse_numbers(FloatList(floats).feature(packed=packed)).tolist() == floats
    mixed = encode_varint(5) + b"\x08\x07"
    assert parse_numbers(b"\x1a\x05\x0a\x01" + mixed).tolist() == [5, 7]


@given(st.binary(max_size=200))
def test_any_bytes_are_features_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ExampleError):
        for feature in parse_features(data).values():
            assert 0 <= feature.begin <= feature.end <= len(data)
    with contextlib.suppress(ExampleError):
        parse_numbers(data)
    with contextlib.suppress(TfrecordError):
        index_records([data], ["x"])
    with contextlib.suppress(ColumnError):
        RecordIndex.from_bytes(data)


@given(st.data())
def test_any_damage_is_a_refusal_or_a_record_left_out(data: st.DataObject) -> None:
    rows = [(b"one", 1), (b"", 2), (b"three", 3)]
    file = bytearray(b"".join(record(message(*row)) for row in rows))
    at = data.draw(st.integers(0, len(file) - 1))
    file[at] ^= data.draw(st.integers(1, 255))
    try:
        index = index_records([bytes(file)], ["image", "label"])
    except TfrecordError:
        return
    assert index.skipped == 1
    assert index.numbers.size == 2
    images = taken(bytes(file), index, "image")
    assert all(images[row] == rows[number][0] for row, number in enumerate(index.numbers.tolist()))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (record(b"x")[:-1], "record 0, at byte 0, is truncated"),
        (record(b"x") + b"\0" * 5, "record 1, at byte 17, is truncated"),
        (b"\x1f\x8b" + b"\0" * 20, "compressed with gzip"),
        (b"no record at all", "does not begin with a length"),
        (
            (size := struct.pack("<Q", MAX_RECORD_BYTES + 1)) + masked_crc(crc32c(size)),
            "has 134217729 bytes; a record may have at most",
        ),
    ],
)
def test_files_that_cannot_be_followed(file: bytes, complaint: str) -> None:
    with pytest.raises(TfrecordError, match=complaint):
        index_records([file], ["x"])


def test_records_that_are_no_samples_are_counted_with_the_reason() -> None:
    broken = bytearray(record(message(b"x", 1)))
    broken[-6] ^= 1
    file = b"".join(
        [
            record(message(b"good", 7)),
            bytes(broken),
            record(b"\xff\xff"),
            record(example({"image": BytesList([b"x"])})),
            record(example({"image": BytesList([b"x", b"y"]), "label": Int64List([1])})),
            record(example({"image": BytesList([b"x"]), "label": FloatList([1.0])})),
            record(example({"image": b"", "label": Int64List([1])})),
        ]
    )
    index = index_records([file], ["image", "label"])
    assert (index.numbers.tolist(), index.skipped) == ([0], 6)
    assert index.kinds == {"image": "bytes", "label": "int64"}
    assert index.told == {"box": "float", "image": "bytes", "label": "int64"}
    for reason, example_ in zip(
        [
            "crc32c",
            "not a tf.Example",
            "lacks 'label'",
            "several values of bytes",
            "float in 'label'; earlier records",
        ],
        index.examples,
        strict=True,
    ):
        assert reason in example_


def test_what_would_take_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = example({f"x{number}": Int64List([1]) for number in range(20)})
    monkeypatch.setattr(tf_example, "MAX_FEATURES", 19)
    assert "more than 19 features" in index_records([record(many)], ["x1"]).examples[0]
    monkeypatch.setattr(tfrecord_index, "MAX_CELLS", 9)
    file = record(example({"x": Int64List([1])})) * 4
    assert index_records([file[: len(file) // 4 * 3]], ["x"]).numbers.size == 3
    with pytest.raises(TfrecordError, match=r"more than 3 records.*split it"):
        index_records([file], ["x"])


@pytest.mark.parametrize(
    ("feature", "complaint"),
    [
        (BytesList([b"x"]).feature(), "holds bytes"),
        (b"", "is empty"),
        (b"\x1a\x03\x0a\x01\x80", "ends within a number"),
        (b"\x1a\x0d\x0a\x0b" + b"\x80" * 10 + b"\0", "more than ten bytes"),
        (b"\x12\x05\x0a\x03abc", "ends within a number"),
        (b"\x1a\x02\x10\x01", "another type"),
        (b"\x1a\x00\x1a\x00", "exactly one list"),
        (b"\x1b", "not a protobuf message"),
        (b"\x1a\x05\x00", "not a protobuf message"),
    ],
)
def test_numbers_that_are_none(feature: bytes, complaint: str) -> None:
    with pytest.raises(ExampleError, match=complaint):
        parse_numbers(feature)


def test_a_folder_of_records_is_a_snapshot() -> None:
    file = b"".join(record(message(b"i%d" % number, number)) for number in range(3))
    index = index_records([file], ["image", "label"])
    files = [(f"d/{name}/x.tfrecord", f"etag{name}", len(file), index) for name in "pq"]
    fields = parse_fields(
        {"img": {"feature": "image"}, "n": {"feature": "label"}, "folder": {"class": "prefix"}}
    )
    pages = MemoryPages()
    snapshot = pages.build_records(files, "s3://b/d/", fields).snapshot
    assert pages.read(snapshot.to_bytes()).hash == snapshot.hash
    assert (snapshot.samples, snapshot.shards) == (6, 2)
    assert snapshot.sample_name(4) == "d/q/x.tfrecord/000000001"
    column = snapshot.fields["img"]
    assert isinstance(column, BytesColumn)
    assert np.array_equal(column.offset[:3], index.places["image"][0])
    again = index_records([file], ["box"])
    with pytest.raises(EmptySnapshotError, match=r"img: 'nothing'.*box \(float\), image \(bytes\)"):
        pages.build_records(
            [("d/x.tfrecord", "e", len(file), index_records([file], ["nothing"]))],
            "s3://b/d/",
            parse_fields({"img": {"feature": "nothing"}}),
        )
    other = index_records([record(example({"box": Int64List([1])}))], ["box"])
    with pytest.raises(PlanError, match="'box' is float in 'd/a', and int64 in d/b"):
        pages.build_records(
            [("d/a", "e", len(file), again), ("d/b", "f", 100, other)],
            "s3://b/d/",
            parse_fields({"box": {"feature": "box"}}),
        )
    short = pages.build_records(
        [("d/a", "e", 30, again)], "s3://b/d/", parse_fields({"b": {"feature": "box"}})
    )
    with pytest.raises(ColumnError, match="extend beyond the 30 bytes"):
        short.snapshot.sample_name(0)


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        ("a/x.tfrecord", True),
        ("a/x.tfrecords", True),
        ("a/x.TFRec", True),
        ("a/mnist-train.tfrecord-00000-of-00001", True),
        ("a/train-00000-of-01024", True),
        ("a/train-00000-of-01024.gz", True),
        ("a/x.tfrecord.gz", True),
        ("a/x.tfrecords.zst", True),
        ("a/x.tfrecord.zz", False),
        ("a/log.gz", False),
        ("a.tfrecord/features.json", False),
        ("a/x.tfrecord.idx", False),
        ("a/part-00000.parquet", False),
    ],
)
def test_names_of_files_of_records(key: str, is_one: bool) -> None:
    assert is_tfrecord(key) is is_one
