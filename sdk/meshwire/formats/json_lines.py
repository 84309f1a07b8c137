"""Line files such as JSONL: where each line is, and the snapshot of a folder of them, one sample per line.

Law: a line ends at LF, a byte; a CR before it is not part of it; empty lines are not samples.
"""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwire.dataset.archive_paths import uncompressed_name
from meshwire.dataset.fields import sample_key
from meshwire.dataset.page_document import size_of
from meshwire.dataset.paged_columns import Page
from meshwire.dataset.paged_snapshot import PageFacts
from meshwire.dataset.snapshot import MAX_BYTES
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, narrow_integers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy.typing as npt

    from meshwire.dataset.paged_columns import Narrow
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.lines", 2
_BLOCK = 1 << 16
MAX_LINE_BYTES = 64 << 20
MAX_LINES = 1 << 27
"""Maximum non-empty lines per file."""
_NEWLINE, _RETURN = 0x0A, 0x0D
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WIDE_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_SLICE = 1 << 18  # bytes indexed at once: were each a line feed, they would use some forty times as many


@dataclass(frozen=True, slots=True, eq=False)
class LineIndex:
    """Line positions: `offsets`, `lengths`, integers [n] of any width, in bytes; `numbers` [n]: line numbers
    in the file, from 1, None for 1…n; `size`: uncompressed bytes of the file, 0 if unknown."""

    offsets: Narrow
    lengths: Narrow
    numbers: Narrow | None
    size: int = 0

    def to_bytes(self) -> bytes:
        """Encode the document, which is also the file's page in snapshots: columns that can be read at any
        sample, in the narrowest integers."""
        writer = ColumnWriter(_KIND, _VERSION, {"size": str(self.size)} if self.size else {})
        writer.add_integers("offsets", self.offsets)
        writer.add_integers("lengths", self.lengths)
        if self.numbers is not None and self.numbers.size and int(self.numbers[-1]) != self.numbers.size:
            writer.add_integers("numbers", self.numbers)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> LineIndex:
        """Decode the document of this or the previous version. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, 1, _VERSION)
        if reader.version == 1:
            lengths = reader.read_integers("lengths", low=1, high=MAX_LINE_BYTES)
            gaps = reader.read_integers("gaps", low=0, high=MAX_BYTES, count=lengths.size)
            steps = reader.read_integers("steps", low=1, high=MAX_BYTES, count=lengths.size)
            return cls(np.cumsum(gaps), lengths, np.cumsum(steps), size_of(reader))
        page = _read_page(reader)
        return cls(page.offsets[0], page.lengths[0], page.numbers, size_of(reader))


def _read_page(reader: ColumnReader, *, checked: bool = False) -> Page:
    lengths = reader.view_integers("lengths", low=1, high=MAX_LINE_BYTES)
    offsets = reader.view_integers("offsets", low=0, high=MAX_BYTES, count=lengths.size)
    numbers = None
    if reader.has_column("numbers"):
        numbers = reader.view_integers("numbers", low=1, high=MAX_BYTES, count=lengths.size)
    # In blocks: a page is larger than what checks it.
    for start in range(0, 0 if checked else lengths.size, _BLOCK):
        here, size = slice(start, start + _BLOCK), slice(start, start + _BLOCK + 1)
        ends = offsets[here].astype(np.int64) + lengths[here]
        if (offsets[size][1:] < ends[: offsets[size].size - 1]).any():
            raise ColumnError("the lines of the file overlap")
        if numbers is not None and (numbers[size][1:] <= numbers[size][:-1]).any():
            raise ColumnError("the lines of the file are out of order")
    return Page((offsets,), (lengths,), numbers)


def current_line_index(document: bytes) -> bytes:
    """Return the document of an index in the present version. Raises ColumnError."""
    current = ColumnReader(document, _KIND, 1, _VERSION).version == _VERSION
    return document if current else LineIndex.from_bytes(document).to_bytes()


def earlier_line_index(document: bytes) -> bytes:
    """Return the document of an index in the form that nodes send to each other, which all releases read.
    Raises ColumnError."""
    index = LineIndex.from_bytes(document)
    numbers = index.numbers
    if numbers is None:
        numbers = np.arange(1, index.lengths.size + 1)
    writer = ColumnWriter(_KIND, 1, {"size": str(index.size)} if index.size else {})
    writer.add_integers("gaps", np.diff(index.offsets.astype(np.int64), prepend=0))
    writer.add_integers("lengths", index.lengths)
    writer.add_integers("steps", np.diff(numbers.astype(np.int64), prepend=0))
    return writer.to_bytes()


def line_page_facts(document: Buffer, stored: int) -> PageFacts:
    """Return what a snapshot says of the page of a file that has `stored` bytes. Raises ColumnError."""
    reader = ColumnReader(document, _KIND, _VERSION)
    lengths = reader.view_integers("lengths", low=1, high=MAX_LINE_BYTES)
    digest, total = hashlib.sha256(document).digest(), int(lengths.sum(dtype=np.int64))
    return PageFacts(digest, lengths.size, (total,), size_of(reader) or stored, stored)


def open_line_page(document: Buffer, *, checked: bool = False) -> Page:
    """Return the page of a file of lines, a view of its document. `checked`: its lines were found to be in
    order and apart before. Raises ColumnError."""
    return _read_page(ColumnReader(document, _KIND, _VERSION), checked=checked)


def is_lines(key: str, endings: Collection[str]) -> bool:
    """Whether an object's name has one of these extensions of line files, compressed or not."""
    return sample_key(key)[1] in endings or sample_key(uncompressed_name(key))[1] in endings


def wide_encoding(beginning: bytes) -> str:
    """Return the encoding of a text by its byte order mark if its line feeds are not single bytes, else "".
    `beginning`: the first four bytes of the file, or all of a shorter one."""
    if beginning in _WIDE_MARKS:
        return "UTF-32"
    return "UTF-16" if beginning.startswith(_UTF16_MARKS) else ""


class LineError(ValueError):
    """A line is longer than a sample may be, or there are too many lines."""


def index_lines(pieces: Iterable[Buffer], most: int = MAX_LINES) -> LineIndex:
    """Index the lines of a file given in pieces of any sizes, at most `most` lines. Raises LineError."""
    indexing = _Indexing(most)
    for piece in pieces:
        octets = np.frombuffer(piece, np.uint8)
        for start in range(0, octets.size, _SLICE):
            indexing.add(octets[start : start + _SLICE])
    return indexing.index()


class _Indexing:
    """Collects lines. Empty lines are dropped at once, so a compressed file of nothing else uses no
    memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin, self._at, self._line = (
            0,
            0,
            1,
        )  # start of the current line, offset of the next byte, line number
        self._last = 0  # the byte before; 0 is neither CR nor LF
        self._starts, self._lengths = _Growing(), _Growing()
        self._numbers: _Growing | None = None  # from the first empty line on

    def __repr__(self) -> str:
        return f"<_Indexing, {self._starts.size} lines>"

    def add(self, octets: npt.NDArray[np.uint8]) -> None:
        """Add the next bytes, at least one. Raises LineError."""
        found = np.flatnonzero(octets == _NEWLINE)
        if found.size:
            before = np.where(found > 0, octets[found - 1], self._last)
            stops = found + self._at
            starts = np.concatenate(([self._begin], stops[:-1] + 1))
            self._take(starts, stops, before == _RETURN)
            self._begin = int(stops[-1]) + 1
        self._at, self._last = self._at + octets.size, int(octets[-1])
        self._check(self._at - self._begin, self._line)

    def _take(self, starts: Integers, stops: Integers, returned: npt.NDArray[np.bool_]) -> None:
        lengths = stops - starts - ((stops > starts) & returned)
        longest = int(np.argmax(lengths))
        self._check(int(lengths[longest]), self._line + longest)
        there = np.flatnonzero(lengths > 0)
        if self._numbers is None and there.size < starts.size:
            self._numbers = _Growing()
            self._numbers.append(np.arange(1, self._starts.size + 1))
        if self._numbers is not None:
            self._numbers.append(self._line + there)
        self._starts.append(starts[there])
        self._lengths.append(lengths[there])
        self._line += starts.size
        if self._starts.size > self._most:
            raise LineError(f"the file has more than {self._most} lines, too many to index")

    def _check(self, length: int, line: int) -> None:
        if length > MAX_LINE_BYTES:
            raise LineError(f"line {line} has more than {MAX_LINE_BYTES} bytes")

    def index(self) -> LineIndex:
        """Finish at the end of the file, and return the index of all lines."""
        if self._at > self._begin:
            ended = np.array([self._last == _RETURN])
            self._take(np.array([self._begin]), np.array([self._at]), ended)
        numbers = None if self._numbers is None else self._numbers.array()
        return LineIndex(self._starts.array(), self._lengths.array(), numbers)


class _Growing:
    """Integers in the narrowest type. They grow in place: until the file ends, this is what is in memory of
    it, and many small arrays would take twice as much."""

    def __init__(self) -> None:
        self._values: Narrow = np.empty(0, np.uint8)
        self.size = 0

    def __repr__(self) -> str:
        return f"<_Growing, {self.size} of {self._values.dtype}>"

    def append(self, values: Integers) -> None:
        """Add integers of 0 and above."""
        narrow, end = narrow_integers(values), self.size + values.size
        dtype = np.promote_types(self._values.dtype, narrow.dtype)
        if dtype != self._values.dtype:
            self._values = self._values[: self.size].astype(dtype)
        if end > self._values.size:
            self._values.resize(end + end // 8, refcheck=False)
        self._values[self.size : end] = narrow
        self.size = end

    def array(self) -> Narrow:
        """Return all of them; nothing may be added afterwards."""
        self._values.resize(self.size, refcheck=False)
        return self._values
