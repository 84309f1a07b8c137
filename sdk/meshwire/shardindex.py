"""The index of a tar shard: where each member lies, and which members make a sample.

Law: built once on ingest from the headers; afterwards a member is reached by offset, never by reading through
the tar. Invariant: a sample holds at most one member an extension (of doubled ones the last, as when a tar is
unpacked).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwire.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.fields import sample_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meshwire.columns import Integers
    from meshwire.frames import Buffer

CONTENT_TYPE = "application/vnd.shardmesh.shardindex"
_KIND, _VERSION = "shardmesh.shardindex", 1
MAX_BYTES = 1 << 60  # of an object: sums of two stay within int64
FILE_TYPES = ("0", "", "7")  # ustar's regular file, its old spelling, and a contiguous one


class Member(Protocol):
    """What is needed of a `meshwire.tars.TarMember`."""

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
    """Files in tar order: `names`; `offsets` and `sizes` of their data (int64[M], bytes from the tar's
    start); `extension` (int64[M], into `extensions`); `sample` (int64[M], 0…samples−1, −1 for a file of no
    sample).
    """

    names: StringColumn
    offsets: Integers
    sizes: Integers
    extensions: tuple[str, ...]
    extension: Integers
    sample: Integers
    samples: int

    def find(self, name: str) -> tuple[int, int] | None:
        """(offset, size) of a file's data in bytes; None when the tar has no such file."""
        index = self.names.find_last(name)
        return None if index is None else (int(self.offsets[index]), int(self.sizes[index]))

    def members_with(self, wanted: Sequence[str]) -> Integers:
        """int64[samples]: the file of each sample with the first of the `wanted` extensions it has; −1 for
        none.
        """
        result = np.full(self.samples, -1, dtype=np.int64)
        for ext in reversed(wanted):
            if ext in self.extensions:
                hits = np.flatnonzero((self.extension == self.extensions.index(ext)) & (self.sample >= 0))
                result[self.sample[hits]] = hits
        return result

    def stems(self) -> list[str]:
        """The samples' names, as `a/b/0001`."""
        owned = np.flatnonzero(self.sample >= 0)
        _, firsts = np.unique(self.sample[owned], return_index=True)
        return [sample_key(name)[0] for name in self.names.take(owned[firsts])]

    def to_bytes(self) -> bytes:
        """The document; equal indexes have equal bytes."""
        writer = ColumnWriter(_KIND, _VERSION, self.facts())
        self.write(writer)
        return writer.to_bytes()

    def facts(self) -> dict[str, str]:
        """What a document that holds this says in its metadata."""
        return {"samples": str(self.samples)}

    def write(self, writer: ColumnWriter) -> None:
        """Add the columns to a document whose metadata has `facts`."""
        writer.strings("names", self.names)
        writer.strings("extensions", StringColumn.of(self.extensions))
        writer.integers("offsets", self.offsets)
        writer.integers("sizes", self.sizes)
        writer.integers("extension", self.extension)
        writer.integers("sample", self.sample + 1)

    @classmethod
    def from_bytes(cls, document: Buffer) -> ShardIndex:
        """The index of its document. Raises ColumnError for any other bytes."""
        return cls.read(ColumnReader(document, _KIND, _VERSION))

    @classmethod
    def read(cls, reader: ColumnReader) -> ShardIndex:
        """The columns of a document that holds one. Raises ColumnError."""
        names = reader.strings("names")
        extensions = tuple(reader.strings("extensions"))
        count = len(names)
        sample = reader.integers("sample", low=0, high=count, count=count) - 1
        found = np.unique(sample[sample >= 0])
        if reader.text("samples") != str(found.size) or (found.size and int(found[-1]) != found.size - 1):
            raise ColumnError("the shard index does not number its samples from 0 on")
        return cls(
            names,
            reader.integers("offsets", low=0, high=MAX_BYTES, count=count),
            reader.integers("sizes", low=0, high=MAX_BYTES, count=count),
            extensions,
            reader.integers("extension", low=0, high=max(len(extensions) - 1, 0), count=count),
            sample,
            int(found.size),
        )

    def __repr__(self) -> str:
        return f"ShardIndex(files={len(self.names)}, samples={self.samples})"


def index_tar(members: Iterable[Member]) -> ShardIndex:
    """The index of a tar's members, as `tars.scan` yields them. Directories, links and the like are passed
    over.

    Files are grouped by WebDataset's naming rule wherever in the tar they stand; names without an extension,
    and WebDataset's own `__name__` files, belong to no sample. Raises what `members` raises.
    """
    grouping = _Grouping()
    for member in members:
        if member.type in FILE_TYPES:
            grouping.add(member.name, member.data_offset, member.size)
    return grouping.index()


class _Grouping:
    """Files so far, with the sample and extension of each."""

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
        sample = self.samples.setdefault(stem, len(self.samples)) if _in_sample(stem, ext) else -1
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
            StringColumn.of(self.names),
            places[:, 0].copy(),
            places[:, 1].copy(),
            tuple(self.extensions),
            np.array(self.extension, dtype=np.int64),
            np.array(self.sample, dtype=np.int64),
            len(self.samples),
        )


def _in_sample(stem: str, ext: str) -> bool:
    base = stem[stem.rfind("/") + 1 :]
    return bool(ext) and not (base.startswith("__") and base.endswith("__"))
