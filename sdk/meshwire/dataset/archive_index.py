"""Indexes of tar shards and archives: where each member's bytes are, and which members form a sample.

Law: an index is built once per content; afterwards a member is read by offset, never by a scan. Offsets
refer to the object itself or, if that is compressed, to its decompressed copy.
Invariant: a sample has at most one member per extension (of duplicates the last, as when unpacking a tar).
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np

from meshwire.dataset.archive_paths import ArchiveKind
from meshwire.dataset.fields import sample_key
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer


_KIND, _VERSION = "shardmesh.shardindex", 1
MAX_BYTES = 1 << 60  # of an object, so that the sum of two fits into int64
FILE_TYPES = ("0", "", "7")  # ustar's regular file, its older code, and a contiguous file


class Member(Protocol):
    """The attributes of a `meshwire.formats.tar.TarMember` that an index needs."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def data_offset(self) -> int: ...
    @property
    def type(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """The files of a tar, in tar order: `names`; `offsets` and `sizes` of their data (int64[M], bytes from
    the start of the tar); `extension` (int64[M], into `extensions`); `sample` (int64[M], 0…samples−1, −1
    for a file that belongs to no sample).
    """

    names: StringColumn
    offsets: Integers
    sizes: Integers
    extensions: tuple[str, ...]
    extension: Integers
    sample: Integers
    samples: int

    def find(self, name: str) -> tuple[int, int] | None:
        """Return (offset, size) of the data of a file in bytes, or None if the tar has no such file."""
        index = self.names.find_last(name)
        return None if index is None else (int(self.offsets[index]), int(self.sizes[index]))

    def members_with(self, wanted: Sequence[str]) -> Integers:
        """int64[samples]: for each sample, the file with the first of the `wanted` extensions that it has;
        −1 for none.
        """
        result = np.full(self.samples, -1, dtype=np.int64)
        for ext in reversed(wanted):
            if ext in self.extensions:
                hits = np.flatnonzero((self.extension == self.extensions.index(ext)) & (self.sample >= 0))
                result[self.sample[hits]] = hits
        return result

    def stems(self) -> list[str]:
        """Return the names of the samples, such as `a/b/0001`."""
        owned = np.flatnonzero(self.sample >= 0)
        _, firsts = np.unique(self.sample[owned], return_index=True)
        return [sample_key(name)[0] for name in self.names.take_rows(owned[firsts])]

    def to_bytes(self) -> bytes:
        """Encode the document; equal indexes have equal bytes."""
        writer = ColumnWriter(_KIND, _VERSION, self.metadata())
        self.write_columns(writer)
        return writer.to_bytes()

    def metadata(self) -> dict[str, str]:
        """Return the metadata for a document that contains this index."""
        return {"samples": str(self.samples)}

    def write_columns(self, writer: ColumnWriter) -> None:
        """Add the columns to a document whose metadata includes `metadata()`."""
        writer.add_strings("names", self.names)
        writer.add_strings("extensions", StringColumn.from_strings(self.extensions))
        writer.add_integers("offsets", self.offsets)
        writer.add_integers("sizes", self.sizes)
        writer.add_integers("extension", self.extension)
        writer.add_integers("sample", self.sample + 1)

    @classmethod
    def from_bytes(cls, document: Buffer) -> ShardIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        return cls.read_columns(ColumnReader(document, _KIND, _VERSION))

    @classmethod
    def read_columns(cls, reader: ColumnReader) -> ShardIndex:
        """Read the index from the columns of a document. Raises ColumnError."""
        names = reader.read_strings("names")
        extensions = tuple(reader.read_strings("extensions"))
        count = len(names)
        sample = reader.read_integers("sample", low=0, high=count, count=count) - 1
        found = np.unique(sample[sample >= 0])
        if reader.read_text("samples") != str(found.size) or (
            found.size and int(found[-1]) != found.size - 1
        ):
            raise ColumnError("the shard index does not number its samples from 0 without gaps")
        return cls(
            names,
            reader.read_integers("offsets", low=0, high=MAX_BYTES, count=count),
            reader.read_integers("sizes", low=0, high=MAX_BYTES, count=count),
            extensions,
            reader.read_integers("extension", low=0, high=max(len(extensions) - 1, 0), count=count),
            sample,
            int(found.size),
        )

    def __repr__(self) -> str:
        return f"ShardIndex(files={len(self.names)}, samples={self.samples})"


def index_tar(members: Iterable[Member]) -> ShardIndex:
    """Build the index of a tar's members, as `scan_tar` yields them. Directories, links and the like are
    skipped.

    Files are grouped by WebDataset's naming rule wherever in the tar they are; names without an extension,
    and WebDataset's own `__name__` files, belong to no sample. Raises whatever `members` raises.
    """
    grouping = _Grouping()
    for member in members:
        if member.type in FILE_TYPES:
            grouping.add(member.name, member.data_offset, member.size)
    return grouping.index()


class _Grouping:
    """Collects files with the sample and extension of each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.places: list[tuple[int, int]] = []
        self.extensions: dict[str, int] = {}
        self.extension: list[int] = []
        self.sample: list[int] = []
        self.samples: dict[str, int] = {}
        self.latest: dict[tuple[int, int], int] = {}  # (sample, extension) → file

    def add(self, name: str, offset: int, size: int) -> None:
        stem, ext = sample_key(name)
        number = self.extensions.setdefault(ext, len(self.extensions))
        base = stem[stem.rfind("/") + 1 :]
        in_sample = ext and not (base.startswith("__") and base.endswith("__"))
        sample = self.samples.setdefault(stem, len(self.samples)) if in_sample else -1
        if sample >= 0:
            doubled = self.latest.get((sample, number))
            if doubled is not None:
                self.sample[doubled] = -1
            self.latest[sample, number] = len(self.names)
        self.names.append(name)
        self.places.append((offset, size))
        self.extension.append(number)
        self.sample.append(sample)

    def index(self) -> ShardIndex:
        places = np.array(self.places, dtype=np.int64).reshape(-1, 2)
        return ShardIndex(
            StringColumn.from_strings(self.names),
            places[:, 0].copy(),
            places[:, 1].copy(),
            tuple(self.extensions),
            np.array(self.extension, dtype=np.int64),
            np.array(self.sample, dtype=np.int64),
            len(self.samples),
        )


_ARCHIVE_KIND, _ARCHIVE_VERSION = "shardmesh.archive", 1
_LINEAR_SEARCH_LIMIT = 2000  # up to this many names a linear search takes microseconds
_KINDS = {str(kind): kind for kind in get_args(ArchiveKind)}


@dataclass(frozen=True, eq=False)
class ArchiveIndex:
    """The index of an archive: `files` in stored order. With `inflated`, offsets refer to a decompressed
    copy of `size` bytes instead of the object; for a tar that copy is the tar, for a zip its files one
    after the other.
    """

    kind: ArchiveKind
    files: ShardIndex
    size: int
    inflated: bool

    def __post_init__(self) -> None:
        if (self.files.offsets + self.files.sizes > self.size).any():
            raise ColumnError(f"a file extends beyond the {self.size} bytes of the archive")

    @property
    def names(self) -> StringColumn:
        return self.files.names

    @property
    def sizes(self) -> Integers:
        """int64[n], bytes."""
        return self.files.sizes

    @property
    def offsets(self) -> Integers:
        """int64[n], bytes."""
        return self.files.offsets

    @cached_property
    def ordered(self) -> tuple[list[str], list[int]]:
        """The unique names in sorted order, and the file number of each: the last of duplicates."""
        last = {name: number for number, name in enumerate(self.names)}
        names = sorted(last)
        return names, [last[name] for name in names]

    def __len__(self) -> int:
        return len(self.files.names)

    def find(self, name: str) -> tuple[int, int] | None:
        """Return (offset, size) of the bytes of a file, the last of duplicate names, or None if there is no
        such file."""
        if len(self) < _LINEAR_SEARCH_LIMIT:
            return self.files.find(name)
        sums, numbers = self._hashed
        wanted = zlib.crc32(name.encode(errors="replace"))
        first, end = np.searchsorted(sums, wanted, "left"), np.searchsorted(sums, wanted, "right")
        found = [number for number in numbers[first:end].tolist() if self.names[number] == name]
        return (int(self.offsets[found[-1]]), int(self.sizes[found[-1]])) if found else None

    def prepare(self) -> None:
        """Build the lookup table now instead of in the first `find`; it takes a second for a million
        files."""
        if len(self) >= _LINEAR_SEARCH_LIMIT:
            _ = self._hashed

    @cached_property
    def _hashed(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
        """The sorted checksums of all names, and the file number of each."""
        blob, ends = memoryview(self.names.blob), np.cumsum(self.names.lengths).tolist()
        sums = np.fromiter(
            (zlib.crc32(blob[start:end]) for start, end in itertools.pairwise([0, *ends])),
            np.uint32,
            len(self),
        )
        order = np.argsort(sums, kind="stable")
        return sums[order], order

    def to_bytes(self) -> bytes:
        """Encode the document; equal indexes have equal bytes."""
        facts = {"kind": self.kind, "size": str(self.size), "inflated": str(int(self.inflated))}
        writer = ColumnWriter(_ARCHIVE_KIND, _ARCHIVE_VERSION, facts | self.files.metadata())
        self.files.write_columns(writer)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> ArchiveIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _ARCHIVE_KIND, _ARCHIVE_VERSION)
        kind, size = _KINDS.get(reader.read_text("kind")), reader.read_text("size")
        if kind is None or not (size.isascii() and size.isdigit() and len(size) < 20):
            raise ColumnError("the archive index has no valid kind or size")
        if int(size) > MAX_BYTES:
            raise ColumnError("the archive index has an impossible size")
        return cls(kind, ShardIndex.read_columns(reader), int(size), reader.read_text("inflated") == "1")

    def __repr__(self) -> str:
        return f"ArchiveIndex({self.kind}, files={len(self)}, size={self.size}, inflated={self.inflated})"
