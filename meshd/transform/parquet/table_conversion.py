"""Table conversion: Parquet and Arrow IPC files to blocks of typed records.

Law: one thread; a block is a fixed number of rows, whatever batches pyarrow gives. Invariant: it holds two
blocks of rows, and of all rows the lengths, nulls and ids. The
lists that one list of structs becomes have its offsets, so they have the same lengths, row by row; a struct
that is null makes each of its members null.
"""

from __future__ import annotations

import io
import math
from array import array
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from meshd.transform.parquet.messages import PIECE
from meshd.transform.parquet.row_conversion import READING, RowsError, column_values, flat, is_plain
from meshwire.dataset.archive_paths import MEMBERS
from meshwire.formats.table_rows import (
    BLOCK_BYTES,
    DTYPES,
    MAX_COLUMNS,
    MAX_IDS,
    MAX_IDS_BYTES,
    TableColumn,
    TableIndex,
    block_rows_of,
    render_footer,
    slice_of,
)
from meshwire.frame.columns import StringColumn

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC, _PARQUET, _STREAM = b"ARROW1", b"PAR", b"\xff\xff\xff\xff"
_END: Final = _STREAM + bytes(4)  # of an Arrow stream
_IN_FILE: Final = 8  # where the stream in an Arrow file begins
_TEMPORAL: Final = {32: "int32", 64: "int64"}


class TableConverter:
    """Converts one file, or those `slices` of its row groups whose bits are set; with the bit MEMBERS, also
    the members of structs in lists, and lists of lists of a fixed size."""

    def __init__(self, slices: int = 0) -> None:
        self._members, self._slices = divmod(slices, MEMBERS)
        self._flat = with_members if self._members else flat
        self._columns: dict[str, TableColumn] = {}
        self._lengths: dict[str, array[int]] = {}
        self._nulls: dict[str, list[Any]] = {}
        self._ids: dict[str, _Ids] = {}
        self._rows = 0

    def __repr__(self) -> str:
        return f"<TableConverter of {len(self._columns)} columns>"

    def convert(self, source: io.IOBase, size: int) -> Iterator[bytes]:
        """Yield the copy of a file of `size` bytes in pieces. Raises RowsError, and what pyarrow raises."""
        schema, row_bytes, batches = open_table(source, self._slices)
        refused = self._look(schema)
        count = block_rows_of(row_bytes)
        total = 0
        for block in _blocks(map(self._flat, batches), count):
            for data in self._block(block):
                total += len(data)
                for at in range(0, len(data), PIECE):
                    yield data[at : at + PIECE]
        document = self._index(count, refused).to_bytes()
        footer = render_footer(document, total, size)
        for at in range(0, len(footer), PIECE):
            yield footer[at : at + PIECE]

    def _look(self, schema: pa.Schema) -> dict[str, str]:
        """Select the columns to read and return the unsupported ones."""
        refused: dict[str, str] = {}
        whole = self._flat(schema.empty_table()).schema
        if not 1 <= len(whole.names) <= MAX_COLUMNS:
            raise RowsError(f"it has {len(whole.names)} columns; 1 to {MAX_COLUMNS} are supported")
        twice = next((name for name, count in Counter(whole.names).items() if count > 1), None)
        if twice is not None:
            raise RowsError(f"it has two columns with the name {twice[:100]!r}: rename one")
        for found in whole:
            column = _column(found, within=bool(self._members))
            if column is None:
                refused[found.name] = str(found.type)[:200]
                continue
            self._columns[found.name] = column
            if column.is_ragged:
                self._lengths[found.name] = array("q")
            if column.nullable:
                self._nulls[found.name] = []
            if column.text:
                self._ids[found.name] = _Ids()
        if not self._columns:
            raise RowsError(f"it has no column of a supported type: {', '.join(refused.values())[:200]}")
        return refused

    def _block(self, table: pa.Table) -> Iterator[Any]:
        """Yield the records of a block, and the values of each column that has no fixed width."""
        width = sum(column.width + column.nullable for column in self._columns.values())
        records = np.zeros((table.num_rows, width), np.uint8)
        at, flags, ragged = 0, list[Any](), list[Any]()
        for name, column in self._columns.items():
            held = table.column(name)
            missing = np.asarray(held.is_null().combine_chunks()) if held.null_count else None
            if column.text and self._ids[name].open:
                self._ids[name].add(held)
            data, lengths = column_values(held.combine_chunks())
            missing = lengths < 0  # also lists that hold nulls
            if column.is_ragged:
                self._lengths[name].frombytes(np.maximum(lengths, 0).tobytes())
                ragged.append(data)
            else:
                values = np.frombuffer(data, np.uint8).reshape(-1, column.width)
                if missing.any():
                    records[~missing, at : at + column.width] = values
                else:
                    records[:, at : at + column.width] = values
                at += column.width
            if column.nullable:
                self._nulls[name].append(missing)
                flags.append(missing)
            elif missing.any():
                raise RowsError(f"the column {name[:80]!r} has a null, but its schema says that it has none")
        for number, missing in enumerate(flags):
            records[:, at + number] = ~missing
        self._rows += table.num_rows
        yield records.reshape(-1).data
        yield from (memoryview(data).cast("B") if len(data) else b"" for data in ragged)

    def _index(self, block_rows: int, refused: dict[str, str]) -> TableIndex:
        nulls = {name: np.concatenate([*found, np.zeros(0, np.bool_)]) for name, found in self._nulls.items()}
        return TableIndex(
            self._rows,
            block_rows,
            self._columns,
            {name: np.frombuffer(values, np.int64) for name, values in self._lengths.items()},
            {name: found for name, found in nulls.items() if found.any()},
            {name: ids.sorted() for name, ids in self._ids.items() if ids.open},
            refused,
        )


class _Ids:
    """The distinct values of a text column, as long as they are few; a null has the id 0."""

    def __init__(self) -> None:
        self.open, self._numbers, self._bytes = True, dict[str, int](), 0
        self._codes: list[Any] = []

    def add(self, held: pa.ChunkedArray) -> None:
        whole = held.combine_chunks()
        if types.is_dictionary(whole.type):
            whole = whole.dictionary_decode()
        encoded = pc.dictionary_encode(whole)
        values = encoded.dictionary.to_pylist()
        for value in values:
            if value not in self._numbers:
                self._numbers[value] = len(self._numbers)
                self._bytes += len(value)
        if len(self._numbers) > MAX_IDS or self._bytes > MAX_IDS_BYTES:
            self.open, self._numbers, self._codes = False, {}, []
            return
        table = np.array([self._numbers[value] for value in values] or [0], np.int64)
        self._codes.append(table[np.asarray(encoded.indices.fill_null(0))].astype(np.int32))

    def sorted(self) -> tuple[Any, StringColumn]:
        order = sorted(self._numbers, key=str.encode)
        places = np.zeros(max(1, len(order)), np.int64)
        for number, value in enumerate(order):
            places[self._numbers[value]] = number
        codes = np.concatenate([*self._codes, np.zeros(0, np.int32)])
        return places[codes], StringColumn.from_strings(order)


def open_table(source: io.IOBase, slices: int = 0) -> tuple[pa.Schema, int, Iterator[pa.Table]]:
    """Open a file of any of the formats: its schema, the mean bytes of a row, and its batches. Raises
    RowsError for another format, and for an Arrow file that was cut."""
    source.seek(0)
    head = source.read(_IN_FILE)
    source.seek(-min(_IN_FILE, source.tell()), io.SEEK_END)
    tail = source.read(_IN_FILE)
    source.seek(0)
    file = pa.PythonFile(source, mode="r")
    if head.startswith(_PARQUET):
        return _open_parquet(file, slices)
    if head.startswith(_MAGIC):
        if not tail.endswith(_MAGIC):
            raise RowsError("it is an Arrow file without its end: it was cut, or its writer was not closed")
        file.seek(_IN_FILE)
    elif not head.startswith(_STREAM):
        raise RowsError(f"it begins with {head[:6]!r}: neither Parquet nor an Arrow file or stream")
    elif tail != _END:
        raise RowsError("it is an Arrow stream without its end: it was cut, or its writer was not closed")
    return _open_arrow(file)


def _open_parquet(file: pa.NativeFile, slices: int) -> tuple[pa.Schema, int, Iterator[pa.Table]]:
    opened = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    count = opened.metadata.num_row_groups
    groups = [group for group in range(count) if not slices or slices >> slice_of(group, count) & 1]
    rows = sum(opened.metadata.row_group(group).num_rows for group in groups)
    total = sum(opened.metadata.row_group(group).total_byte_size for group in groups)
    row_bytes = total // max(1, rows)

    def batches() -> Iterator[pa.Table]:
        for group in groups:
            described = opened.metadata.row_group(group)
            mean = described.total_byte_size // max(1, described.num_rows)
            for batch in opened.iter_batches(block_rows_of(mean), row_groups=[group], **READING):
                yield pa.Table.from_batches([batch])

    return opened.schema_arrow, row_bytes, batches()


def _open_arrow(file: pa.NativeFile) -> tuple[pa.Schema, int, Iterator[pa.Table]]:
    """Open an Arrow stream, or a file by the stream in it; pyarrow's reader of files starts a thread."""
    opened = pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(use_threads=False))
    first = next(opened, None)
    row_bytes = 1 if first is None else first.nbytes // max(1, first.num_rows)
    found = opened if first is None else chain((first,), opened)
    return opened.schema, row_bytes, (pa.Table.from_batches([batch]) for batch in found)


def _blocks(tables: Iterator[pa.Table], count: int) -> Iterator[pa.Table]:
    """Yield the rows in tables of `count` rows; the last one has the rest."""
    held: list[pa.Table] = []
    rows = 0
    for table in tables:
        at = 0
        while rows + table.num_rows - at >= count:
            taken = count - rows
            yield pa.concat_tables([*held, table.slice(at, taken)])
            held, rows, at = [], 0, at + taken
        if at < table.num_rows:
            held.append(table.slice(at))
            rows += table.num_rows - at
    if rows:
        yield pa.concat_tables(held)


def _column(found: pa.Field, *, within: bool) -> TableColumn | None:
    """Return how a column is stored, None if its type is not supported; `within`: lists may be in lists."""
    kind, nullable, told = found.type, bool(found.nullable), str(found.type)[:200]
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return TableColumn("str", "uint8", None, text=True, nullable=nullable)
    if types.is_decimal(kind):
        return None
    if types.is_binary(kind) or types.is_large_binary(kind):
        return TableColumn("bytes", "uint8", None, nullable=nullable)
    if types.is_fixed_size_binary(kind):
        return TableColumn(told, "uint8", (kind.byte_width,), nullable=nullable) if kind.byte_width else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        fixed = types.is_fixed_size_list(kind)
        nullable = nullable or bool(kind.value_field.nullable)  # a null in a list makes all of it one
        inner, number = _inner_shape(kind.value_type) if within else ((), kind.value_type)
        element = _dtype(number)
        if inner:
            return _nested_column(element, (kind.list_size if fixed else None, *inner))
        if not element or (fixed and not 0 < kind.list_size * np.dtype(element).itemsize <= BLOCK_BYTES):
            return None
        told = f"list<{element}>{[kind.list_size] if fixed else ''}"  # its elements have various names
        return TableColumn(told, element, (kind.list_size,) if fixed else None, nullable=nullable)
    dtype = _dtype(kind)
    return TableColumn(told, dtype, (), nullable=nullable) if dtype else None


def _inner_shape(kind: pa.DataType) -> tuple[tuple[int, ...], pa.DataType]:
    """Return the sizes of lists in a list, if they are fixed, and the type of the numbers in them."""
    sizes: list[int] = []
    while types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes), kind


def _nested_column(element: str, shape: tuple[int | None, ...]) -> TableColumn | None:
    """Return the column of lists in lists; a null anywhere in one makes all of it a null."""
    sizes = [size for size in shape if size is not None]
    if not element or not 0 < math.prod(sizes) * np.dtype(element).itemsize <= BLOCK_BYTES:
        return None
    told = f"list<{element}>{['?' if size is None else size for size in shape]}".replace("'", "")
    return TableColumn(told, element, shape, nullable=True)


def _dtype(kind: pa.DataType) -> str:
    """Return the dtype in which numbers, bools, dates and times are delivered, "" for another type."""
    if types.is_temporal(kind):
        return _TEMPORAL.get(kind.bit_width, "") if is_plain(kind) else ""
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        name = str(np.dtype(kind.to_pandas_dtype()).name)
        return name if name in DTYPES else ""
    return ""


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
