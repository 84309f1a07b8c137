"""Tables (Parquet and Arrow files): the layout of the copy of typed records that samples are read from.

Law: rows are in blocks of a fixed number of rows. A block has its records, each with the values of all
columns of a fixed width and then a validity byte for each nullable column, and after them the values of the
other columns, column by column. A null is zeros, or no bytes. All positions follow from the index, so a copy
that is made again is identical.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.archive_paths import SLICES
from meshwire.dataset.archive_paths import TABLE_COPY_UNIT as COPY_UNIT
from meshwire.dataset.snapshot import MAX_BYTES, MAX_SAMPLES
from meshwire.formats.record_index import MAX_RECORD_BYTES
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshwire.frame.columns import Integers, StringColumn
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.table", 1
MAX_COLUMNS: Final = 4000
MAX_BLOCK_ROWS: Final = 8192
BLOCK_BYTES: Final = 8 << 20
MAX_IDS: Final = 1 << 20
"""Maximum distinct values of a text column for which a file has ids."""
MAX_IDS_BYTES: Final = 32 << 20
_FOOT = struct.Struct("<QQ4s")  # bytes of the index, padding bytes after it, magic
_MARK: Final = b"SMtb"
FOOTER_BYTES: Final = _FOOT.size
DTYPES: Final = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column. `kind`: its type in the file; `dtype`: of its elements as delivered; `shape`: of a value,
    None if values differ in length, and with None for its first extent if they are lists of fixed shapes;
    `text`: its values are UTF-8; `nullable`: it has a validity byte."""

    kind: str
    dtype: str
    shape: tuple[int | None, ...] | None
    text: bool = False
    nullable: bool = True

    @property
    def is_ragged(self) -> bool:
        """Whether values differ in length."""
        return self.shape is None or None in self.shape

    @property
    def width(self) -> int:
        """Bytes of a value in a record, 0 if values differ in length."""
        if self.shape is None or None in self.shape:
            return 0
        return int(np.dtype(self.dtype).itemsize) * math.prod(extent or 0 for extent in self.shape)


@dataclass(frozen=True, eq=False)
class TableIndex:
    """The index of a copy. `lengths` int64[rows]: bytes of each value of the columns that differ in length;
    `nulls` bool[rows] of the columns that have nulls; `ids` of text columns: int64[rows] and the values, in
    order of their bytes; `refused`: columns of types that are not supported, with these."""

    rows: int
    block_rows: int
    columns: Mapping[str, TableColumn]
    lengths: Mapping[str, Integers]
    nulls: Mapping[str, npt.NDArray[np.bool_]]
    ids: Mapping[str, tuple[Integers, StringColumn]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return sum(column.width + column.nullable for column in self.columns.values())

    def distances(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return where in a record the value of each column of a fixed width is, and each validity byte."""
        at, values, valid = 0, dict[str, int](), dict[str, int]()
        for name, column in self.columns.items():
            if not column.is_ragged:
                values[name] = at
                at += column.width
        for name, column in self.columns.items():
            if column.nullable:
                valid[name] = at
                at += 1
        return values, valid

    @cached_property
    def _blocks(self) -> tuple[Integers, Integers, dict[str, Integers]]:
        """The first row and the offset of each block, and the bytes of each column in it."""
        firsts = np.arange(0, self.rows, self.block_rows, dtype=np.int64)
        counts = np.diff(firsts, append=self.rows)
        totals: dict[str, Integers] = {}
        if firsts.size:
            totals = {name: np.add.reduceat(each, firsts) for name, each in self.lengths.items()}
        sizes = counts * self.record_bytes
        for each in totals.values():
            sizes += each
        return firsts, np.cumsum(sizes) - sizes, totals

    @property
    def data_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.rows * self.record_bytes + sum(int(each.sum()) for each in self.lengths.values())

    def record_offsets(self) -> Integers:
        """Return int64[rows], where each record begins."""
        rows = np.arange(self.rows, dtype=np.int64)
        if not self.lengths:
            return rows * self.record_bytes
        firsts, offsets, _ = self._blocks
        which = rows // self.block_rows
        return offsets[which] + (rows - firsts[which]) * self.record_bytes

    def value_offsets(self, name: str) -> Integers:
        """Return int64[rows], where each value of a column without a fixed width begins."""
        firsts, offsets, totals = self._blocks
        begins = offsets + np.diff(firsts, append=self.rows) * self.record_bytes
        for other, sizes in totals.items():
            if other == name:
                break
            begins = begins + sizes
        lengths = self.lengths[name]
        ends = np.cumsum(lengths)
        which = np.arange(self.rows, dtype=np.int64) // self.block_rows
        before = (ends - lengths)[firsts]
        found: Integers = begins[which] + ends - lengths - before[which]
        return found

    def to_bytes(self) -> bytes:
        described = {
            name: [column.kind, column.dtype, column.shape, column.text, column.nullable]
            for name, column in self.columns.items()
        }
        facts = {
            "rows": self.rows,
            "block_rows": self.block_rows,
            "columns": described,
            "refused": dict(self.refused),
            "nulls": list(self.nulls),
            "ids": list(self.ids),
        }
        writer = ColumnWriter(_KIND, _VERSION, {"facts": json.dumps(facts)})
        for number, name in enumerate(self.lengths):
            writer.add_integers(f"lengths.{number}", self.lengths[name])
        for number, missing in enumerate(self.nulls.values()):
            writer.add_integers(f"nulls.{number}", np.packbits(missing))
        for number, (codes, values) in enumerate(self.ids.values()):
            writer.add_integers(f"ids.{number}", codes)
            writer.add_strings(f"values.{number}", values)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> TableIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        try:
            facts: dict[str, Any] = json.loads(reader.read_text("facts"))
            rows, block_rows = int(facts["rows"]), int(facts["block_rows"])
            columns = {str(name)[:500]: _column(*described) for name, described in facts["columns"].items()}
            refused = {str(name)[:500]: str(kind)[:200] for name, kind in facts["refused"].items()}
            nullable = [name for name in map(str, facts["nulls"]) if columns[name].nullable]
            texts = [name for name in map(str, facts["ids"]) if columns[name].text]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ColumnError(f"the facts of the table are malformed: {error}") from error
        if not (
            0 <= rows <= MAX_SAMPLES and 1 <= block_rows <= MAX_BLOCK_ROWS and len(columns) <= MAX_COLUMNS
        ):
            raise ColumnError(f"{rows} rows of {len(columns)} columns exceed the limits")
        ragged = [name for name, column in columns.items() if column.is_ragged]
        lengths = {
            name: reader.read_integers(f"lengths.{number}", low=0, high=MAX_RECORD_BYTES, count=rows)
            for number, name in enumerate(ragged)
        }
        nulls, ids = {}, {}
        for number, name in enumerate(nullable):
            bits = reader.read_integers(f"nulls.{number}", low=0, high=255, count=(rows + 7) // 8)
            nulls[name] = np.unpackbits(bits.astype(np.uint8), count=rows).astype(np.bool_)
        for number, name in enumerate(texts):
            values = reader.read_strings(f"values.{number}")
            codes = reader.read_integers(f"ids.{number}", low=0, high=max(0, len(values) - 1), count=rows)
            ids[name] = codes, values
        return cls(rows, block_rows, columns, lengths, nulls, ids, refused)


def _column(kind: Any, dtype: Any, shape: Any, text: Any, nullable: Any) -> TableColumn:
    if dtype not in DTYPES:
        raise ValueError(f"the dtype {str(dtype)[:40]!r}")
    if shape is None:
        return TableColumn(str(kind)[:200], dtype, None, bool(text), bool(nullable))
    differ = shape[:1] == [None]
    extents = tuple(int(extent) for extent in shape[differ:])
    if not (all(extent > 0 for extent in extents) and math.prod(extents) < 1 << 24):
        raise ValueError("a shape that is too large")
    return TableColumn(str(kind)[:200], dtype, (None,) * differ + extents, bool(text), bool(nullable))


def block_rows_of(row_bytes: int) -> int:
    """Return the rows of a block, for rows of so many bytes on average."""
    return min(MAX_BLOCK_ROWS, max(1, BLOCK_BYTES // max(1, row_bytes)))


def slice_of(group: int, groups: int) -> int:
    """Return the slice that a row group belongs to, in a file of so many."""
    return group if groups <= SLICES else group * SLICES // groups


def render_footer(document: bytes, data_bytes: int, source_bytes: int) -> bytes:
    """Return the bytes after the blocks: the index, and what makes the size of the copy a multiple of
    TABLE_COPY_UNIT that is not the size of its file."""
    size = data_bytes + len(document) + FOOTER_BYTES
    spare = -size % COPY_UNIT
    spare += COPY_UNIT * (size + spare == source_bytes)
    return document + bytes(spare) + _FOOT.pack(len(document), spare, _MARK)


def index_range(foot: Buffer, size: int) -> tuple[int, int]:
    """Return (offset, length) of the index in a copy of `size` bytes, from its last FOOTER_BYTES. Raises
    ColumnError."""
    if len(foot) != FOOTER_BYTES:
        raise ColumnError("the copy has no footer")
    length, spare, mark = _FOOT.unpack(foot)
    begin = size - FOOTER_BYTES - spare - length
    if mark != _MARK or spare > 2 * COPY_UNIT or begin < 0 or size > MAX_BYTES:
        raise ColumnError("not the copy of a table")
    return begin, length


def merged_ids(files: Sequence[tuple[Integers, StringColumn]]) -> tuple[Integers, tuple[str, ...]]:
    """Merge the ids of several files: int64[rows of all], and the values in order of their UTF-8 bytes."""
    values = sorted({value for _, column in files for value in column}, key=str.encode)
    numbers = {value: number for number, value in enumerate(values)}
    moved = []
    for codes, column in files:
        table = np.fromiter((numbers[value] for value in column), np.int64, len(column))
        moved.append(table[codes] if table.size else codes)
    return np.concatenate(moved), tuple(values)
