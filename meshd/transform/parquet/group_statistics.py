"""Statistics of the row groups of a Parquet file: the least and greatest value of each column.

Runs in the restricted child process. Only the footer of the file is read. Values are given as a filter
compares them: dates and times as the numbers that they are stored as.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from meshd.transform.parquet.messages import PIECE

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

MAX_COLUMNS: Final = 4000
_UNITS: Final = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


class StatisticsConverter:
    """Reads the footer of one file."""

    def convert(self, source: io.IOBase, size: int) -> Iterator[bytes]:
        """Yield `rows`, of each row group, and `columns`, for each of them a list of [least, greatest] by row
        group, null where that is not known, as JSON in pieces. Raises what pyarrow raises."""
        opened = pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=False, buffer_size=1 << 20)
        metadata, schema = opened.metadata, opened.schema
        groups = range(metadata.num_row_groups)
        columns: dict[str, list[Any]] = {}
        for number in range(min(metadata.num_columns, MAX_COLUMNS)):
            column = schema.column(number)
            arrow = _leaf(opened.schema_arrow, column.path)
            if arrow is None or column.max_repetition_level:
                continue
            columns[column.path] = [
                _range(metadata.row_group(group).column(number).statistics, arrow, column) for group in groups
            ]
        rows = [metadata.row_group(group).num_rows for group in groups]
        data = json.dumps({"rows": rows, "columns": columns}, allow_nan=False).encode()
        for at in range(0, len(data), PIECE):
            yield data[at : at + PIECE]


def _leaf(schema: pa.Schema, path: str) -> pa.DataType | None:
    """Return the type of a column, which may be a member of structs."""
    names = path.split(".")
    found: Any = schema.field(names[0]).type if names[0] in schema.names else None
    for name in names[1:]:
        found = found.field(name).type if found is not None and pa.types.is_struct(found) else None
    return found


def _range(statistics: Any, arrow: pa.DataType, column: Any) -> list[Any] | None:
    if statistics is None or not statistics.has_min_max:
        return None
    if pa.types.is_boolean(arrow) or pa.types.is_integer(arrow) or pa.types.is_string(arrow):
        return [statistics.min, statistics.max]
    if pa.types.is_floating(arrow) and not pa.types.is_float16(arrow):  # which pyarrow gives as bytes
        found = [float(statistics.min), float(statistics.max)]
        return found if all(abs(value) < float("inf") for value in found) else None
    if pa.types.is_date32(arrow) or (pa.types.is_timestamp(arrow) and arrow.unit == _unit(column)):
        return [statistics.min_raw, statistics.max_raw]
    return None


def _unit(column: Any) -> str:
    """Return the unit in which times are stored: Arrow's may be another."""
    described = json.loads(column.logical_type.to_json())
    return _UNITS.get(str(described.get("timeUnit")), "")
