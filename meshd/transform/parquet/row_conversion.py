"""Row conversion: pyarrow record batches to rows of bytes.

Law: one thread, one batch at a time. A number becomes its little-endian memory bytes, a list of numbers
becomes their concatenation. Columns of other types are left out and reported.
"""

from __future__ import annotations

from array import array
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from meshd.transform.parquet.messages import PIECE
from meshwire.formats.parquet_rows import MAX_CELLS, MAX_COLUMNS, RowLengths, render_footer

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from meshwire.frame.columns import Integers

_BATCH_BYTES: Final = 8 << 20
_MAX_BATCH: Final = 4096
_DEPTH: Final = 8  # levels of nested structs
READING: Final = {"use_threads": False, "use_pandas_metadata": False}
"""How batches of a Parquet file are read: in this thread."""


class RowsError(ValueError):
    """The file cannot be read; the message has the reason."""


class _Values(NamedTuple):
    """A column of a batch: the bytes of all values that are not null, and the length of each (-1: null)."""

    data: Any
    lengths: Integers


class RowConverter:
    """Converts one file."""

    def __init__(self) -> None:
        self._lengths: dict[str, array[int]] = {}
        self._kinds: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<RowConverter of {len(self._kinds)} columns>"

    def convert(self, source: io.IOBase, size: int) -> Iterator[bytes]:
        """Yield the copy of a file of `size` bytes in pieces. Raises RowsError, and what pyarrow raises."""
        file = pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=False, buffer_size=1 << 20)
        refused = self._look(file)
        total = 0
        for group in range(file.metadata.num_row_groups):
            for batch in self._batches(file, group):
                data = self._rows(batch)
                total += len(data)
                yield from _cut(data)
        lengths = {name: np.frombuffer(values, np.int64) for name, values in self._lengths.items()}
        document = RowLengths(self._count(), self._kinds, lengths, refused).to_bytes()
        yield from _cut(render_footer(document, total, size))

    def _look(self, file: pq.ParquetFile) -> dict[str, str]:
        """Select the columns to read and return the unsupported ones."""
        refused: dict[str, str] = {}
        whole = flat(pa.Table.from_batches([], schema=file.schema_arrow))
        names = whole.schema.names
        if len(set(names)) != len(names) or not 1 <= len(names) <= MAX_COLUMNS:
            raise RowsError(
                f"it has {len(names)} columns, or two with one name; at most {MAX_COLUMNS} are supported"
            )
        for found in whole.schema:
            kind = kind_of(found.type)
            if kind:
                self._kinds[found.name], self._lengths[found.name] = kind, array("q")
            else:
                refused[found.name] = str(found.type)[:200]
        if not self._kinds:
            raise RowsError(f"it has no column of a supported type: {', '.join(refused.values())[:200]}")
        self._check(file.metadata.num_rows)
        return refused

    def _check(self, rows: int) -> None:
        if rows * len(self._kinds) > MAX_CELLS:
            raise RowsError(
                f"it has more than {MAX_CELLS // len(self._kinds)} rows of {len(self._kinds)} columns, too "
                "many for one file: write several files"
            )

    def _batches(self, file: pq.ParquetFile, group: int) -> Iterator[pa.Table]:
        described = file.metadata.row_group(group)
        row = max(1, described.total_byte_size // max(1, described.num_rows))
        count = min(_MAX_BATCH, max(1, _BATCH_BYTES // row))
        for batch in file.iter_batches(count, row_groups=[group], **READING):
            yield flat(pa.Table.from_batches([batch]))

    def _rows(self, table: pa.Table) -> bytes:
        self._check(self._count() + table.num_rows)
        columns = []
        for name in self._kinds:
            values = column_values(table.column(name).combine_chunks())
            self._lengths[name].frombytes(np.ascontiguousarray(values.lengths).tobytes())
            columns.append(_cuts(values.data, np.maximum(values.lengths, 0)))  # empty for null
        return b"".join(chain.from_iterable(zip(*columns, strict=True)))

    def _count(self) -> int:
        return len(next(iter(self._lengths.values())))


def kind_of(found: pa.DataType) -> str:
    """Return the kind of values of a column type, "" if the type is not supported."""
    if types.is_dictionary(found):
        return kind_of(found.value_type)
    if types.is_string(found) or types.is_large_string(found):
        return "str"
    if types.is_binary(found) or types.is_large_binary(found) or types.is_fixed_size_binary(found):
        return "" if types.is_decimal(found) else "bytes"
    if types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found):
        return f"list<{_dtype(found.value_type)}>" if _is_number(found.value_type) else ""
    if _is_number(found):
        return _dtype(found)
    return str(found) if types.is_temporal(found) and is_plain(found) else ""


def _dtype(found: pa.DataType) -> str:
    return str(np.dtype(found.to_pandas_dtype()).name)


def _is_number(found: pa.DataType) -> bool:
    return bool(types.is_integer(found) or types.is_floating(found) or types.is_boolean(found))


def is_plain(found: pa.DataType) -> bool:
    """Return whether values are integers of 32 or 64 bits in memory."""
    return bool(types.is_primitive(found) and found.bit_width in (32, 64))


def flat(table: pa.Table) -> pa.Table:
    """Return the table with members of structs as columns, such as `image.bytes`."""
    for _ in range(_DEPTH):
        if not any(types.is_struct(found) for found in table.schema.types):
            break
        if table.num_columns > MAX_COLUMNS:
            raise RowsError(f"it has more than {MAX_COLUMNS} columns")
        table = table.flatten()
    return table


def column_values(column: Any) -> _Values:
    """Return the values of a whole column of a batch (an Array, or its chunks)."""
    whole = column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)
    if types.is_dictionary(whole.type):
        whole = whole.dictionary_decode()
    there = np.asarray(whole.is_valid())
    held = whole.drop_null() if whole.null_count else whole
    data, each = _of_list(held) if _is_list(held.type) else (_bytes_of(held), _lengths_of(held))
    bad = each < 0  # lists that hold nulls
    lengths = np.full(len(whole), -1, np.int64)
    lengths[np.flatnonzero(there)[~bad]] = each[~bad]
    if bad.any():
        data = b"".join(piece for piece, gone in zip(_cuts(data, np.abs(each)), bad, strict=True) if not gone)
    return _Values(data, lengths)


def _is_list(found: pa.DataType) -> bool:
    return bool(types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found))


def _of_list(held: Any) -> tuple[Any, Integers]:
    """Return the bytes of all lists, and the length of each in bytes, negative if it holds a null."""
    if types.is_fixed_size_list(held.type):
        bounds = np.arange(len(held) + 1, dtype=np.int64) * held.type.list_size
        values = held.flatten()
    else:
        bounds = np.asarray(held.offsets).astype(np.int64)
        values = (
            held.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0])) if len(held) else held.values[:0]
        )
        bounds = bounds - (bounds[0] if bounds.size else 0)
    numbers, missing, count = _numbers(values)
    each = np.diff(bounds) * _width(numbers.type) * count
    if missing is None:
        return _bytes_of(numbers), each
    nulls = np.concatenate(([0], np.cumsum(missing)))
    holding = nulls[bounds[1:]] > nulls[bounds[:-1]]
    return _bytes_of(numbers.fill_null(0)), np.where(holding, -each, each)


def _numbers(values: Any) -> tuple[Any, Any, int]:
    """Return the numbers in the elements of a list, which of these hold a null (None: none does), and the
    numbers of an element: many if it is itself a list of a fixed size."""
    if not types.is_fixed_size_list(values.type):
        return values, np.asarray(values.is_null()) if values.null_count else None, 1
    size = values.type.list_size
    numbers, inner, count = _numbers(values.values.slice(values.offset * size, len(values) * size))
    missing = np.asarray(values.is_null()) if values.null_count else None
    if inner is not None:
        within = inner.reshape(-1, size).any(axis=1)
        missing = within if missing is None else missing | within
    return numbers, missing, size * count


def _width(found: pa.DataType) -> int:
    return 1 if types.is_boolean(found) else int(found.bit_width) // 8


def _bytes_of(held: Any) -> memoryview:
    """Return the bytes of values without nulls, one after the other."""
    if types.is_boolean(held.type):
        held = held.cast(pa.uint8())
    buffers = held.buffers()
    if len(buffers) == 3:  # values of variable length have offsets
        offsets = _offsets(held)
        return memoryview(buffers[2] or b"")[int(offsets[0]) : int(offsets[-1])]
    width = int(held.type.byte_width)
    return memoryview(buffers[1] or b"")[held.offset * width : (held.offset + len(held)) * width]


def _lengths_of(held: Any) -> Integers:
    if len(held.buffers()) == 3:
        return np.diff(_offsets(held)).astype(np.int64)
    width = 1 if types.is_boolean(held.type) else int(held.type.byte_width)
    return np.full(len(held), width, np.int64)


def _offsets(held: Any) -> Integers:
    large = types.is_large_string(held.type) or types.is_large_binary(held.type)
    if not len(held) or held.buffers()[1] is None:
        return np.zeros(1, np.int64)
    found = np.frombuffer(held.buffers()[1], np.int64 if large else np.int32)
    return found[held.offset : held.offset + len(held) + 1].astype(np.int64)


def _cuts(data: Any, lengths: Integers) -> list[Any]:
    view = memoryview(data)
    return [view[begin:end] for begin, end in pairwise([0, *np.cumsum(lengths).tolist()])]


def _cut(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]
