"""Plans of jobs that write archives or files: which files, at which offsets, go into which output.

Law: a plan is a pure function of the job's layout and the files found; an output's bytes follow from it and
the files' bytes. Shards of plain objects equal those of a view with the same layout.
Invariant: every sample is in exactly one output, and its files stay together. Memory: arrays, not objects.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwire.dataset.archive_paths import archive_stem
from meshwire.dataset.expression_parser import parse_expression, sort_key
from meshwire.dataset.fields import sample_key
from meshwire.frame.columns import ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import PlanError
from meshwire.views.sample_groups import Evaluation, Sample
from meshwire.views.shard_view import FolderNames, shard_name, shuffle_permutation, split_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from meshwire.formats.shard_encoding import SourceObject
    from meshwire.frame.tensor_frame import Buffer
    from meshwire.views.shard_view import ShardsView

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
class SourceTable:
    """The objects that hold the bytes. `unpacked`: 1 if the decompressed copy is read instead of the object
    itself."""

    keys: StringColumn
    etags: StringColumn
    sizes: Integers
    unpacked: Integers


@dataclass(frozen=True, slots=True, eq=False)
class JobPlan:
    """Files in the order in which they are written; output i is named `outputs[i]` and holds the files
    `firsts[i]` to `firsts[i + 1]` with `samples[i]` samples."""

    sources: SourceTable
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

    def files_of_output(self, output: int) -> list[SourceFile]:
        """Return the files of an output, in order."""
        return self.files(int(self.firsts[output]), int(self.firsts[output + 1]))

    def files(self, first: int, end: int) -> list[SourceFile]:
        """Return files `first` to `end`, in order."""
        cut = slice(first, end)
        columns = (self.source[cut].tolist(), self.offset[cut].tolist(), self.size[cut].tolist())
        rows = zip(self.names.take_rows(np.arange(first, end)), *columns, strict=True)
        return [SourceFile(*row) for row in rows]

    def file_digest(self, item: SourceFile) -> str:
        """Return the digest of a file that is an output by itself."""
        source = f"{self.sources.etags[item.source]}\0{int(self.sources.sizes[item.source])}"
        text = f"{source}\0{item.offset}\0{item.size}\0{item.name}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def output_digest(self, output: int, form: str) -> str:
        """Return a digest of an output's inputs and format, 32 hexadecimal digits. A file is identified by
        its position in its object."""
        cut = slice(int(self.firsts[output]), int(self.firsts[output + 1]))
        numbers, within = np.unique(self.source[cut], return_inverse=True)
        hasher = hashlib.sha256(f"{form}\0".encode())
        for etag in self.sources.etags.take_rows(numbers):
            hasher.update(f"{etag}\0".encode())
        names = self.names.take_rows(np.arange(cut.start, cut.stop))
        hasher.update("\0".join(names).encode())
        for column in (within, self.sources.sizes[numbers], self.offset[cut], self.size[cut]):
            hasher.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return hasher.hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """Encode the document; equal plans have equal bytes."""
        writer = ColumnWriter(_KIND, _VERSION, {})
        writer.add_strings("keys", self.sources.keys)
        writer.add_strings("etags", self.sources.etags)
        writer.add_integers("sizes", self.sources.sizes)
        writer.add_integers("unpacked", self.sources.unpacked)
        writer.add_strings("names", self.names)
        for name in ("source", "offset", "size", "firsts", "samples"):
            writer.add_integers(name, getattr(self, name))
        writer.add_strings("outputs", self.outputs)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> JobPlan:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        keys, names, outputs = (
            reader.read_strings("keys"),
            reader.read_strings("names"),
            reader.read_strings("outputs"),
        )
        found, files, count = len(keys), len(names), len(outputs)
        sources = SourceTable(
            keys,
            reader.read_strings("etags"),
            reader.read_integers("sizes", low=0, high=_MAX_BYTES, count=found),
            reader.read_integers("unpacked", low=0, high=1, count=found),
        )
        return cls(
            sources,
            names,
            reader.read_integers("source", low=0, high=max(found - 1, 0), count=files),
            reader.read_integers("offset", low=0, high=_MAX_BYTES, count=files),
            reader.read_integers("size", low=0, high=_MAX_BYTES, count=files),
            outputs,
            reader.read_integers("firsts", low=0, high=files, count=count + 1),
            reader.read_integers("samples", low=0, high=files, count=count),
        )


class FileList:
    """Collects files in stored order. `archives`: the files are archive members, and are kept apart by
    archive."""

    def __init__(self, *, archives: bool = False) -> None:
        self.archives = archives
        self._names: list[str] = []
        self._rows: list[Integers] = []
        self._objects: list[_Object] = []

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<FileList of {len(self)} files in {len(self._objects)} objects>"

    def add(
        self,
        source: SourceObject,
        names: Sequence[str],
        offsets: Integers,
        sizes: Integers,
        *,
        unpacked: bool = False,
    ) -> None:
        """Add an object and the files in it. Raises PlanError if there are too many files."""
        if len(self) + len(names) > MAX_FILES:
            raise PlanError("source", f"more than {MAX_FILES} files; create one job per folder")
        number = np.full(len(names), len(self._objects), dtype=np.int64)
        self._objects.append(_Object(source, unpacked))
        self._names += names
        self._rows.append(np.stack([number, offsets, sizes]))

    def plan_file_outputs(self, prefix: str) -> JobPlan:
        """Plan every file as an output of its own, with its name below `prefix`. Raises PlanError for
        duplicate names."""
        self._samples()
        outputs = StringColumn.from_strings([prefix + name for name in self._names])
        count = len(self)
        return self._plan(np.arange(count), outputs, np.arange(count + 1), np.ones(count, dtype=np.int64))

    def plan_shards(
        self,
        layout: ShardsView,
        prefix: str,
        ending: str,
        *,
        below: str = "",
        evaluation: Evaluation | None = None,
    ) -> JobPlan:
        """Plan the files as shards, each named `prefix`, shard name, `ending`. Expressions see sample names
        prefixed with `below`, so that they are whole keys if the files are objects. Raises PlanError."""
        stems, of = self._samples()
        sizes = np.bincount(of, weights=self._table()[2], minlength=len(stems)).astype(np.int64)
        order: list[Integers] = [np.zeros(0, dtype=np.int64)]
        outputs: list[str] = []
        samples: list[int] = []
        for folder, members in self._folders(layout, stems, of, below, evaluation):
            chosen = members
            if layout.shuffle is not None:
                chosen = members[
                    shuffle_permutation(layout.shuffle, members.size).samples_at(np.arange(members.size))
                ]
            order.append(chosen)
            for number, count in enumerate(_fill_shards(layout, sizes[chosen])):
                outputs.append(f"{prefix}{folder}{shard_name(layout, number)}{ending}")
                samples.append(count)
        taken = np.concatenate(order)
        positions = np.full(len(stems), len(stems), dtype=np.int64)
        positions[taken] = np.arange(taken.size)
        files = np.argsort(positions[of], kind="stable")
        ends = np.searchsorted(positions[of][files], np.cumsum([0, *samples]))
        files = files[: ends[-1]]
        return self._plan(files, StringColumn.from_strings(outputs), ends, np.array(samples, dtype=np.int64))

    def _folders(
        self,
        layout: ShardsView,
        stems: Sequence[str],
        of: Integers,
        below: str,
        evaluation: Evaluation | None,
    ) -> Iterator[tuple[str, Integers]]:
        """Yield (folder of shards, its samples in order)."""
        if not (layout.where or layout.group or layout.sort or layout.split_by):
            yield from _parts(layout, stems, below)
            return
        evaluation = evaluation or Evaluation()
        chosen = list(enumerate(self._describe_samples(stems, of, below)))
        if layout.where:
            where = parse_expression(layout.where, "where")
            chosen = [(number, item) for number, item in chosen if evaluation.evaluate(where, item)]
        if layout.sort:
            sort = parse_expression(layout.sort, "sort")
            chosen.sort(key=lambda pair: sort_key(evaluation.evaluate(sort, pair[1])))
        homes, found = FolderNames(layout, evaluation), dict[str, list[int]]()
        for number, item in chosen:
            found.setdefault(homes.folder_of(item), []).append(number)
        for folder, numbers in found.items():
            yield folder, np.array(numbers, dtype=np.int64)

    def _describe_samples(self, stems: Sequence[str], of: Integers, below: str) -> Iterator[Sample]:
        """Yield the samples as expressions see them."""
        order = np.argsort(of, kind="stable")
        ends = np.searchsorted(of[order], np.arange(len(stems) + 1)).tolist()
        source, offset, size = self._table()
        for number, stem in enumerate(stems):
            files = [
                self._objects[int(source[index])].source._replace(
                    size=int(size[index]),
                    name=self._names[index] if self.archives else "",
                    offset=int(offset[index]),
                )
                for index in order[ends[number] : ends[number + 1]].tolist()
            ]
            yield Sample(below + stem, tuple(files))

    def _samples(self) -> tuple[list[str], Integers]:
        """Return (names of the samples in order of their first files, the sample of each file). If a name
        occurs in several archives, the archive's name is prepended. Raises PlanError for duplicate file
        names."""
        stems: dict[tuple[str, int], int] = {}
        source = self._table()[0].tolist() if self.archives else [0] * len(self)
        of = np.fromiter(
            (
                stems.setdefault((sample_key(name)[0], number), len(stems))
                for name, number in zip(self._names, source, strict=True)
            ),
            dtype=np.int64,
            count=len(self),
        )
        shown = [stem for stem, _ in stems]
        often = Counter(shown)
        if len(often) < len(shown):
            folders = [archive_stem(item.source.key.rpartition("/")[2]) for item in self._objects]
            apart = {
                number: folders[source] for number, (stem, source) in enumerate(stems) if often[stem] > 1
            }
            for number, folder in apart.items():
                shown[number] = f"{folder}/{shown[number]}"
            for index, number in enumerate(of.tolist()):
                if number in apart:
                    self._names[index] = f"{apart[number]}/{self._names[index]}"
        self._require_distinct()
        return shown, of

    def _require_distinct(self) -> None:
        seen: dict[str, int] = {}
        for index, name in enumerate(self._names):
            other = seen.setdefault(name, index)
            if other != index:
                sources = self._table()[0]
                first, second = (self._objects[int(sources[place])].source.key for place in (other, index))
                raise PlanError(
                    "names",
                    f"{name!r} is in both {first} and {second}; set names = archive to keep them apart",
                )

    def _table(self) -> Integers:
        """Return source, offset and size of every file: int64[3, n]."""
        empty = np.zeros((3, 0), dtype=np.int64)
        table: Integers = np.concatenate([empty, *self._rows], axis=1)
        self._rows = [table]
        return table

    def _plan(self, files: Integers, outputs: StringColumn, firsts: Integers, samples: Integers) -> JobPlan:
        source, offset, size = self._table()[:, files]
        names = StringColumn.from_strings([self._names[index] for index in files.tolist()])
        objects = [item.source for item in self._objects]
        sources = SourceTable(
            StringColumn.from_strings([item.key for item in objects]),
            StringColumn.from_strings([item.etag for item in objects]),
            np.array([item.size for item in objects], dtype=np.int64),
            np.array([item.unpacked for item in self._objects], dtype=np.int64),
        )
        return JobPlan(sources, names, source, offset, size, outputs, firsts.astype(np.int64), samples)


class _Object(NamedTuple):
    source: SourceObject
    unpacked: bool


def _parts(layout: ShardsView, stems: Sequence[str], below: str) -> Iterator[tuple[str, Integers]]:
    """Yield (folder of a part of the split, its samples in stored order)."""
    if not layout.split:
        yield "", np.arange(len(stems))
        return
    names = [name for name, _ in layout.split]
    of = np.fromiter(
        (names.index(split_part(layout, below + stem)) for stem in stems), dtype=np.int64, count=len(stems)
    )
    for number, name in enumerate(names):
        yield f"{name}/", np.flatnonzero(of == number)


def _fill_shards(layout: ShardsView, weights: Integers) -> Iterable[int]:
    """Return the number of samples per shard, each filled up to its count or size in bytes."""
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
