"""Makes pyarrow load, before a process gives up its files, the parts that it loads on first use."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from meshd.transform.parquet.messages import Converter


def preload_pyarrow(converter: type[Converter], *, arrow: bool) -> None:
    """Convert a small Parquet file, and with `arrow` an Arrow file, as the process will do."""
    table = pa.table({"a": ["x", None], "b": [[1.0], [2.0]], "c": [{"d": b"y"}, None], "e": [True, None]})
    files = [io.BytesIO()]
    pq.write_table(table, files[0], compression="zstd", use_dictionary=["a"])
    for new in (pa.ipc.new_file, pa.ipc.new_stream) if arrow else ():
        files.append(io.BytesIO())
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        with new(files[-1], table.schema, options=options) as writer:
            writer.write_table(table)
    for file in files:
        data = file.getvalue()
        for _ in converter().convert(io.BytesIO(data), len(data)):
            pass
