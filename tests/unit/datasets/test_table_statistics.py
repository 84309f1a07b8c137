"""Statistics of row groups leave out only files without a matching row."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.datasets.table_statistics import GroupStatistics
from meshd.transform.parquet.group_statistics import StatisticsConverter
from meshwire.dataset.archive_paths import SLICES, pinned_size, pinned_table
from meshwire.dataset.column_filter import parse_filter

FRACTIONS = [0.5, -0.5, 0.1, -0.1, 1 / 3, 1e-46]
NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([*FRACTIONS, float("nan")]))
DTYPES: dict[str, Any] = {"string": object} | {
    name: getattr(np, name) for name in ("int64", "float64", "float32", "float16")
}
TEXTS = st.text("abß", max_size=3)


def statistics(table: Any, rows: int = 1 << 20, **how: Any) -> GroupStatistics:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=rows, **how)
    data = out.getvalue()
    document = b"".join(StatisticsConverter().convert(io.BytesIO(data), len(data)))
    return msgspec.json.decode(document, type=GroupStatistics)


@given(st.data())
def test_a_matching_row_is_never_left_out(draw: st.DataObject) -> None:
    kind = draw.draw(st.sampled_from(["int64", "float64", "float32", "float16", "string"]))
    each = {"int64": st.integers(-3, 3), "string": TEXTS}.get(kind, NUMBERS)
    values = draw.draw(st.lists(st.one_of(st.none(), each), min_size=1, max_size=20))
    column = pa.array(
        [value if value is None or kind in ("int64", "string") else DTYPES[kind](value) for value in values],
        kind,
    )
    operator = draw.draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]))
    value = TEXTS if kind == "string" else st.one_of(st.integers(-3, 3), st.sampled_from(FRACTIONS))
    wanted = draw.draw(st.lists(value, max_size=3) if "in" in operator else value)
    conditions = parse_filter([["x", operator, wanted]])
    values = column.to_pylist()
    present = [number for number, value in enumerate(values) if value is not None]
    chosen = np.array([values[number] for number in present], DTYPES[kind])
    matches: list[int] = np.flatnonzero(conditions[0].holds(chosen)).tolist() if present else []
    rows = draw.draw(st.sampled_from([1, 3]))
    found = statistics(pa.table({"x": column}), rows=rows)
    slices = found.matching_slices(conditions)
    read = found.row_numbers(slices).tolist() if slices else []
    assert {present[number] for number in matches} <= set(read)
    assert read == sorted(read)


@pytest.mark.parametrize("condition", [["x", "==", 0.1], ["x", "<=", 0.1], ["x", "in", [0.1]]])
def test_values_are_rounded_as_in_a_column_of_32_bits(condition: list[Any]) -> None:
    """Of 0.1, it has a number that is greater."""
    found = statistics(pa.table({"x": pa.array([0.1, 0.2], "float32")}), rows=1)
    assert found.matching_slices(parse_filter([condition])) == 0b01


def test_ranges_are_those_of_row_groups() -> None:
    days = pa.array([19000, 19001, 19400], pa.int32()).cast(pa.date32())
    times = pa.array([1, 2, 9], pa.timestamp("us"))
    seconds = pa.array([1, 2, 9], pa.timestamp("s"))
    inner = pa.StructArray.from_arrays([pa.array([1, 2, 7])], ["age"])
    table = pa.table(
        {"n": [1, 2, 9], "day": days, "at": times, "old": seconds, "user": inner, "list": [[1], [2], [3]]}
    )
    whole = statistics(table, rows=2)
    found = whole.columns
    assert whole.rows == [2, 1]
    assert found["n"] == found["at"] == [(1, 2), (9, 9)]
    assert found["day"] == [(19000, 19001), (19400, 19400)]
    assert found["old"] == [(1000, 2000), (9000, 9000)]  # stored, and delivered, in milliseconds
    assert found["user.age"] == [(1, 2), (7, 7)]
    assert "list" not in "".join(found)
    assert statistics(pa.table({"n": [1]}), write_statistics=False).columns == {"n": [None]}


@pytest.mark.parametrize(
    ("conditions", "slices"),
    [
        ([["n", ">", 9]], 0b00),
        ([["n", ">=", 9]], 0b10),
        ([["n", "==", 5]], 0b00),
        ([["n", "in", [5, 9]]], 0b10),
        ([["n", "in", []]], 0b00),
        ([["n", "<", 3], ["m", ">", 30]], 0b00),  # each holds in a group, never both
        ([["n", "<", 3], ["m", "<=", 20]], 0b01),
        ([["n", "==", "x"]], 0b11),  # an error, told later
        ([["other", "==", 1]], 0b11),
        ([["n", "!=", 9], ["n", "not in", [1, 2]]], 0b11),
    ],
)
def test_conditions_over_groups(conditions: list[Any], slices: int) -> None:
    columns: Any = {"n": [(1, 2), (9, 9)], "m": [(10, 20), (30, 40)]}
    assert GroupStatistics([5, 7], columns).matching_slices(parse_filter(conditions)) == slices


def test_many_groups_are_slices_of_neighbours() -> None:
    groups = 50
    columns: Any = {"n": [(group, group) for group in range(groups)]}
    found = GroupStatistics([2] * groups, columns)
    slices = found.matching_slices(parse_filter([["n", "in", [7, 49]]]))
    assert slices.bit_count() == 2
    assert slices < 1 << SLICES
    rows = found.row_numbers(slices).tolist()
    assert {14, 15, 98, 99} <= set(rows)
    assert len(rows) <= 2 * 2 * -(-groups // SLICES)
    assert pinned_table(pinned_size(slices, 4096)) == (f"table-{slices:x}", 4096)
