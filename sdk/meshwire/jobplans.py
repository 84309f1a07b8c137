"""The plan of a job that writes archives or files: which files, lying where, go into which output.

Law: a plan is a pure function of the job's layout and the files found; an output's bytes follow from it and
the bytes of its files. Shards of plain objects are those that a view with the same layout shows.
Invariant: every sample is in exactly one output, and its files stay together. Memory: arrays, not objects.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwire.columns import ColumnReader, ColumnWriter, StringColumn
from meshwire.documents import PlanError
from meshwire.fields import sample_key
from meshwire.shardviews import part_of, shard_name, shuffled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from meshwire.frames import Buffer
    from meshwire.shardviews import ShardsView

    Integers = npt.NDArray[np.int64]

MAX_FILES = 10_000_000
_KIND, _VERSION = "job-plan", 1
_MAX_BYTES = 1 << 60


class SourceFile(NamedTuple):
    """A file to be written: `size` bytes at `offset` of source number `source`."""

    name: str
    source: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The objects that hold the bytes. `unpacked`: 1 where not the object itself is read, but what of it was
    unpacked."""

    keys: StringColumn
    etags: StringColumn
    sizes: Integers
    unpacked: Integers


@dataclass(frozen=True, slots=True, eq=False)
class JobPlan:
    """Files in the order in which they are written; output i is called `outputs[i]`, holds the files
    `firsts[i]` to `firsts[i + 1]`, and `samples[i]` samples."""

    sources: Sources
    names: StringColumn
    source: Integers
    offset: Integers
    size: Integers
    outputs: StringColumn
    firsts: Integers
    samples: Integers

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        return f"JobPlan(outputs={len(self)}, files={len(self.names)}, sources={len(self.sources.keys)})"

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return int(self.size.sum())

    def of(self, output: int) -> list[SourceFile]:
        """The files of an output, in order."""
        return self.files(int(self.firsts[output]), int(self.firsts[output + 1]))

    def files(self, first: int, end: int) -> list[SourceFile]:
        """Files `first` to `end`, in order."""
        cut = slice(first, end)
        columns = (self.source[cut].tolist(), self.offset[cut].tolist(), self.size[cut].tolist())
        rows = zip(self.names.take(np.arange(first, end)), *columns, strict=True)
        return [SourceFile(*row) for row in rows]

    def digest_of(self, item: SourceFile) -> str:
        """Of a file that is an output by itself."""
        source = f"{self.sources.etags[item.source]}\0{int(self.sources.sizes[item.source])}"
        text = f"{source}\0{item.offset}\0{item.size}\0{item.name}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def digest(self, output: int, form: str) -> str:
        """Of what an output is made, and as what: 32 hexadecimal digits. Where in its object a file lies
        says which one it is."""
        cut = slice(int(self.firsts[output]), int(self.firsts[output + 1]))
        numbers, within = np.unique(self.source[cut], return_inverse=True)
        hasher = hashlib.sha256(f"{form}\0".encode())
        for etag in self.sources.etags.take(numbers):
            hasher.update(f"{etag}\0".encode())
        names = self.names.take(np.arange(cut.start, cut.stop))
        hasher.update("\0".join(names).encode())
        for column in (within, self.sources.sizes[numbers], self.offset[cut], self.size[cut]):
            hasher.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return hasher.hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The document; equal plans have equal bytes."""
        writer = ColumnWriter(_KIND, _VERSION, {})
        writer.strings("keys", self.sources.keys)
        writer.strings("etags", self.sources.etags)
        writer.integers("sizes", self.sources.sizes)
        writer.integers("unpacked", self.sources.unpacked)
        writer.strings("names", self.names)
        for name in ("source", "offset", "size", "firsts", "samples"):
            writer.integers(name, getattr(self, name))
        writer.strings("outputs", self.outputs)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> JobPlan:
        """The plan of its document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        keys, names, outputs = reader.strings("keys"), reader.strings("names"), reader.strings("outputs")
        found, files, count = len(keys), len(names), len(outputs)
        sources = Sources(
            keys,
            reader.strings("etags"),
            reader.integers("sizes", low=0, high=_MAX_BYTES, count=found),
            reader.integers("unpacked", low=0, high=1, count=found),
        )
        return cls(
            sources,
            names,
            reader.integers("source", low=0, high=max(found - 1, 0), count=files),
            reader.integers("offset", low=0, high=_MAX_BYTES, count=files),
            reader.integers("size", low=0, high=_MAX_BYTES, count=files),
            outputs,
            reader.integers("firsts", low=0, high=files, count=count + 1),
            reader.integers("samples", low=0, high=files, count=count),
        )


class FileList:
    """The files found so far, in stored order."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[Integers] = []
        self._keys: list[tuple[str, str, int, bool]] = []

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<FileList of {len(self)} files in {len(self._keys)} objects>"

    def add(self, key: str, etag: str, size: int, names: Sequence[str], offsets: Integers, sizes: Integers,
            *, unpacked: bool = False) -> None:  # fmt: skip
        """An object and the files in it. Raises PlanError when they become too many."""
        if len(self) + len(names) > MAX_FILES:
            raise PlanError("source", f"more than {MAX_FILES} files: make a job of each of its folders")
        number = np.full(len(names), len(self._keys), dtype=np.int64)
        self._keys.append((key, etag, size, unpacked))
        self._names += names
        self._rows.append(np.stack([number, offsets, sizes]))

    def sources(self) -> Sources:
        keys, etags, sizes, unpacked = zip(*self._keys, strict=True) if self._keys else ((), (), (), ())
        return Sources(
            StringColumn.of(keys),
            StringColumn.of(etags),
            np.array(sizes, dtype=np.int64),
            np.array(unpacked, dtype=np.int64),
        )

    def one_each(self, prefix: str) -> JobPlan:
        """Every file an output of its own, called as it is below `prefix`."""
        outputs = StringColumn.of([prefix + name for name in self._names])
        count = len(self)
        return self._plan(np.arange(count), outputs, np.arange(count + 1), np.ones(count, dtype=np.int64))

    def laid_out(self, layout: ShardsView, prefix: str, ending: str, *, below: str = "") -> JobPlan:
        """The files as shards, called `prefix` name `ending`. A split goes by names with `below` before them:
        by whole keys, where the files are objects."""
        stems, of = self._samples()
        order: list[Integers] = []
        outputs: list[str] = []
        samples: list[int] = []
        weights = np.bincount(of, weights=self._table()[2], minlength=len(stems)).astype(np.int64)
        for part, members in _parts(layout, stems, below):
            chosen = members
            if layout.shuffle is not None:
                chosen = members[shuffled(layout.shuffle, members.size).many(np.arange(members.size))]
            order.append(chosen)
            folder = f"{prefix}{part}/" if part else prefix
            for number, count in enumerate(_filled(layout, weights[chosen])):
                outputs.append(f"{folder}{shard_name(layout, number)}{ending}")
                samples.append(count)
        positions = np.empty(len(stems), dtype=np.int64)
        positions[np.concatenate([np.zeros(0, dtype=np.int64), *order])] = np.arange(len(stems))
        files = np.argsort(positions[of], kind="stable")
        ends = np.searchsorted(positions[of][files], np.cumsum([0, *samples]))
        return self._plan(files, StringColumn.of(outputs), ends, np.array(samples, dtype=np.int64))

    def _samples(self) -> tuple[list[str], Integers]:
        """(stems in order of their first files, the sample of each file)."""
        stems: dict[str, int] = {}
        of = np.fromiter(
            (stems.setdefault(sample_key(name)[0], len(stems)) for name in self._names),
            dtype=np.int64,
            count=len(self),
        )
        return list(stems), of

    def require_distinct(self) -> None:
        """Raises PlanError for a name that stands twice."""
        seen: dict[str, int] = {}
        for index, name in enumerate(self._names):
            other = seen.setdefault(name, index)
            if other != index:
                sources = self._table()[0]
                first, second = (self._keys[int(sources[place])][0] for place in (other, index))
                raise PlanError(
                    "names",
                    f"{name!r} is in {first} and in {second}; with names = archive they are kept apart",
                )

    def _table(self) -> Integers:
        empty = np.zeros((3, 0), dtype=np.int64)
        table: Integers = np.concatenate([empty, *self._rows], axis=1)
        self._rows = [table]
        return table

    def _plan(self, files: Integers, outputs: StringColumn, firsts: Integers, samples: Integers) -> JobPlan:
        source, offset, size = self._table()[:, files]
        names = StringColumn.of([self._names[index] for index in files.tolist()])
        return JobPlan(self.sources(), names, source, offset, size, outputs, firsts.astype(np.int64), samples)


def _parts(layout: ShardsView, stems: Sequence[str], below: str) -> Iterator[tuple[str, Integers]]:
    """(part of the split, its samples in stored order)."""
    if not layout.split:
        yield "", np.arange(len(stems))
        return
    names = [name for name, _ in layout.split]
    of = np.fromiter(
        (names.index(part_of(layout, below + stem)) for stem in stems), dtype=np.int64, count=len(stems)
    )
    for number, name in enumerate(names):
        yield name, np.flatnonzero(of == number)


def _filled(layout: ShardsView, weights: Integers) -> Iterable[int]:
    """Samples a shard, until it has its count, or its size in bytes."""
    if not layout.size:
        whole, rest = divmod(weights.size, layout.count)
        return [layout.count] * whole + ([rest] if rest else [])
    counts: list[int] = []
    count = size = 0
    for weight in weights.tolist():
        count, size = count + 1, size + weight
        if size >= layout.size:
            counts.append(count)
            count = size = 0
    return counts + ([count] if count else [])
