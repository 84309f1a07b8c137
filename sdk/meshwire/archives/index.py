"""The index of an archive: its files, and where the bytes of each lie.

Law: made once per content; afterwards a member is reached by its offset, never by reading through. Offsets
are of the object itself, or, where that is compressed, of its inflated copy.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np

from meshwire.archives.kinds import ArchiveKind
from meshwire.columns import ColumnError, ColumnReader, ColumnWriter
from meshwire.shardindex import MAX_BYTES, ShardIndex

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.columns import Integers, StringColumn
    from meshwire.frames import Buffer

_KIND, _VERSION = "shardmesh.archive", 1
_FEW = 2000  # so many names are searched through in microseconds
_KINDS = {str(kind): kind for kind in get_args(ArchiveKind)}


@dataclass(frozen=True, eq=False)
class ArchiveIndex:
    """`files` in stored order. `inflated`: their offsets are of a copy of `size` bytes, not of the object;
    for a tar that copy is the tar, for a zip its files one after the other.
    """

    kind: ArchiveKind
    files: ShardIndex
    size: int
    inflated: bool

    def __post_init__(self) -> None:
        if (self.files.offsets + self.files.sizes > self.size).any():
            raise ColumnError(f"a file lies beyond the {self.size} bytes of the archive")

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
        """The names in order, each once, and the number of the file of each: of doubled ones the last."""
        last = {name: number for number, name in enumerate(self.names)}
        names = sorted(last)
        return names, [last[name] for name in names]

    def __len__(self) -> int:
        return len(self.files.names)

    def find(self, name: str) -> tuple[int, int] | None:
        """(offset, size) of a file's bytes, of doubled names the last; None when there is no such file."""
        if len(self) < _FEW:
            return self.files.find(name)
        sums, numbers = self._hashed
        wanted = zlib.crc32(name.encode(errors="replace"))
        first, end = np.searchsorted(sums, wanted, "left"), np.searchsorted(sums, wanted, "right")
        found = [number for number in numbers[first:end].tolist() if self.names[number] == name]
        return (int(self.offsets[found[-1]]), int(self.sizes[found[-1]])) if found else None

    def prepare(self) -> None:
        """Do now what the first `find` would do: a second for a million files."""
        if len(self) >= _FEW:
            _ = self._hashed

    @cached_property
    def _hashed(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
        """The checksums of all names in order, and whose each is."""
        blob, ends = memoryview(self.names.blob), np.cumsum(self.names.lengths).tolist()
        sums = np.fromiter(
            (zlib.crc32(blob[start:end]) for start, end in itertools.pairwise([0, *ends])),
            np.uint32,
            len(self),
        )
        order = np.argsort(sums, kind="stable")
        return sums[order], order

    def to_bytes(self) -> bytes:
        """The document; equal indexes have equal bytes."""
        facts = {"kind": self.kind, "size": str(self.size), "inflated": str(int(self.inflated))}
        writer = ColumnWriter(_KIND, _VERSION, facts | self.files.facts())
        self.files.write(writer)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> ArchiveIndex:
        """The index of its document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        kind, size = _KINDS.get(reader.text("kind")), reader.text("size")
        if kind is None or not (size.isascii() and size.isdigit() and len(size) < 20):
            raise ColumnError("the archive's index names neither its kind nor its size")
        if int(size) > MAX_BYTES:
            raise ColumnError("the archive's index names no possible size")
        return cls(kind, ShardIndex.read(reader), int(size), reader.text("inflated") == "1")

    def __repr__(self) -> str:
        return f"ArchiveIndex({self.kind}, files={len(self)}, size={self.size}, inflated={self.inflated})"
