"""Line files such as JSONL: where each line is, and the snapshot of a folder of them, one sample per line.

Law: a line ends at LF; a CR before it is not part of it; empty lines are not samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwire.dataset.archive_keys import uncompressed_name
from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild
from meshwire.dataset.fields import class_name, parse_source, sample_key
from meshwire.dataset.snapshot import MAX_BYTES, BytesColumn, LabelColumn, ObjectTable, Snapshot
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import numpy.typing as npt

    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.lines", 1
MAX_LINE_BYTES = 64 << 20
MAX_LINES = 1 << 27
"""Maximum non-empty lines per file."""
_NEWLINE, _RETURN = 0x0A, 0x0D
_SLICE = 1 << 18  # bytes indexed at once: were each a line feed, they would use some forty times as many


@dataclass(frozen=True, slots=True, eq=False)
class LineIndex:
    """Line positions: `offsets`, `lengths` int64[n], in bytes; `numbers` int64[n]: line numbers in the
    file, from 1; `size`: uncompressed bytes of the file, 0 if unknown."""

    offsets: Integers
    lengths: Integers
    numbers: Integers
    size: int = 0

    def to_bytes(self) -> bytes:
        writer = ColumnWriter(_KIND, _VERSION, {"size": str(self.size)} if self.size else {})
        writer.add_integers("gaps", np.diff(self.offsets, prepend=0))
        writer.add_integers("lengths", self.lengths)
        writer.add_integers("steps", np.diff(self.numbers, prepend=0))
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> LineIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        lengths = reader.read_integers("lengths", low=1, high=MAX_LINE_BYTES)
        gaps = reader.read_integers("gaps", low=0, high=MAX_BYTES, count=lengths.size)
        steps = reader.read_integers("steps", low=1, high=MAX_BYTES, count=lengths.size)
        size = reader.metadata.get("size", "0")
        if not (size.isdecimal() and len(size) < len(str(MAX_BYTES))):
            raise ColumnError(f"invalid file size {shown_value(size)}")
        return cls(np.cumsum(gaps), lengths, np.cumsum(steps), int(size))


def is_lines(key: str, endings: Collection[str]) -> bool:
    """Whether an object's name has one of these extensions of line files, compressed or not."""
    return sample_key(key)[1] in endings or sample_key(uncompressed_name(key))[1] in endings


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
        self._count = 0
        self._found: list[tuple[Integers, Integers, Integers]] = []

    def __repr__(self) -> str:
        return f"<_Indexing, {self._count} lines>"

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
        self._found.append((starts[there], lengths[there], there + self._line))
        self._line += starts.size
        self._count += there.size
        if self._count > self._most:
            raise LineError(f"the file has more than {self._most} lines, too many to index")

    def _check(self, length: int, line: int) -> None:
        if length > MAX_LINE_BYTES:
            raise LineError(f"line {line} has more than {MAX_LINE_BYTES} bytes")

    def index(self) -> LineIndex:
        """Finish at the end of the file, and return the index of all lines."""
        if self._at > self._begin:
            ended = np.array([self._last == _RETURN])
            self._take(np.array([self._begin]), np.array([self._at]), ended)
        nothing = np.zeros(0, np.int64)
        columns = list(zip(*self._found, strict=True)) or [(nothing,)] * 3
        offsets, lengths, numbers = (np.concatenate(column).astype(np.int64) for column in columns)
        return LineIndex(offsets, lengths, numbers)


def build_from_lines(
    files: Iterable[tuple[str, str, int, LineIndex]],
    *,
    source: str | Source,
    fields: Mapping[str, FieldSpec],
) -> SnapshotBuild:
    """Build the snapshot of line files: (key, ETag, size in bytes, index) each, in order of key; each file
    is a shard, and every bytes field of a sample is its line.

    A class label is the folder of the file below the source. Raises EmptySnapshotError, PlanError.
    """
    place = parse_source(source) if isinstance(source, str) else source
    wanted = {ext for spec in fields.values() for ext in spec.ext}
    labelled = any(spec.kind == "label" for spec in fields.values())
    taken, skipped, examples = list[tuple[str, str, int, LineIndex, str]](), 0, list[str]()
    for key, etag, size, index in files:
        folder = class_name(key, place.prefix) if labelled else ""
        if not is_lines(key, wanted) or not index.lengths.size:
            continue
        if folder is None:
            skipped += int(index.lengths.size)
            examples.append(f"{shown_value(key)} is in no folder below the source, so it has no class")
            continue
        if int(index.offsets[-1] + index.lengths[-1]) > size:
            raise PlanError("source", f"the index of {shown_value(key)} extends beyond its {size} bytes")
        taken.append((key, etag, size, index, folder))
    if not taken:
        endings = " or ".join(sorted(f".{ext}" for ext in wanted))
        raise EmptySnapshotError("source", f"no line of text in the files of {place} that end in {endings}")
    return SnapshotBuild(_sealed(place, fields, taken), skipped, tuple(examples[:5]))


def _sealed(
    place: Source, fields: Mapping[str, FieldSpec], taken: list[tuple[str, str, int, LineIndex, str]]
) -> Snapshot:
    keys, etags, sizes, indexes, folders = zip(*taken, strict=True)
    counts = [index.lengths.size for index in indexes]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    lines = BytesColumn(
        np.repeat(np.arange(len(keys), dtype=np.int32), counts),
        np.concatenate([index.offsets for index in indexes]),
        np.concatenate([index.lengths for index in indexes]),
    )
    classes = sorted(set(folders))
    numbers = np.array([classes.index(folder) for folder in folders], np.int64)
    label = LabelColumn(np.repeat(numbers, counts), tuple(classes))
    objects = ObjectTable(
        place.bucket,
        StringColumn.from_strings(keys),
        StringColumn.from_strings(etags),
        np.array(sizes, dtype=np.int64),
    )
    names = StringColumn.from_numbers(np.concatenate([index.numbers for index in indexes]))
    columns = {name: lines if spec.kind == "bytes" else label for name, spec in fields.items()}
    return Snapshot.from_parts(str(place), "lines", objects, starts, columns, fields, names)
