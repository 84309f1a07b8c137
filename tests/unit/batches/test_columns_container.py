"""Columns: narrow integers, lazy strings, and a container that refuses what it did not write."""

from __future__ import annotations

import numpy as np
import pytest

from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn, narrow_integers

WORDS = ["", "a", "ü", "日本", "a", "🎈", ""]


def test_strings_are_decoded_on_access() -> None:
    column = StringColumn.from_strings(WORDS)
    assert list(column) == WORDS
    assert [column[index] for index in range(len(WORDS))] == WORDS
    assert column[-2] == "🎈"
    assert column.take_rows(np.array([3, 0, 3])) == ["日本", "", "日本"]
    assert list(StringColumn.from_strings([])) == []
    with pytest.raises(IndexError):
        column[7]


def test_the_last_occurrence_is_found() -> None:
    column = StringColumn.from_strings(WORDS)
    assert column.find_last("a") == 4
    assert column.find_last("日本") == 3
    assert column.find_last("") == 6
    assert column.find_last("日") is None
    assert column.find_last("aü") is None
    assert StringColumn.from_strings(["aa", "aaa", "aa", "a"]).find_last("aa") == 2
    assert StringColumn.from_strings([]).find_last("") is None


@pytest.mark.parametrize(
    ("blob", "lengths"),
    [
        (b"abc", [1, 1]),
        (b"abc", [4, -1]),
        (b"abc", [2**63 - 1, 2**63 - 1, 5]),
        (b"abc", []),
        ("ü".encode(), [1, 1]),
        (b"\xff", [1]),
        (b"\xed\xa0\x80", [3]),
    ],
)
def test_blobs_that_are_not_cut_into_text_are_refused(blob: bytes, lengths: list[int]) -> None:
    with pytest.raises(ColumnError):
        StringColumn(blob, np.array(lengths, dtype=np.int64))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([], "uint8"),
        ([255], "uint8"),
        ([256], "uint16"),
        ([65536], "uint32"),
        ([2**32], "int64"),
        ([-1], "int64"),
    ],
)
def test_integers_are_narrowed(values: list[int], dtype: str) -> None:
    assert narrow_integers(np.array(values, dtype=np.int64)).dtype.name == dtype


def document() -> bytes:
    writer = ColumnWriter("test", 1, {"who": "me"})
    writer.add_integers("n", np.array([1, 2, 300]))
    writer.add_strings("s", StringColumn.from_strings(WORDS))
    return writer.to_bytes()


def test_it_goes_round() -> None:
    reader = ColumnReader(document(), "test", 1)
    assert reader.read_text("who") == "me"
    assert reader.read_integers("n", low=0, high=300, count=3).tolist() == [1, 2, 300]
    assert list(reader.read_strings("s")) == WORDS


def test_what_does_not_fit_is_refused() -> None:
    reader = ColumnReader(document(), "test", 1)
    for low, high, count in ((2, 300, 3), (0, 299, 3), (0, 300, 4)):
        with pytest.raises(ColumnError):
            reader.read_integers("n", low=low, high=high, count=count)
    for name in ("n", "absent"):
        with pytest.raises(ColumnError, match="lacks"):
            reader.read_strings(name)
    with pytest.raises(ColumnError, match="lacks"):
        reader.read_text("whom")


def test_other_documents_are_refused() -> None:
    data = document()
    for bytes_, kind, version, message in (
        (data, "other", 1, "not a other"),
        (data, "test", 2, "version"),
        (data + b"\0", "test", 1, "bytes"),
        (data[:-1], "test", 1, "truncated"),
        (b"", "test", 1, "not a test"),
    ):
        with pytest.raises(ColumnError, match=message):
            ColumnReader(bytes_, kind, version)
