"""Rows of Parquet files: the layout of the row copy that samples are read from.

Law: rows follow each other; each holds the values of its columns in schema order as bytes, and no bytes for
a null. The position of a value follows from the lengths alone, so a rebuilt copy is identical. The lengths
are at the end, followed by their size.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.fields import MAX_FIELDS
from meshwire.dataset.snapshot import MAX_BYTES
from meshwire.formats.record_index import MAX_RECORD_BYTES, RecordIndex
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.parquet", 1
MAX_COLUMNS: Final = 1000
MAX_CELLS: Final = 1 << 24
"""Maximum rows times columns of a file."""
_FOOT = struct.Struct("<QI4s")  # bytes of the lengths, padding bytes after them, magic
_MARK: Final = b"SMpq"
FOOTER_BYTES: Final = _FOOT.size
_EXAMPLES = 5


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """Value lengths of a row copy. `columns`: the type of each column by name, in order; `lengths` by name:
    int64[rows], -1 for a null; `refused`: unsupported columns, with their types."""

    rows: int
    columns: Mapping[str, str]
    lengths: Mapping[str, Integers]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(int(np.maximum(lengths, 0).sum()) for lengths in self.lengths.values())

    def to_bytes(self) -> bytes:
        facts = {"rows": self.rows, "columns": dict(self.columns), "refused": dict(self.refused)}
        writer = ColumnWriter(_KIND, _VERSION, {"facts": json.dumps(facts)})
        for number, name in enumerate(self.columns):
            writer.add_integers(f"lengths.{number}", self.lengths[name] + 1)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> RowLengths:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        try:
            facts: dict[str, Any] = json.loads(reader.read_text("facts"))
            rows = int(facts["rows"])
            columns = {str(name)[:500]: str(kind)[:200] for name, kind in facts["columns"].items()}
            refused = {str(name)[:500]: str(kind)[:200] for name, kind in facts["refused"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ColumnError(f"the facts of the rows are malformed: {error}") from error
        if not 0 <= rows * len(columns) <= MAX_CELLS or rows < 0 or len(columns) > MAX_COLUMNS:
            raise ColumnError(f"{rows} rows of {len(columns)} columns exceed the limits")
        lengths = {
            name: reader.read_integers(f"lengths.{number}", low=0, high=MAX_RECORD_BYTES + 1, count=rows) - 1
            for number, name in enumerate(columns)
        }
        return cls(rows, columns, lengths, refused)

    def choose(self, wanted: Sequence[str], size: int) -> RecordIndex:
        """Locate the values of some columns in a copy of `size` bytes; a row in which one of them is null
        is left out."""
        kinds = {name: self.columns.get(name, "") for name in wanted}
        told = {**self.columns, **{name: f"{kind}, not read" for name, kind in self.refused.items()}}
        if not all(kinds.values()):
            lacking = next(name for name, kind in kinds.items() if not kind)
            examples = (f"there is no column {shown_value(lacking)}",) if self.rows else ()
            return RecordIndex(np.zeros(0, np.int64), {}, kinds, self.rows, examples, told, size)
        whole = np.ones(self.rows, np.bool_)
        total = np.zeros(self.rows, np.int64)
        for name, lengths in self.lengths.items():
            total += np.maximum(lengths, 0)
            if name in kinds:
                whole &= lengths >= 0
        kept, at = np.flatnonzero(whole).astype(np.int64), np.cumsum(total) - total
        places = {}
        for name, lengths in self.lengths.items():
            if name in kinds:
                places[name] = at[kept], lengths[kept]
            at += np.maximum(lengths, 0)
        return RecordIndex(kept, places, kinds, self.rows - kept.size, self._nulls(whole, kinds), told, size)

    def _nulls(self, whole: Any, wanted: Mapping[str, str]) -> tuple[str, ...]:
        found = []
        for row in np.flatnonzero(~whole)[:_EXAMPLES].tolist():
            missing = next(name for name in wanted if self.lengths[name][row] < 0)
            found.append(f"row {row} has null in {shown_value(missing)}")
        return tuple(found)


def render_footer(document: bytes, data_bytes: int, source_bytes: int) -> bytes:
    """Return the bytes after the rows. Snapshots distinguish a file and its copy by size, so a copy that
    would be as large as its file gets one more byte."""
    spare = int(data_bytes + len(document) + FOOTER_BYTES == source_bytes)
    return document + b"\0" * spare + _FOOT.pack(len(document), spare, _MARK)


def lengths_range(foot: Buffer, size: int) -> tuple[int, int]:
    """Return (offset, length) of the lengths in a copy of `size` bytes, from its last FOOTER_BYTES. Raises
    ColumnError."""
    if len(foot) != FOOTER_BYTES:
        raise ColumnError("the copy has no footer")
    length, spare, mark = _FOOT.unpack(foot)
    begin = size - FOOTER_BYTES - spare - length
    if mark != _MARK or spare > 1 or begin < 0 or size > MAX_BYTES:
        raise ColumnError("not the row copy of a Parquet file")
    return begin, length


def column_fields(columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a field for each of these columns, with the same name as far as field names allow it."""
    found: dict[str, dict[str, str]] = {}
    for column in sorted(columns)[:MAX_FIELDS]:
        name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in column)[:60]
        name = name if name[:1].isalpha() else f"field_{name}"
        while name in found:
            name += "_"
        found[name] = {"column": column}
    return found
