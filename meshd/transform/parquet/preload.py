"""Makes pyarrow load, before a process gives up its files, the parts that it loads on first use."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from meshd.transform.parquet.row_conversion import RowConverter
    from meshd.transform.parquet.table_conversion import TableConverter


def preload_pyarrow(rows: type[RowConverter], tables: type[TableConverter]) -> None:
    """Convert a small file of each format, with the converters that are used later."""
    table = pa.table({"a": ["x", None], "b": [[1.0], [2.0]], "c": [{"d": b"y"}, None], "e": [True, None]})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, compression="zstd", use_dictionary=["a"])
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(arrow, table.schema, options=options) as writer:
        writer.write_table(table)
    for converter, data in ((rows, parquet), (tables, parquet), (tables, arrow)):
        size = len(data.getvalue())
        for _ in converter().convert(io.BytesIO(data.getvalue()), size):
            pass
