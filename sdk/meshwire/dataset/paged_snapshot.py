"""Snapshots that consist of pages: a page is the index of one shard, named by the SHA-256 of its bytes.

The document lists the pages, so its size depends on the shards, not on the samples, and snapshots that
contain the same shard share its page.

Law: a snapshot is named by the SHA-256 of its document, which covers source, fields, objects and the hashes
of the pages. A foreign document is validated completely; the pages are validated when they are opened.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.fields import fields_document
from meshwire.dataset.paged_columns import PagedColumn, PagedLabels, Pages
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
    from meshwire.dataset.sample_columns import BytesColumn, LabelColumn
    from meshwire.dataset.snapshot import (
        ObjectTable,
        SnapshotKind,
    )
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

HASH_BYTES: Final = 32
_PAGED_KINDS: Final[tuple[SnapshotKind, ...]] = ("lines",)


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a snapshot says of a page. `digest`: SHA-256 of its bytes; `samples`; `total`: bytes of all
    samples of one field; `size`: bytes of the object after decompression; `stored`: bytes of the object."""

    digest: bytes
    samples: int
    total: int
    size: int
    stored: int


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of a snapshot, one for each of its objects: `hashes`, 32 bytes each; `samples`, `totals`,
    `stored` int64[P], see `PageFacts`."""

    hashes: bytes
    samples: Integers
    totals: Integers
    stored: Integers

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
            np.array([page.total for page in pages], np.int64),
            np.array([page.stored for page in pages], np.int64),
        )


class PagedSnapshot(Snapshot):
    """A snapshot that consists of pages: page n is the index of object n, and shard n has its samples."""

    __slots__ = ("pages", "table")

    table: PageTable
    pages: Pages

    def __init__(
        self,
        source: str,
        kind: SnapshotKind,
        objects: ObjectTable,
        table: PageTable,
        specs: Mapping[str, FieldSpec],
        labels: Mapping[str, tuple[Integers, tuple[str, ...]]],
        open_page: Callable[[PagedSnapshot, int], Page],
    ) -> None:
        """`labels`: the class of each page, int64[P], and the classes, by field; `open_page`: returns a page
        by its number."""
        starts = np.zeros(len(table) + 1, np.int64)
        np.cumsum(table.samples, out=starts[1:])
        pages = Pages(starts, lambda number: open_page(self, number))
        column = PagedColumn(pages, sum(table.totals.tolist()))
        fields: dict[str, BytesColumn | LabelColumn] = {
            name: PagedLabels(*labels[name], pages) if spec.kind == "label" else column
            for name, spec in specs.items()
        }
        for name, value in {
            "source": source, "kind": kind, "objects": objects, "samples": int(starts[-1]), "pages": pages,
            "shard_starts": starts, "fields": fields, "specs": specs, "table": table,
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
        columns = (table.samples, table.totals, self.objects.sizes, table.stored)
        return PageFacts(table.hash_of(number), *(int(column[number]) for column in columns))

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
        writer.add_integers("pages.totals", self.table.totals)
        writer.add_bytes("pages.hashes", self.table.hashes)
        for name, column in sorted(self.fields.items()):
            if isinstance(column, PagedLabels):
                writer.add_integers(f"fields.{name}.values", column.of_pages)
                writer.add_strings(f"fields.{name}.classes", StringColumn.from_strings(column.classes))
        return writer.to_bytes()

    def __repr__(self) -> str:
        count = f"samples={self.samples}, pages={len(self.table)}"
        return f"PagedSnapshot({self.hash[:12]}, {self.source!r}, {count})"


def read_snapshot(document: Buffer, open_page: Callable[[PagedSnapshot, int], Page]) -> Snapshot:
    """Decode a snapshot document of any version. Raises ColumnError for any other bytes."""
    reader = ColumnReader(document, FORMAT, 1, PAGED_VERSION)
    if reader.version != PAGED_VERSION:
        return Snapshot.from_bytes(document)
    kind: Any = reader.read_text("kind")
    if kind not in _PAGED_KINDS:
        raise ColumnError(f"a snapshot of the kind {kind[:60]!r} has no pages")
    source, specs = read_description(reader)
    objects = read_objects(reader)
    table = _read_table(reader, objects)
    labels = {}
    for name in (name for name, spec in specs.items() if spec.kind == "label"):
        classes = tuple(reader.read_strings(f"fields.{name}.classes"))
        values = reader.read_integers(f"fields.{name}.values", low=0, high=len(classes) - 1, count=len(table))
        labels[name] = values, classes
    found = PagedSnapshot(source, kind, objects, table, specs, labels, open_page)
    if found.hash != hashlib.sha256(document).hexdigest():  # it has other columns, or wider ones
        raise ColumnError("the document of the snapshot is not written as it has to be")
    return found


def _read_table(reader: ColumnReader, objects: ObjectTable) -> PageTable:
    count = len(objects)
    samples = reader.read_integers("pages.samples", low=1, high=MAX_SAMPLES, count=count)
    totals = reader.read_integers("pages.totals", low=0, high=MAX_BYTES, count=count)
    stored = reader.read_integers("pages.stored", low=0, high=MAX_BYTES, count=count)
    hashes = reader.read_bytes("pages.hashes")
    if not count or len(hashes) != count * HASH_BYTES or objects.which is not None:
        raise ColumnError(f"the snapshot has {len(hashes)} bytes of hashes for {count} pages")
    if sum(samples.tolist()) > MAX_SAMPLES:
        raise ColumnError(f"the pages have more than {MAX_SAMPLES} samples")
    if (totals > objects.sizes).any():
        raise ColumnError("the samples of a page are larger than its object")
    return PageTable(hashes, samples, totals, stored)


def page_facts(document: Buffer) -> dict[tuple[str, str, int], PageFacts]:
    """Return what a document with pages says of each, by the object's key, ETag and stored size; nothing for
    a document of another version. Raises ColumnError."""
    found = read_snapshot(document, _closed)
    if not isinstance(found, PagedSnapshot):
        return {}
    objects, stored = found.objects, found.table.stored.tolist()
    names = zip(objects.keys, objects.etags, stored, strict=True)
    return {name: found.facts(number) for number, name in enumerate(names)}


def _closed(snapshot: PagedSnapshot, number: int) -> Page:
    raise ColumnError(f"page {number} of the snapshot {snapshot.hash} is not here")
