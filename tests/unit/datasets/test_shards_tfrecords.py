"""TFRecord shards: legal records whatever the samples, any window of them, read by a reader of the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from awscrt.checksums import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.dataset.fields import sample_key
from meshwire.formats.shard_encoding import (
    NumberError,
    SourceObject,
    TfrecordShard,
    convert_number,
    encode_varint,
    masked_crc,
)
from tests.support.tfrecord_reader import check_mask, crc_by_table, example, features, records

if TYPE_CHECKING:
    from meshwire.formats.shard_encoding import Piece

names = st.text("abé/_-", min_size=1, max_size=40).filter(lambda name: not name.startswith("/"))
extensions = st.sampled_from(["jpg", "cls", "seg.png", "json", ""])


NUMBERS = {"i": b" -7\n", "j": b"9223372036854775807", "f": b"0.5"}


def content(item: SourceObject) -> bytes:
    return (item.etag.encode() * item.size)[: item.size]


def piece_bytes(piece: Piece) -> bytes:
    if piece.summed:
        whole = masked_crc(crc32c(b"".join(piece_bytes(each) for each in piece.summed)))
        return whole[piece.offset :][: piece.length]
    if piece.object is None:
        return piece.data
    if piece.told:
        return convert_number(piece.told, NUMBERS[piece.object.etag])[piece.offset :][: piece.length]
    return content(piece.object)[piece.offset - piece.object.offset :][: piece.length]


def bytes_of(shard: TfrecordShard, offset: int, length: int) -> bytes:
    return b"".join(map(piece_bytes, shard.pieces(offset, length)))


sizes = st.integers(0, 300) | st.sampled_from([127, 128, 16_384])
samples = st.dictionaries(names, st.dictionaries(extensions, sizes, min_size=1), min_size=1, max_size=5)


@given(samples, st.data())
@settings(deadline=None)
def test_any_window_of_legal_records(found: dict[str, dict[str, int]], data: st.DataObject) -> None:
    files = [
        [
            SourceObject(f"p/{stem}.{ext}" if ext else f"p/{stem}", f"{stem}{ext}", size)
            for ext, size in sorted(sizes.items())
        ]
        for stem, sizes in found.items()
    ]
    shard = TfrecordShard.from_samples("s.tfrecord", files, "p/")
    whole = bytes_of(shard, 0, shard.size)
    assert len(whole) == shard.size
    for sample, body in zip(files, records(whole), strict=True):
        wanted = {sample_key(item.key)[1] or "data": content(item) for item in sample}
        assert example(body) == wanted | {"__key__": sample_key(sample[0].key)[0].removeprefix("p/").encode()}
    first = data.draw(st.integers(0, shard.size - 1))
    length = data.draw(st.integers(0, shard.size - first))
    assert bytes_of(shard, first, length) == whole[first : first + length]


def test_the_numbers_of_the_wire() -> None:
    # The varint of 300 is protobuf's own example; the CRC of nine digits is the catalogue's check value.
    assert encode_varint(300) == b"\xac\x02"
    assert [len(encode_varint(value)) for value in (0, 127, 128, 16_383, 16_384)] == [1, 1, 2, 2, 3]
    assert crc_by_table(b"123456789") == 0xE3069283
    check_mask(masked_crc(0xE3069283), b"123456789")


def test_files_told_as_numbers() -> None:
    kinds = (("a", "int64"), ("b", "int64"), ("c", "float"))
    files = [SourceObject("x.a", "i", 4), SourceObject("x.b", "j", 19), SourceObject("x.c", "f", 3)]
    shard = TfrecordShard.from_samples("s", [files], "", kinds)
    whole = bytes_of(shard, 0, shard.size)
    (record,) = records(whole)
    assert features(record) == {"__key__": b"x", "a": -7, "b": (1 << 63) - 1, "c": 0.5}
    for first in range(shard.size):
        assert bytes_of(shard, first, 5) == whole[first : first + 5]
    assert shard.etag != TfrecordShard.from_samples("s", [files], "").etag
    assert shard.etag == TfrecordShard.from_samples("t", [files], "", kinds).etag


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int64", b"cat"),
        ("int64", b""),
        ("int64", b"1.5"),
        ("int64", b"1_000"),
        ("int64", b"9223372036854775808"),
        ("int64", b"\xff"),
        ("float", b"nan"),
        ("float", b"1e39"),
        ("float", b"1_0.5"),
        ("float", b"x"),
    ],
)
def test_what_is_no_number(kind: str, text: bytes) -> None:
    with pytest.raises(NumberError, match=f"is not a valid {kind}"):
        convert_number(kind, text)
