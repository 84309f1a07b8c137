"""Members of structs in lists, and keys and values of maps, as lists of their own.

Law: the lists that one list of structs becomes have its offsets, so they have the same lengths, row by row. A
struct that is null makes each of its members null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import types

from meshd.transform.parquet.row_conversion import RowsError, flat
from meshwire.formats.table_rows import MAX_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH: Final = 8


def with_members(table: pa.Table) -> pa.Table:
    """Return the table with each member of a struct as a column: `user.age`, and `items.price`, a list, of a
    list of structs. Raises RowsError."""
    for _ in range(_DEPTH):
        table = flat(table)
        if not any(map(_has_members, table.schema.types)):
            break
        names, columns = list[str](), list[Any]()
        for field in table.schema:
            column = table.column(field.name)
            found = _members(column.combine_chunks()) if _has_members(field.type) else [("", column)]
            for name, values in found:
                names.append(f"{field.name}.{name}" if name else field.name)
                columns.append(values)
        if len(names) > MAX_COLUMNS:
            raise RowsError(f"it has more than {MAX_COLUMNS} columns")
        table = pa.table(columns, names=names)
    return table


def _has_members(kind: pa.DataType) -> bool:
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(types.is_map(kind) or (lists and types.is_struct(kind.value_type)))


def _members(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of the structs in a list, or of the entries of a map, as lists."""
    kind = held.type
    missing = held.is_null() if held.null_count else None
    if types.is_map(kind):
        offsets = pa.array(np.asarray(held.offsets))
        for name, values in (("key", held.keys), ("value", held.items)):
            yield name, pa.ListArray.from_arrays(offsets, values, mask=missing)
        return
    names = [kind.value_type.field(number).name for number in range(kind.value_type.num_fields)]
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        structs = held.values.slice(held.offset * size, len(held) * size)
        for name, values in zip(names, structs.flatten(), strict=True):
            yield name, pa.FixedSizeListArray.from_arrays(values, size, mask=missing)
        return
    form = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    offsets = pa.array(np.asarray(held.offsets))  # without the place of a slice, which a mask forbids
    for name, values in zip(names, held.values.flatten(), strict=True):
        yield name, form.from_arrays(offsets, values, mask=missing)
