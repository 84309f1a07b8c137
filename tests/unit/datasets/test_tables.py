"""The index of a table's copy, the snapshot of its records, and filters."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from meshwire.dataset.column_filter import Condition, parse_filter
from meshwire.dataset.derive_snapshot import keep_samples, select_fields
from meshwire.dataset.fields import parse_fields, parse_source
from meshwire.dataset.snapshot import BytesColumn, RecordColumn, Snapshot
from meshwire.formats.table_rows import TableColumn, TableIndex
from meshwire.formats.table_snapshot import TableFile, build_from_tables, resolve_fields
from meshwire.frame.columns import ColumnError, StringColumn
from meshwire.strict_json import PlanError

ROWS = 10


def index(first: int = 0) -> TableIndex:
    columns = {
        "n": TableColumn("int64", "int64", (), nullable=False),
        "text": TableColumn("str", "uint8", None, text=True),
        "pair": TableColumn("list<float32>[2]", "float32", (2,), nullable=False),
    }
    missing = np.arange(ROWS) == 3
    lengths = np.where(missing, 0, np.arange(ROWS) % 4)
    values = StringColumn.from_strings(["a", "b"] if first else ["b", "c"])
    return TableIndex(
        ROWS, 4, columns, {"text": lengths}, {"text": missing}, {"text": (np.arange(ROWS) % 2, values)}
    )


def test_positions_follow_from_the_index() -> None:
    """Against a walk over the blocks, value by value."""
    found = TableIndex.from_bytes(index().to_bytes())
    assert found.record_bytes == 8 + 8 + 1
    assert found.distances() == ({"n": 0, "pair": 8}, {"text": 16})
    at, records, texts = 0, [], []
    for start in range(0, ROWS, 4):
        rows = range(start, min(ROWS, start + 4))
        for _ in rows:
            records.append(at)
            at += found.record_bytes
        for row in rows:
            texts.append(at)
            at += int(found.lengths["text"][row])
    assert found.record_offsets().tolist() == records
    assert found.value_offsets("text").tolist() == texts
    assert found.data_bytes == at


def test_forged_index_is_refused() -> None:
    whole = index()
    for broken in (
        TableIndex(ROWS, 0, whole.columns, whole.lengths, {}),
        TableIndex(ROWS + 1, 4, whole.columns, whole.lengths, {}),
        TableIndex(ROWS, 4, {"n": TableColumn("x", "object", ())}, {}, {}),
        TableIndex(ROWS, 4, {"n": TableColumn("x", "int8", (1 << 30,))}, {}, {}),
    ):
        with pytest.raises(ColumnError):
            TableIndex.from_bytes(broken.to_bytes())


def test_snapshot_of_records() -> None:
    source = parse_source("s3://rows/v1")
    given = parse_fields({name: {"column": name} for name in ("n", "pair", "text")})
    fields = resolve_fields(given, index(), "v1/a.parquet")
    files = [TableFile(f"v1/{name}.parquet", name, 4096, index(at)) for at, name in enumerate("ab")]
    built = build_from_tables(files, source=source, fields=fields)
    assert (built.snapshot.samples, built.skipped) == (2 * ROWS - 2, 2)
    assert built.examples[0] == "v1/a.parquet: row 3 has null in 'text'"
    again = Snapshot.from_bytes(built.snapshot.to_bytes())
    assert again.hash == built.snapshot.hash
    for snapshot in (again, keep_samples(again, np.array([1, 5, 12]))):
        n, pair = snapshot.fields["n"], snapshot.fields["pair"]
        assert isinstance(n, RecordColumn)
        assert isinstance(pair, RecordColumn)
        assert pair.records is n.records
        assert np.array_equal(pair.offset, n.offset + 8)
        assert pair.offsets_at(2) == pair.offset[2]
        assert set(pair.length.tolist()) == {8}
        assert isinstance(snapshot.fields["text"], BytesColumn)
    chosen = select_fields(again, ("n",))
    assert Snapshot.from_bytes(chosen.to_bytes()).hash == chosen.hash
    with pytest.raises(ColumnError, match="beyond"):
        Snapshot.from_bytes(
            build_from_tables(
                [TableFile("v1/a.parquet", "a", 100, index())], source=source, fields=fields
            ).snapshot.to_bytes()
        )


def test_ids_are_of_all_files() -> None:
    fields = parse_fields({"n": {"column": "n"}, "text": {"column": "text", "as": "ids"}})
    files = [TableFile(f"v1/{name}.parquet", name, 4096, index(at)) for at, name in enumerate("ab")]
    snapshot = build_from_tables(files, source=parse_source("s3://rows/v1"), fields=fields).snapshot
    labels = snapshot.fields["text"]
    assert not isinstance(labels, BytesColumn)
    assert labels.classes == ("a", "b", "c")
    assert labels.values.tolist() == [1, 2, 1, 1, 2, 1, 2, 1, 2, 0, 1, 0, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (["n", ">", 2], [False, False, True]),
        (["n", "in", [1, 5]], [True, False, True]),
        (["n", "not in", []], [True, True, True]),
        (["n", "!=", 2.5], [True, True, True]),
    ],
)
def test_conditions(condition: list[object], expected: list[bool]) -> None:
    [parsed] = parse_filter([condition])
    assert parsed.holds(np.array([1, 2, 5])).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "values", "column", "expected"),
    [
        ("int64", (1 << 60, 0.5), [1 << 60, (1 << 60) + 1], [True, False]),
        ("uint64", (1 << 60, -1, 1 << 70), [1 << 60, (1 << 60) + 1], [True, False]),
        ("int64", (2.0, float("inf"), float("nan"), True), [1, 2], [True, True]),
        ("uint8", (256, 5), [0, 5], [False, True]),
        ("float32", (0.1,), [0.1, 0.2], [True, False]),
        ("float64", (1, True), [1.0, 2.0], [True, False]),
        ("bool", (1, 2), [True, False], [True, False]),
        ("bool", (False,), [True, False], [False, True]),
    ],
)
def test_one_of_several_is_what_equals_one_of_them(
    dtype: str, values: tuple[Any, ...], column: list[Any], expected: list[bool]
) -> None:
    numbers = np.array(column * 1000, dtype)
    assert Condition("n", "in", values).holds(numbers).tolist() == expected * 1000
    assert Condition("n", "not in", values).holds(numbers).tolist() == [not each for each in expected] * 1000
    each = [Condition("n", "==", (value,)).holds(numbers) for value in values]
    assert np.logical_or.reduce(each).tolist() == expected * 1000


def test_a_text_is_not_compared_with_each_of_many() -> None:
    """A file may have a million distinct texts, and a condition ten thousand."""
    compared = 0

    class Text(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    column = np.array([Text(number) for number in range(1000)], object)
    condition = Condition("c", "in", tuple(str(number) for number in range(500, 2000)))
    assert np.flatnonzero(condition.holds(column)).tolist() == list(range(500, 1000))
    assert compared <= 2 * column.size


def test_conditions_on_texts() -> None:
    texts = np.array(["a", "b", ""], object)
    assert Condition("t", "in", ("a", "")).holds(texts).tolist() == [True, False, True]
    assert Condition("t", "<", ("b",)).holds(texts).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "value", [[], {}, [["n", ">"]], [["n", "~", 1]], [["n", "in", 1]], [["n", "==", None]]]
)
def test_malformed_filters(value: object) -> None:
    with pytest.raises(PlanError, match="filter"):
        parse_filter(value)


@pytest.mark.parametrize(
    ("kind", "value", "number"),
    [
        ("date32[day]", "1970-02-01", 31),
        ("date32[day]", "1970-01-02T12:00:00", 1.5),
        ("timestamp[s]", "1970-01-02", 86_400),
        ("timestamp[ms]", "1970-01-01T00:00:01.5", 1500),
        ("timestamp[us, tz=UTC]", "1970-01-01T01:00:00+01:00", 0),
        ("timestamp[ns]", "1970-01-01T00:00:00.000001Z", 1000),
        ("timestamp[ns]", "1970-01-01T00:00:00.000001002", 1002),
        ("timestamp[ns]", "1970-01-01T01:00:00.123456789+01:00", 123_456_789),
        ("timestamp[ns]", "1970-01-01T00:00:00.0000000005", 0.5),
        ("timestamp[us]", "1970-01-01T00:00:00.000001500Z", 1.5),
        ("timestamp[s]", "1970-01-01T00:00:00.5", 0.5),
        ("timestamp[us]", 7, 7),
        ("timestamp[us]", "yesterday", "yesterday"),
        ("string", "1970-01-02", "1970-01-02"),
        ("time64[us]", "1970-01-02", "1970-01-02"),
    ],
)
def test_dates_are_compared_as_the_column_has_them(kind: str, value: Any, number: Any) -> None:
    assert Condition("c", "in", (value,)).for_kind(kind) == Condition("c", "in", (number,))


@pytest.mark.parametrize(
    "value",
    [2.0**53, 2.0**53 + 2, 0.5, -0.5, 0.0, 3.0, 2.0**62 + 2.0**12, 1e300, -1e300, float("inf"), float("nan")],
)
@pytest.mark.parametrize("compared", ["==", "!=", "<", "<=", ">", ">="])
def test_integers_are_compared_with_floats_exactly(compared: str, value: float) -> None:
    """As Python does. As floats, 2^53 + 1 and 2^53 are equal; bounds of row groups are not rounded."""
    numbers = [0, 1, -1, 3, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**62 + 4095, 2**62 + 4096, 2**63 - 1]
    exact = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt}
    expected = [exact.get(compared, operator.ge)(number, value) for number in numbers]
    condition = Condition("n", compared, (value,))
    assert condition.holds(np.array(numbers, np.int64)).tolist() == expected
    unsigned = [number >= 0 for number in numbers]
    found = condition.holds(np.array([number for number in numbers if number >= 0], np.uint64)).tolist()
    assert found == [each for each, kept in zip(expected, unsigned, strict=True) if kept]
    for number, holds in zip(numbers, expected, strict=True):
        assert condition.may_hold(number, number) or not holds
