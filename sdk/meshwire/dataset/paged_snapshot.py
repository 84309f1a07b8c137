"""Snapshots that consist of pages: a page is the index of one shard, named by the SHA-256 of its bytes.

The document lists the pages, so its size depends on the shards, not on the samples, and snapshots that
contain the same shard share its page.

Law: a snapshot is named by the SHA-256 of its document, which covers source, fields, objects and the hashes
of the pages. A foreign document is validated completely; the pages are validated when they are opened.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.fields import class_name, fields_document, parse_source
from meshwire.dataset.paged_columns import PagedColumn, PagedLabels, Pages
from meshwire.dataset.sample_columns import BytesColumn, LabelColumn
from meshwire.dataset.snapshot import (
    FORMAT,
    MAX_BYTES,
    MAX_SAMPLES,
    PAGED_VERSION,
    Snapshot,
    read_description,
    read_objects,
)
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshwire.dataset.fields import FieldSpec
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.snapshot import (
        ObjectTable,
        SnapshotKind,
    )
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

HASH_BYTES: Final = 32
PAGED_KINDS: Final[tuple[SnapshotKind, ...]] = ("lines", "tar", "tfrecord", "parquet", "mds", "tokens")
BESIDE_KINDS: Final[tuple[SnapshotKind, ...]] = ("mds", "tokens")
TABLE_SLICES: Final = "table-slices"
TABLE_MEMBERS: Final = "table-members"
READABLE: Final = (*PAGED_KINDS, TABLE_SLICES, TABLE_MEMBERS)
"""What nodes say that they read: pages of these kinds, copies of slices of a table, of members of lists."""
"""Kinds whose shards are described by another file."""
_BESIDE: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PageNotes:
    """What the builder of a snapshot is told of a page beyond what the snapshot says. `skipped`: samples left
    out, and the first few `examples` of them with the parts that they lack (−1: the class); `files` of the
    shard, and how many have each of the most frequent extensions; `kinds`: the type of each part of records,
    and `told`: the parts that there are, with their types."""

    skipped: int = 0
    examples: tuple[tuple[str, tuple[int, ...]], ...] = ()
    files: int = 0
    extensions: Mapping[str, int] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a snapshot says of a page. `digest`: SHA-256 of its bytes; `samples`; `totals`: for each part,
    bytes of all samples; `size`: bytes of the object after decompression; `stored`: bytes of the object;
    `classes`: those that the page lists, none if its samples have no class of their own; `beside`: hash of
    what another file says of the shard, "" if no other file does."""

    digest: bytes
    samples: int
    totals: tuple[int, ...]
    size: int
    stored: int
    classes: tuple[str, ...] = ()
    notes: PageNotes = field(default_factory=PageNotes, compare=False)
    beside: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of a snapshot, one for each of its objects: `hashes`, 32 bytes each; `samples`, `stored`
    int64[P] and, for each part, `totals` int64[P]; `beside`: of each page, None if of none; see
    `PageFacts`."""

    hashes: bytes
    samples: Integers
    totals: tuple[Integers, ...]
    stored: Integers
    beside: StringColumn | None = None

    def __len__(self) -> int:
        return self.samples.size

    def hash_of(self, number: int) -> bytes:
        """Return the SHA-256 of a page."""
        return self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    @classmethod
    def from_facts(cls, pages: Sequence[PageFacts]) -> PageTable:
        return cls(
            b"".join(page.digest for page in pages),
            np.array([page.samples for page in pages], np.int64),
            tuple(
                np.array(totals, np.int64) for totals in zip(*(page.totals for page in pages), strict=True)
            ),
            np.array([page.stored for page in pages], np.int64),
            StringColumn.from_strings([page.beside for page in pages]) if pages[0].beside else None,
        )


@dataclass(frozen=True, slots=True)
class PageParts:
    """What the pages of a source contain of each sample. `parts`: the extensions of each part, in order of
    preference, or its name in records; `in_shards`: whether samples of a shard that is in no folder have
    classes, which are their folders within it; `beside` of a page: see `PageFacts`."""

    parts: tuple[tuple[str, ...], ...]
    in_shards: bool
    beside: str = ""

    @classmethod
    def of_fields(cls, kind: SnapshotKind, specs: Mapping[str, FieldSpec]) -> PageParts:
        """Return the parts that fields name."""
        if kind == "lines":
            return LINE_PARTS
        parts = sorted({_part(spec) for spec in specs.values() if spec.kind == "bytes"})
        in_shards = kind == "tar" and any(spec.kind == "label" for spec in specs.values())
        return cls(tuple(parts), in_shards)

    def of_shard(self, key: str, prefix: str | None) -> PageParts:
        """Return what the page of a shard contains, in a source with this prefix."""
        own = self.in_shards and prefix is not None and class_name(key, prefix) is None
        return self if own == self.in_shards else replace(self, in_shards=False)

    def part_of(self, spec: FieldSpec) -> int:
        """Return the number of the part that a field names, −1 for a label."""
        if spec.kind == "label":
            return -1
        return self.parts.index(_part(spec)) if len(self.parts) > 1 else 0


def _part(spec: FieldSpec) -> tuple[str, ...]:
    return spec.ext or (spec.part,)


LINE_PARTS: Final = PageParts(((),), in_shards=False)
"""A line is the only part of a sample."""


class PagedSnapshot(Snapshot):
    """A snapshot that consists of pages: page n is the index of object n, and shard n has its samples."""

    __slots__ = ("_prefix", "pages", "table")

    table: PageTable
    pages: Pages
    _prefix: str | None  # of the source, if samples of shards that are directly in it have own classes

    def __init__(
        self,
        source: str,
        kind: SnapshotKind,
        objects: ObjectTable,
        table: PageTable,
        specs: Mapping[str, FieldSpec],
        labels: Mapping[str, tuple[Integers, Integers, tuple[str, ...]]],
        open_pages: Callable[[PagedSnapshot, Sequence[int]], list[Page]],
    ) -> None:
        """`labels`: by field, the classes of the pages, their bounds, and all classes, see `PagedLabels`;
        `open_pages`: returns pages by their numbers."""
        starts = np.zeros(len(table) + 1, np.int64)
        np.cumsum(table.samples, out=starts[1:])
        pages = Pages(starts, lambda numbers: open_pages(self, numbers))
        parts = PageParts.of_fields(kind, specs)
        fields: dict[str, BytesColumn | LabelColumn] = {}
        for name, spec in specs.items():
            if spec.kind == "label":
                fields[name] = PagedLabels(*labels[name], pages)
                continue
            part = parts.part_of(spec)
            fields[name] = PagedColumn(pages, part, sum(table.totals[part].tolist()))
        prefix = parse_source(source).prefix if parts.in_shards else None
        for name, value in {
            "_prefix": prefix, "source": source, "kind": kind, "objects": objects, "samples": int(starts[-1]),
            "pages": pages, "shard_starts": starts, "fields": fields, "specs": specs, "table": table,
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)
        object.__setattr__(self, "hash", hashlib.sha256(self.to_bytes()).hexdigest())

    @property
    def names(self) -> StringColumn:
        return self.pages.names()

    def names_at(self, samples: Integers) -> StringColumn:
        return StringColumn.from_strings([self.pages.name(sample) for sample in samples.tolist()])

    def sample_name(self, sample: int) -> str:
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of {self.samples}")
        return f"{self.objects.keys[int(self.pages.numbers_of(sample))]}/{self.pages.name(sample)}"

    def facts(self, number: int) -> PageFacts:
        """Return what the snapshot says of a page."""
        table = self.table
        return PageFacts(
            table.hash_of(number),
            int(table.samples[number]),
            tuple(int(totals[number]) for totals in table.totals),
            int(self.objects.sizes[number]),
            int(table.stored[number]),
            self._classes_of(number),
            beside="" if table.beside is None else table.beside[number],
        )

    def _classes_of(self, number: int) -> tuple[str, ...]:
        if self._prefix is None or class_name(self.objects.keys[number], self._prefix) is not None:
            return ()
        label = next(column for column in self.fields.values() if isinstance(column, PagedLabels))
        own = label.of_pages[int(label.bounds[number]) : int(label.bounds[number + 1])]
        return tuple(label.classes[value] for value in own.tolist())

    def parts_of(self, number: int) -> PageParts:
        """Return what a page of the snapshot contains."""
        parts = PageParts.of_fields(self.kind, self.specs).of_shard(self.objects.keys[number], self._prefix)
        return parts if self.table.beside is None else replace(parts, beside=self.table.beside[number])

    def without_pages(self) -> Snapshot:
        """Return the snapshot that has all samples in its document, as earlier releases made it. Opens all
        pages."""
        fields: dict[str, BytesColumn | LabelColumn] = {}
        which = np.repeat(np.arange(len(self.table), dtype=np.int32), self.table.samples)
        for name, column in self.fields.items():
            if isinstance(column, PagedLabels):
                fields[name] = LabelColumn(column.values, column.classes)
            elif isinstance(column, PagedColumn):
                fields[name] = BytesColumn(which, column.offset, column.length)
        return Snapshot.from_parts(
            self.source, self.kind, self.objects, self.shard_starts, fields, self.specs, self.names
        )

    def to_bytes(self) -> bytes:
        described = canonical_json(fields_document(self.specs)).decode()
        metadata = {
            "source": self.source, "bucket": self.objects.bucket, "kind": self.kind, "fields": described
        }  # fmt: skip
        writer = ColumnWriter(FORMAT, PAGED_VERSION, metadata)
        writer.add_strings("objects.keys", self.objects.keys)
        writer.add_strings("objects.etags", self.objects.etags)
        writer.add_integers("objects.sizes", self.objects.sizes)
        writer.add_integers("pages.stored", self.table.stored)
        writer.add_integers("pages.samples", self.table.samples)
        for part, totals in enumerate(self.table.totals):
            writer.add_integers(_totals_name(part), totals)
        writer.add_bytes("pages.hashes", self.table.hashes)
        if self.table.beside is not None:
            writer.add_strings("pages.beside", self.table.beside)
        for name, column in sorted(self.fields.items()):
            if isinstance(column, PagedLabels):
                writer.add_integers(f"fields.{name}.values", column.of_pages)
                if not column.uniform:
                    writer.add_integers(f"fields.{name}.counts", np.diff(column.bounds))
                writer.add_strings(f"fields.{name}.classes", StringColumn.from_strings(column.classes))
        return writer.to_bytes()

    def document_pieces(self) -> Sequence[Buffer]:
        return (self.to_bytes(),)

    def __repr__(self) -> str:
        count = f"samples={self.samples}, pages={len(self.table)}"
        return f"PagedSnapshot({self.hash[:12]}, {self.source!r}, {count})"


def read_snapshot(
    document: Buffer, open_pages: Callable[[PagedSnapshot, Sequence[int]], list[Page]], digest: str = ""
) -> Snapshot:
    """Decode a snapshot document of any version. `digest`: its SHA-256 in hex, where that is known. Raises
    ColumnError for any other bytes."""
    reader = ColumnReader(document, FORMAT, 1, PAGED_VERSION)
    if reader.version != PAGED_VERSION:
        return Snapshot.from_bytes(document, digest)
    kind: Any = reader.read_text("kind")
    if kind not in PAGED_KINDS:
        raise ColumnError(f"a snapshot of the kind {kind[:60]!r} has no pages")
    source, specs = read_description(reader)
    objects = read_objects(reader)
    parts = PageParts.of_fields(kind, specs)
    table = _read_table(reader, objects, len(parts.parts), beside=kind in BESIDE_KINDS)
    labels = {
        name: _read_label(reader, name, len(table)) for name, spec in specs.items() if spec.kind == "label"
    }
    found = PagedSnapshot(source, kind, objects, table, specs, labels, open_pages)
    if found.hash != hashlib.sha256(document).hexdigest():  # it has other columns, or wider ones
        raise ColumnError("the document of the snapshot is not written as it has to be")
    return found


def _totals_name(part: int) -> str:
    return f"pages.totals.{part}" if part else "pages.totals"


def _read_label(reader: ColumnReader, name: str, pages: int) -> tuple[Integers, Integers, tuple[str, ...]]:
    classes = tuple(reader.read_strings(f"fields.{name}.classes"))
    bounds = np.arange(pages + 1, dtype=np.int64)
    if reader.has_column(f"fields.{name}.counts"):
        counts = reader.read_integers(f"fields.{name}.counts", low=1, high=len(classes), count=pages)
        np.cumsum(counts, out=bounds[1:])
    count = int(bounds[-1])
    return (
        reader.read_integers(f"fields.{name}.values", low=0, high=len(classes) - 1, count=count),
        bounds,
        classes,
    )


def _read_table(reader: ColumnReader, objects: ObjectTable, parts: int, *, beside: bool) -> PageTable:
    count = len(objects)
    samples = reader.read_integers("pages.samples", low=1, high=MAX_SAMPLES, count=count)
    totals = tuple(
        reader.read_integers(_totals_name(part), low=0, high=MAX_BYTES, count=count) for part in range(parts)
    )
    stored = reader.read_integers("pages.stored", low=0, high=MAX_BYTES, count=count)
    hashes = reader.read_bytes("pages.hashes")
    if not count or len(hashes) != count * HASH_BYTES or objects.which is not None:
        raise ColumnError(f"the snapshot has {len(hashes)} bytes of hashes for {count} pages")
    if sum(samples.tolist()) > MAX_SAMPLES:
        raise ColumnError(f"the pages have more than {MAX_SAMPLES} samples")
    if any((each > objects.sizes).any() for each in totals):
        raise ColumnError("the samples of a page are larger than its object")
    described = reader.read_strings("pages.beside") if beside else None
    if described is not None and not (len(described) == count and all(map(_BESIDE.fullmatch, described))):
        raise ColumnError("what another file says of the shards is malformed")
    return PageTable(hashes, samples, totals, stored, described)


def page_facts(document: Buffer) -> dict[tuple[str, str, int], PageFacts]:
    """Return what a document with pages says of each, by the object's key, ETag and stored size; nothing for
    a document of another version. Raises ColumnError."""
    found = read_snapshot(document, _raise_missing)
    if not isinstance(found, PagedSnapshot):
        return {}
    objects, stored = found.objects, found.table.stored.tolist()
    names = zip(objects.keys, objects.etags, stored, strict=True)
    return {name: found.facts(number) for number, name in enumerate(names)}


def _raise_missing(snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
    raise ColumnError(f"page {numbers[0]} of the snapshot {snapshot.hash} is not here")
