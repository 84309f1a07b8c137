"""Preview of a table, Parquet or Arrow IPC: its schema and first rows as short texts, for people.

Runs in the restricted child process. Only the first batch of the file is read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from meshd.transform.parquet.messages import PIECE
from meshd.transform.parquet.table_conversion import open_table

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

MAX_ROWS: Final = 50
MAX_COLUMNS: Final = 60
_TEXT, _ITEMS, _DEPTH = 200, 8, 3


class PreviewConverter:
    """Reads the beginning of one file."""

    def convert(self, source: io.IOBase, size: int) -> Iterator[bytes]:
        """Yield `columns` ([name, type] each, without those beyond 60), `hidden` (how many these are) and
        `rows` (lists of texts; null for a null) as JSON, in pieces. Raises what pyarrow raises."""
        schema, _, batches = open_table(source)
        fields = list(schema)[:MAX_COLUMNS]
        first = next(batches, None)
        columns: list[list[str | None]] = []
        if first is not None:
            some = first.slice(0, MAX_ROWS)
            columns = [[_value_text(value) for value in some.column(number)] for number in range(len(fields))]
        document = {
            "columns": [[field.name[:_TEXT], str(field.type)[:_TEXT]] for field in fields],
            "hidden": max(0, len(schema) - MAX_COLUMNS),
            "rows": list(zip(*columns, strict=True)),
        }
        data = json.dumps(document).encode()
        for at in range(0, len(data), PIECE):
            yield data[at : at + PIECE]


def _value_text(value: pa.Scalar) -> str | None:
    return None if not value.is_valid else _text(value, _DEPTH)[:_TEXT]


def _text(value: Any, depth: int) -> str:
    """Return a value as text without making Python objects of all its members."""
    if not value.is_valid:
        return "null"
    if pa.types.is_dictionary(value.type):
        value = value.dictionary[value.index.as_py()]
    if isinstance(value, pa.BinaryScalar) and not pa.types.is_string(value.type):
        return f"{len(value.as_buffer() or b'')} bytes"
    if isinstance(value, pa.StringScalar | pa.LargeStringScalar):
        return bytes(value.as_buffer()[: 4 * _TEXT]).decode(errors="replace")
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar | pa.MapScalar):
        items = value.values
        shown = [_member(items[number], depth) for number in range(min(_ITEMS, len(items)))]
        more = f", … ({len(items)})" if len(items) > _ITEMS else ""
        return f"[{', '.join(shown)}{more}]"
    if isinstance(value, pa.StructScalar):
        names = [value.type.field(number).name for number in range(min(_ITEMS, value.type.num_fields))]
        members = ", ".join(f"{name}: {_member(value[name], depth)}" for name in names)
        return f"{{{members}}}"
    return str(value)


def _member(value: Any, depth: int) -> str:
    return _text(value, depth - 1) if depth else "…"
