"""The lengths of Parquet's rows: where values lie follows from them, and nonsense is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.formats.parquet_rows import (
    FOOTER_BYTES,
    MAX_CELLS,
    RowLengths,
    column_fields,
    lengths_range,
    render_footer,
)
from meshwire.frame.columns import ColumnError

NAMES = ["a", "b.c", "d"]
VALUES = st.lists(st.tuples(*[st.none() | st.binary(max_size=5)] * 3), max_size=12)


def copy_of(rows: list[tuple[bytes | None, ...]], source: int) -> bytes:
    lengths = {
        name: np.array([-1 if row[n] is None else len(row[n] or b"") for row in rows], np.int64)
        for n, name in enumerate(NAMES)
    }
    told = RowLengths(len(rows), dict.fromkeys(NAMES, "bytes"), lengths, {"e": "struct<>"})
    data = b"".join(value or b"" for row in rows for value in row)
    return data + render_footer(told.to_bytes(), len(data), source)


def lengths_in(copy: bytes) -> RowLengths:
    at, length = lengths_range(copy[-FOOTER_BYTES:], len(copy))
    found = RowLengths.from_bytes(copy[at : at + length])
    assert found.data_bytes == at
    return found


@given(VALUES)
def test_values_lie_where_their_lengths_say(rows: list[tuple[bytes | None, ...]]) -> None:
    copy = copy_of(rows, source=0)
    found = lengths_in(copy)
    assert found.refused == {"e": "struct<>"}
    index = found.choose(["d", "a"], len(copy))
    whole = [row for row in rows if row[0] is not None and row[2] is not None]
    assert (index.skipped, index.size) == (len(rows) - len(whole), len(copy))
    for name, column in (("a", 0), ("d", 2)):
        offsets, lengths = index.places[name]
        places = zip(offsets.tolist(), lengths.tolist(), strict=True)
        assert [copy[at : at + length] for at, length in places] == [row[column] for row in whole]
    other = copy_of(rows, source=len(copy))
    assert len(other) == len(copy) + 1  # a snapshot tells the two by their sizes
    assert lengths_in(other).to_bytes() == found.to_bytes()


def test_rows_left_out_are_told() -> None:
    found = lengths_in(copy_of([(b"x", b"", None), (None, b"y", b"z"), (b"x", b"y", b"z")], 0))
    assert found.choose(["a", "d"], 99).examples == ("row 0 has null in 'd'", "row 1 has null in 'a'")
    missing = found.choose(["a", "nothing"], 99)
    assert (missing.skipped, missing.numbers.size, missing.kinds["nothing"]) == (3, 0, "")
    assert missing.told["e"] == "struct<>, not read"


@given(st.binary(max_size=200), st.integers(0, 1 << 62))
def test_any_bytes_are_lengths_or_an_error(data: bytes, size: int) -> None:
    with contextlib.suppress(ColumnError):
        RowLengths.from_bytes(data)
    with contextlib.suppress(ColumnError):
        at, length = lengths_range(data[-FOOTER_BYTES:], size)
        assert 0 <= at <= at + length <= size


@given(st.data())
def test_any_damage_is_an_error_or_other_lengths(data: st.DataObject) -> None:
    copy = bytearray(copy_of([(b"one", b"", None), (b"x", b"y", b"z")], 0))
    copy[data.draw(st.integers(0, len(copy) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ColumnError):
        at, length = lengths_range(copy[-FOOTER_BYTES:], len(copy))
        found = RowLengths.from_bytes(bytes(copy[at : at + length]))
        index = found.choose(list(found.columns), len(copy))
        assert all(len(lengths) == len(index.numbers) for _, lengths in index.places.values())


def test_too_many_cells_are_refused() -> None:
    many = RowLengths(MAX_CELLS + 1, {"a": "bytes"}, {"a": np.zeros(MAX_CELLS + 1, np.int64)})
    with pytest.raises(ColumnError, match="rows of 1 columns"):
        RowLengths.from_bytes(many.to_bytes())


def test_columns_have_fields_of_their_names() -> None:
    found = column_fields(["image.bytes", "image bytes", "7", "ok"])
    assert {name: spec["column"] for name, spec in found.items()} == {
        "field_7": "7",
        "image_bytes": "image bytes",
        "image_bytes_": "image.bytes",
        "ok": "ok",
    }
