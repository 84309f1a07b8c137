"""Columns of many small values, stored as a tensor frame of narrow integer arrays.

Law: a reader's memory is bounded by the bytes it is given; any bytes give columns or a ColumnError.
Invariant: equal columns have equal bytes (integers use the narrowest type that holds them all).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from meshwire.frame.tensor_frame import FrameError, frame_layout, parse_frame_header, tensor_views

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    import numpy.typing as npt

    from meshwire.frame.tensor_frame import Buffer

    Integers = npt.NDArray[np.int64]

_NARROW = ((np.uint8, 1 << 8), (np.uint16, 1 << 16), (np.uint32, 1 << 32))
_INTEGERS = {np.dtype(kind): int(np.iinfo(kind).max) for kind in (np.uint8, np.uint16, np.uint32, np.int64)}
_DIGITS, _BLOCK = 9, 1 << 16  # minimum digits of a number; numbers written per block
_LONG_PIECE = 1 << 16  # bytes of a document's piece that are not copied
_RUN, _NOT_ASCII = 64, 0x80  # strings whose place is found by one sum; the first byte that is not ASCII


class ColumnError(ValueError):
    """The bytes are not the expected document, or the document is damaged."""


class StringColumn:
    """Strings in one UTF-8 blob, decoded on access: a million of them load in milliseconds. Immutable."""

    __slots__ = ("_blob", "_bounds")

    def __init__(self, blob: bytes, lengths: Integers) -> None:
        """`lengths`: int64[n], bytes of each string. Raises ColumnError unless they cut `blob` into valid
        UTF-8.
        """
        self._blob = blob
        self._bounds = np.zeros(lengths.size + 1, dtype=np.int64)
        if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > len(blob)):
            raise ColumnError("the length of a string exceeds the blob")
        np.cumsum(lengths, out=self._bounds[1:])
        if int(self._bounds[-1]) != len(blob):
            raise ColumnError("the lengths of the strings do not add up to the size of the blob")
        self._check_utf8()

    def _check_utf8(self) -> None:
        if self._blob.isascii():
            return
        try:
            self._blob.decode()
        except UnicodeDecodeError as error:
            raise ColumnError("a string is not UTF-8") from error
        inner = self._bounds[self._bounds < len(self._blob)]
        octets = np.frombuffer(self._blob, dtype=np.uint8)
        if ((octets[inner] & 0xC0) == 0x80).any():  # a boundary inside a character
            raise ColumnError("a string is not UTF-8")

    @classmethod
    def from_strings(cls, strings: Sequence[str]) -> StringColumn:
        """Build the column of these strings. Raises UnicodeEncodeError for unpaired surrogates."""
        blob = "".join(strings).encode()
        if blob.isascii():
            lengths = np.fromiter(map(len, strings), dtype=np.int64, count=len(strings))
        else:
            sizes = (len(text.encode()) for text in strings)
            lengths = np.fromiter(sizes, dtype=np.int64, count=len(strings))
        return cls(blob, lengths)

    @classmethod
    def from_numbers(cls, numbers: Integers) -> StringColumn:
        """Build the column of these numbers (0 or more), each written with at least nine digits. Needs
        little more memory than the column itself, however many there are."""
        sizes = np.full(numbers.size, _DIGITS, np.int64)
        for digits in range(_DIGITS, 19):
            sizes += numbers >= 10**digits
        ends = np.cumsum(sizes)
        blob = np.empty(int(ends[-1]) if ends.size else 0, np.uint8)
        for start in range(0, numbers.size, _BLOCK):
            some = slice(start, start + _BLOCK)
            left, at, more = numbers[some].copy(), ends[some] - 1, sizes[some].copy()
            while left.size:
                blob[at] = left % 10 + 48
                going = np.flatnonzero(more > 1)
                left, at, more = left[going] // 10, at[going] - 1, more[going] - 1
        return cls(blob.tobytes(), sizes)

    @property
    def blob(self) -> bytes:
        return self._blob

    @property
    def lengths(self) -> Integers:
        """int64[n], bytes of each string."""
        return np.diff(self._bounds)

    @property
    def octets(self) -> npt.NDArray[np.uint8]:
        """uint8[bytes], the blob without a copy."""
        return np.frombuffer(self._blob, dtype=np.uint8)

    @property
    def octet_pieces(self) -> Sequence[npt.NDArray[np.uint8]]:
        """The blob in consecutive pieces, uint8[…] each, without a copy."""
        return (self.octets,)

    @property
    def sizes(self) -> npt.NDArray[Any]:
        """`lengths` in the integer type that they are held in."""
        return self.lengths

    def offsets(self, indices: Integers) -> Integers:
        """Return where in the blob the strings at these indices begin; index n is its end."""
        return self._bounds[indices]

    def replace_runs(
        self, firsts: Integers, ends: Integers, counts: Integers, new: StringColumn
    ) -> StringColumn:
        """Return the column with the strings of `new`, all in their order, in place of others. Runs [r], in
        order and disjoint: from `firsts` up to `ends`, each replaced by `counts` strings."""
        old, more, sizes, added = self.octets, new.octets, self.sizes, narrow_integers(new.sizes)
        starts, stops = self.offsets(firsts).tolist(), self.offsets(ends).tolist()
        cuts = np.concatenate(([0], np.cumsum(counts)))
        edges = new.offsets(cuts).tolist()
        at, byte, text, numbers = 0, 0, [], []
        for run, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            text += [old[byte : starts[run]], more[edges[run] : edges[run + 1]]]
            numbers += [sizes[at:first], added[cuts[run] : cuts[run + 1]]]
            at, byte = end, stops[run]
        return self._splice([*text, old[byte:]], np.concatenate([*numbers, sizes[at:]]))

    @staticmethod
    def _splice(pieces: Sequence[npt.NDArray[np.uint8]], sizes: npt.NDArray[Any]) -> StringColumn:
        return StringColumn(b"".join(piece.data for piece in pieces), sizes.astype(np.int64))

    def __len__(self) -> int:
        return self._bounds.size - 1

    def __getitem__(self, index: int) -> str:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"string {index} of {count}")
        index = int(index) % count
        start, end = self._bounds[index : index + 2].tolist()
        return self._blob[start:end].decode()

    def __iter__(self) -> Iterator[str]:
        bounds = self._bounds.tolist()
        blob = self._blob
        return (blob[start:end].decode() for start, end in itertools.pairwise(bounds))

    def take_rows(self, indices: Integers) -> list[str]:
        """Return the strings at these indices, in the order given."""
        starts, ends = self._bounds[indices].tolist(), self._bounds[indices + 1].tolist()
        return [self._blob[start:end].decode() for start, end in zip(starts, ends, strict=True)]

    def find_last(self, text: str) -> int | None:
        """Return the last index of `text`, or None. Searches the blob, which takes a few microseconds for
        the names of a shard.
        """
        wanted = text.encode(errors="replace")
        if not wanted:
            empty = np.flatnonzero(self._bounds[1:] == self._bounds[:-1])
            return int(empty[-1]) if empty.size else None
        end = len(self._blob)
        while (start := self._blob.rfind(wanted, 0, end)) >= 0:
            index = int(np.searchsorted(self._bounds, start, side="right")) - 1
            if self._bounds[index] == start and self._bounds[index + 1] == start + len(wanted):
                return index
            end = start + len(wanted) - 1
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringColumn):
            return NotImplemented
        return self._blob == other._blob and np.array_equal(self._bounds, other._bounds)

    __hash__ = None  # type: ignore[assignment]  # compared by content, which may be large: never a key

    def __repr__(self) -> str:
        return f"StringColumn(n={len(self)}, bytes={len(self._blob)})"


class StoredStrings(StringColumn):
    """Strings in the memory of a document: takes an eighth of a byte for each."""

    __slots__ = ("_marks", "_sizes", "_text")

    def __init__(self, text: npt.NDArray[np.uint8], sizes: npt.NDArray[Any]) -> None:
        """`text`: all strings; `sizes`: bytes of each, integers [n] of any width. Raises ColumnError as
        `StringColumn` does."""
        self._text, self._sizes = text, sizes
        if (text.size and int(text.max()) >= _NOT_ASCII) or int(sizes.sum(dtype=np.int64)) != text.size:
            StringColumn(text.tobytes(), sizes.astype(np.int64))  # raises ColumnError
        self._marks = _marks(sizes)

    @property
    def _blob(self) -> bytes:  # type: ignore[override]
        return self.octets.tobytes()

    @property
    def _bounds(self) -> Integers:  # type: ignore[override]
        return np.concatenate(([0], np.cumsum(self._sizes, dtype=np.int64)))

    @property
    def lengths(self) -> Integers:
        return self._sizes.astype(np.int64)

    @property
    def octets(self) -> npt.NDArray[np.uint8]:
        return self._text

    @property
    def sizes(self) -> npt.NDArray[Any]:
        return self._sizes

    def offsets(self, indices: Integers) -> Integers:
        indices = np.asarray(indices, np.int64)
        if not len(self) or indices.size * _RUN > len(self):
            return super().offsets(indices)
        run = indices // _RUN
        places = run[:, None] * _RUN + np.arange(_RUN)
        sizes = self._sizes[np.minimum(places, len(self) - 1)]
        before = np.where(places < indices[:, None], sizes, 0).sum(axis=1, dtype=np.int64)
        found: Integers = self._marks[run] + before
        return found

    @staticmethod
    def _splice(pieces: Sequence[npt.NDArray[np.uint8]], sizes: npt.NDArray[Any]) -> StringColumn:
        return _SplicedStrings(pieces, sizes)

    def __len__(self) -> int:
        return self._sizes.size

    def __getitem__(self, index: int) -> str:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"string {index} of {count}")
        index = int(index) % count
        run = index // _RUN
        start = int(self._marks[run] + self._sizes[run * _RUN : index].sum(dtype=np.int64))
        return self.octets[start : start + int(self._sizes[index])].tobytes().decode()

    def take_rows(self, indices: Integers) -> list[str]:
        indices = np.asarray(indices, np.int64)
        if indices.size * _RUN > len(self):
            return super().take_rows(indices)
        starts = self.offsets(indices)
        ends = starts + self._sizes[indices]
        text = self.octets
        return [
            text[at:end].tobytes().decode() for at, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]


class _SplicedStrings(StoredStrings):
    """Strings whose blob is joined when one of them is first read: those of a snapshot that is only stored
    are copied once, into its document."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[npt.NDArray[np.uint8]], sizes: npt.NDArray[Any]) -> None:
        """`pieces`: each with whole strings of valid columns, whose `sizes` follow one another."""
        self._pieces, self._sizes, self._marks = pieces, sizes, _marks(sizes)

    @property
    def octets(self) -> npt.NDArray[np.uint8]:
        if len(self._pieces) > 1:
            self._pieces = (np.concatenate(self._pieces),)
        return self._pieces[0]

    @property
    def octet_pieces(self) -> Sequence[npt.NDArray[np.uint8]]:
        return self._pieces


def _marks(sizes: npt.NDArray[Any]) -> Integers:
    """Return where each run of strings begins, and where the last one ends: int64[⌈n / _RUN⌉ + 1]."""
    runs = np.add.reduceat(sizes, np.arange(0, sizes.size, _RUN), dtype=np.int64) if sizes.size else sizes
    found: Integers = np.concatenate(([0], np.cumsum(runs, dtype=np.int64)))
    return found


def narrow_integers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert integers of 0 and above to the narrowest of U8, U16, U32, I64 that holds them, and others to
    I64; `values` themselves if they have that type."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low >= 0:
        for dtype, limit in _NARROW:
            if high < limit:
                return values.astype(dtype, copy=False)
    return values.astype(np.int64, copy=False)


def _join_short(pieces: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return these pieces with runs of short ones joined."""
    found: list[Buffer] = []
    for long, group in itertools.groupby(pieces, lambda piece: len(piece) >= _LONG_PIECE):
        run = list(group)
        found += run if long else [b"".join(run)]
    return found


class ColumnWriter:
    """Collects columns and encodes the document: its kind, version and metadata, then the arrays in the
    order added.
    """

    def __init__(self, kind: str, version: int, metadata: Mapping[str, str]) -> None:
        self._metadata = {**metadata, "format": kind, "version": str(version)}
        self._arrays: dict[str, Sequence[npt.NDArray[Any]]] = {}  # each in consecutive pieces

    def add_integers(self, name: str, values: npt.NDArray[Any]) -> None:
        self._arrays[name] = (narrow_integers(values),)

    def add_strings(self, name: str, column: StringColumn) -> None:
        self._arrays[f"{name}.data"] = column.octet_pieces
        self.add_integers(f"{name}.lengths", column.sizes)

    def add_bytes(self, name: str, values: bytes) -> None:
        self._arrays[name] = (np.frombuffer(values, dtype=np.uint8),)

    def to_bytes(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Sequence[Buffer]:
        """Return the document in consecutive pieces, the long ones without a copy of the columns: a document
        is large, and new memory costs as much as what is written to it."""
        described = [
            (name, pieces[0].dtype, (sum(piece.size for piece in pieces),))
            for name, pieces in self._arrays.items()
        ]
        frame = frame_layout(described, dict(sorted(self._metadata.items())), checksums=False)
        pieces: list[Buffer] = [frame.header]
        at = len(frame.header)
        for name, slot in frame.tensors.items():
            pieces += [bytes(slot.offset - at)]
            pieces += [np.ascontiguousarray(piece).view(np.uint8).data for piece in self._arrays[name]]
            at = slot.offset + slot.nbytes
        return _join_short(pieces)


class ColumnReader:
    """Reads a document written by ColumnWriter. Every method raises ColumnError for what is missing or
    malformed.
    """

    def __init__(self, document: Buffer, kind: str, *versions: int) -> None:
        """`versions`: those that the caller understands; `version` is the document's."""
        try:
            header = parse_frame_header(document)
            self._arrays = tensor_views(document, header)
        except FrameError as error:
            raise ColumnError(f"not a {kind} document: {error}") from error
        if header.size != len(document):
            raise ColumnError(f"the {kind} document has {len(document)} bytes instead of {header.size}")
        self.metadata = header.metadata
        if self.metadata.get("format") != kind:
            raise ColumnError(f"not a {kind} document")
        found = [version for version in versions if self.metadata.get("version") == str(version)]
        if not found:
            raise ColumnError(
                f"the {kind} document does not have version {' or '.join(map(str, versions))}; another "
                "release wrote it"
            )
        self.version = found[0]

    def read_text(self, name: str) -> str:
        if name not in self.metadata:
            raise ColumnError(f"the document lacks {name!r}")
        return self.metadata[name]

    def read_integers(self, name: str, *, low: int, high: int, count: int | None = None) -> Integers:
        """Return int64[n] (a copy) with all values in [low, high], and n equal to `count` if that is given.
        Raises ColumnError."""
        return self.view_integers(name, low=low, high=high, count=count).astype(np.int64)

    def has_column(self, name: str) -> bool:
        """Return whether the document has a column of integers with this name."""
        return name in self._arrays

    def view_integers(self, name: str, *, low: int, high: int, count: int | None = None) -> npt.NDArray[Any]:
        """Return integers as `read_integers` does, but as they are stored, in the memory of the document."""
        values = self._array(name)
        most = _INTEGERS.get(values.dtype)
        if most is None:
            raise ColumnError(f"the column {name!r} does not contain integers")
        if count is not None and values.size != count:
            raise ColumnError(f"the column {name!r} has {values.size} values instead of {count}")
        # Only what the type allows has to be looked at.
        small = values.size and (low > 0 or values.dtype == np.int64) and int(values.min()) < low
        if small or (values.size and most > high and int(values.max()) > high):
            raise ColumnError(f"a value of the column {name!r} is outside {low}…{high}")
        return values

    def view_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Return bytes, uint8[n], in the memory of the document."""
        blob = self._array(name)
        if blob.dtype != np.uint8:
            raise ColumnError(f"the column {name!r} does not contain bytes")
        return blob

    def read_bytes(self, name: str) -> bytes:
        return self.view_bytes(name).tobytes()

    def read_strings(self, name: str) -> StringColumn:
        blob = self.read_bytes(f"{name}.data")
        return StringColumn(blob, self.read_integers(f"{name}.lengths", low=0, high=len(blob)))

    def view_strings(self, name: str) -> StringColumn:
        """Return strings in the memory of the document."""
        text = self.view_bytes(f"{name}.data")
        return StoredStrings(text, self.view_integers(f"{name}.lengths", low=0, high=text.size))

    def _array(self, name: str) -> npt.NDArray[Any]:
        array = self._arrays.get(name)
        if array is None or array.ndim != 1:
            raise ColumnError(f"the document lacks the column {name!r}")
        return array
