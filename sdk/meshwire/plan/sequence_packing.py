"""Sequence packing: short sequences placed side by side in rows of one length, to avoid padding.

Law: a pure function of the sequences' lengths; every epoch has the same rows, in another order.
Invariant: every element of every sequence is in exactly one row ("split"), or the first `length` of each
("truncate"); the sequences of a row come from one shard, in rising order.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from meshwire.frame.columns import ColumnReader, ColumnWriter
from meshwire.strict_json import (
    PlanError,
    checked_boolean,
    checked_choice,
    checked_integer,
    checked_object,
    checked_text,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

Long = Literal["split", "truncate"]
LONG: tuple[Long, ...] = ("split", "truncate")
Counted = Literal["piece", "sample", "none"]
COUNTED: tuple[Counted, ...] = ("piece", "sample", "none")
MAX_LENGTH = 1 << 24
MAX_FIELDS = 16
RUN = 8192
"""Sequences of a shard that are packed together; a larger shard is packed run by run."""
SEGMENTS, POSITIONS = ".segments", ".positions"
_KIND, _VERSION = "shardmesh.pack", 1
PieceColumns = tuple["Integers", "Integers", "Integers", "Integers"]


@dataclass(frozen=True, slots=True)
class Pack:
    """Packing of `fields`, one-dimensional and equally long within each sample, into rows of `length`;
    `value` is the padding. `long`: what happens to a sequence longer than a row. `positions`: where they
    count from 0, in each piece or in each sample. Batches have no positions with "none", and segments only
    with `segments`.
    """

    fields: tuple[str, ...]
    length: int
    value: int = 0
    long: Long = "split"
    positions: Counted = "piece"
    segments: bool = True

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the tensors that say what the elements of the first field belong to."""
        wanted = ((SEGMENTS, self.segments), (POSITIONS, self.positions != "none"))
        return tuple(f"{self.fields[0]}{part}" for part, there in wanted if there)


def parse_pack(value: Any, path: str = "pack") -> Pack:
    """Parse a pack specification. Raises PlanError with the path of the bad field."""
    document = checked_object(value, path, ("fields", "length", "value", "long", "positions", "segments"))
    given = required_field(document, "fields", path)
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_FIELDS:
        raise PlanError(f"{path}.fields", f'expected 1…{MAX_FIELDS} field names, such as ["tokens"]')
    fields = tuple(checked_text(name, f"{path}.fields[{i}]", at_most=100) for i, name in enumerate(names))
    if len(set(fields)) != len(fields):
        raise PlanError(f"{path}.fields", "a field appears twice; name each once")
    return Pack(
        tuple(sorted(fields)),
        checked_integer(required_field(document, "length", path), f"{path}.length", 1, MAX_LENGTH),
        checked_integer(document.get("value", 0), f"{path}.value", -(1 << 31), 1 << 32),
        cast("Long", checked_choice(document.get("long", "split"), f"{path}.long", LONG)),
        cast("Counted", checked_choice(document.get("positions", "piece"), f"{path}.positions", COUNTED)),
        checked_boolean(document.get("segments", True), f"{path}.segments"),
    )


def pack_document(pack: Pack) -> dict[str, Any]:
    """Return the specification as plain JSON values; `parse_pack` restores it."""
    document = {"fields": list(pack.fields), "length": pack.length, "value": pack.value, "long": pack.long}
    # Left out by default: plans of releases that did not know them keep their hashes.
    if pack.positions != "piece":
        document["positions"] = pack.positions
    return document if pack.segments else document | {"segments": False}


@dataclass(frozen=True, slots=True, eq=False)
class PackTable:
    """The packed rows. `row_starts` int64[R+1], indices into the pieces: `samples`, `begins` and `lengths`
    int64[P], elements `begins` to `begins + lengths` of a sample. `shard_starts` int64[S+1], indices into
    the rows.
    """

    row_starts: Integers
    samples: Integers
    begins: Integers
    lengths: Integers
    shard_starts: Integers

    @property
    def rows(self) -> int:
        return self.row_starts.size - 1

    def pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Return (sample, begin, length) of each piece of a row, in order."""
        span = slice(int(self.row_starts[row]), int(self.row_starts[row + 1]))
        columns = (self.samples[span], self.begins[span], self.lengths[span])
        return zip(*(column.tolist() for column in columns), strict=True)

    def piece_columns(self, rows: Integers) -> PieceColumns:
        """Return the number of pieces of each of these rows, and `samples`, `begins` and `lengths` of all of
        them, row after row."""
        starts = self.row_starts[rows]
        counts = self.row_starts[rows + 1] - starts
        before = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        return counts, self.samples[places], self.begins[places], self.lengths[places]

    def samples_of(self, rows: Integers) -> Integers:
        """Return the samples in these rows, unique and rising."""
        return np.unique(self.piece_columns(rows)[1])

    def to_bytes(self) -> bytes:
        writer = ColumnWriter(_KIND, _VERSION, {})
        writer.add_integers("rows", np.diff(self.row_starts))
        writer.add_integers("shards", np.diff(self.shard_starts))
        for name in ("samples", "begins", "lengths"):
            writer.add_integers(name, getattr(self, name))
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> PackTable:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        bound = 1 << 40
        counts = reader.read_integers("rows", low=1, high=MAX_LENGTH)
        pieces = int(counts.sum())
        shards = reader.read_integers("shards", low=1, high=max(1, counts.size))
        samples, begins, lengths = (
            reader.read_integers(name, low=0, high=bound, count=pieces)
            for name in ("samples", "begins", "lengths")
        )
        return cls(_starts(counts), samples, begins, lengths, _starts(shards))


def _starts(counts: Integers) -> Integers:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def pack_rows(lengths: Integers, shard_starts: Integers, pack: Pack) -> PackTable:
    """Pack sequences of these lengths (int64[N]; 0 takes no room) into rows. Takes about 2 µs per
    sequence."""
    pieces: list[tuple[int, int, int]] = []
    counts: list[int] = []
    shards: list[int] = []
    for first, end in zip(shard_starts.tolist(), shard_starts.tolist()[1:], strict=False):
        before = len(counts)
        for start in range(first, end, RUN):
            stop = min(start + RUN, end)
            for row in _best_fit(_cut(lengths[start:stop].tolist(), start, pack), pack.length):
                pieces += row
                counts.append(len(row))
        if len(counts) > before:
            shards.append(len(counts) - before)
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    samples, begins, sizes = (np.ascontiguousarray(columns[:, number]) for number in range(3))
    return PackTable(
        _starts(np.array(counts, np.int64)), samples, begins, sizes, _starts(np.array(shards, np.int64))
    )


def _cut(lengths: list[int], first: int, pack: Pack) -> list[tuple[int, int, int]]:
    """Cut samples into pieces of at most one row, in order."""
    cut = []
    for sample, length in enumerate(lengths, first):
        whole = length if pack.long == "split" else min(length, pack.length)
        cut += [(sample, at, min(pack.length, whole - at)) for at in range(0, whole, pack.length)]
    return cut


def _best_fit(pieces: list[tuple[int, int, int]], room: int) -> list[list[tuple[int, int, int]]]:
    """Pack best-fit decreasing: longest first, each into the fullest row that has room for it (of equals,
    the oldest). Rows are ordered by their first pieces, and pieces rise within a row."""
    rows: list[list[tuple[int, int, int]]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for piece in sorted(pieces, key=lambda piece: (-piece[2], piece)):
        place = bisect.bisect_left(free, (piece[2], -1))
        if place == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(place)
        rows[row].append(piece)
        if left > piece[2]:
            bisect.insort(free, (left - piece[2], row))
    return sorted(sorted(row) for row in rows)
