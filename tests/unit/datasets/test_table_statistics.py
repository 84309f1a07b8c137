"""Statistics of row groups leave out only files without a matching row."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.datasets.table_statistics import may_match
from meshd.transform.parquet.group_statistics import StatisticsConverter
from meshwire.dataset.column_filter import parse_filter

if TYPE_CHECKING:
    from meshwire.dataset.column_filter import Condition

NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([0.5, -0.5, float("nan")]))
TEXTS = st.text("abß", max_size=3)


def statistics(table: Any, rows: int = 1 << 20, **how: Any) -> dict[str, Any]:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=rows, **how)
    data = out.getvalue()
    found: dict[str, Any] = json.loads(b"".join(StatisticsConverter().convert(io.BytesIO(data), len(data))))[
        "columns"
    ]
    return found


@given(st.data())
def test_a_file_with_a_matching_row_is_never_left_out(draw: st.DataObject) -> None:
    kind = draw.draw(st.sampled_from(["int64", "float64", "string"]))
    each = {"int64": st.integers(-3, 3), "float64": NUMBERS, "string": TEXTS}[kind]
    values = draw.draw(st.lists(st.one_of(st.none(), each), min_size=1, max_size=12))
    column = pa.array(
        [None if value is None else float(value) if kind == "float64" else value for value in values], kind
    )
    operator = draw.draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]))
    value = TEXTS if kind == "string" else st.integers(-3, 3)
    wanted = draw.draw(st.lists(value, max_size=3) if "in" in operator else value)
    conditions = parse_filter([["x", operator, wanted]])
    present = [value for value in column.to_pylist() if value is not None]
    matches = (
        conditions[0].holds(np.array(present, object if kind == "string" else None))
        if present
        else np.zeros(0)
    )
    found = statistics(pa.table({"x": column}), rows=3)
    assert may_match(found, conditions) or not matches.any()


def test_ranges_are_those_of_row_groups() -> None:
    days = pa.array([19000, 19001, 19400], pa.int32()).cast(pa.date32())
    times = pa.array([1, 2, 9], pa.timestamp("us"))
    seconds = pa.array([1, 2, 9], pa.timestamp("s"))
    inner = pa.StructArray.from_arrays([pa.array([1, 2, 7])], ["age"])
    table = pa.table(
        {"n": [1, 2, 9], "day": days, "at": times, "old": seconds, "user": inner, "list": [[1], [2], [3]]}
    )
    found = statistics(table, rows=2)
    assert found["n"] == found["at"] == [[1, 2], [9, 9]]
    assert found["day"] == [[19000, 19001], [19400, 19400]]
    assert found["old"] == [[1000, 2000], [9000, 9000]]  # stored, and delivered, in milliseconds
    assert found["user.age"] == [[1, 2], [7, 7]]
    assert "list" not in "".join(found)
    assert statistics(pa.table({"n": [1]}), write_statistics=False) == {"n": [None]}


@pytest.mark.parametrize(
    ("conditions", "may"),
    [
        ([["n", ">", 9]], False),
        ([["n", ">=", 9]], True),
        ([["n", "==", 5]], False),
        ([["n", "in", [5, 9]]], True),
        ([["n", "in", []]], False),
        ([["n", "<", 3], ["m", ">", 30]], False),  # each holds in a group, never both
        ([["n", "<", 3], ["m", "<=", 20]], True),
        ([["n", "==", "x"]], True),  # an error, told later
        ([["other", "==", 1]], True),
        ([["n", "!=", 9], ["n", "not in", [1, 2]]], True),
    ],
)
def test_conditions_over_groups(conditions: list[Any], may: bool) -> None:
    columns: Any = {"n": [(1, 2), (9, 9)], "m": [(10, 20), (30, 40)]}
    parsed: tuple[Condition, ...] = parse_filter(conditions)
    assert may_match(columns, parsed) is may
