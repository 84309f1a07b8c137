"""Snapshots: a dataset's pinned objects, where each sample's fields are, and the binary encoding.

Law: a snapshot is immutable and named by the SHA-256 of its document; equal content gives equal bytes. A
foreign document is validated completely: an index, range or name out of bounds raises ColumnError.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from meshwire.dataset.fields import MAX_FIELDS, fields_document, parse_fields, parse_source, sample_key
from meshwire.dataset.sample_columns import (
    BytesColumn,
    LabelColumn,
    RecordColumn,
    Records,
    StoredColumn,
    StoredLabels,
)
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import PlanError, canonical_json, checked_text, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshwire.dataset.fields import FieldSpec
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

__all__ = [
    "BytesColumn",
    "LabelColumn",
    "ObjectTable",
    "RecordColumn",
    "Records",
    "Snapshot",
    "SnapshotKind",
    "pinned_files",
]

SnapshotKind = Literal[
    "objects", "tar", "lines", "zarr", "tfrecord", "mds", "parquet", "table", "tokens", "joined"
]
KINDS: tuple[SnapshotKind, ...] = get_args(SnapshotKind)
_UNINDEXED = ("objects", "tar", "zarr")  # of version 1; pages are of files that have indexes
CONTENT_TYPE = "application/vnd.shardmesh.snapshot"
# Plain objects have no shards: runs of this many samples in key order act as shards.
SAMPLES_PER_SHARD = 1024
MAX_BYTES = 1 << 60  # of an object, so that the sum of two fits into int64
MAX_SAMPLES = (1 << 31) - 1
FORMAT = "shardmesh.snapshot"
PAGED_VERSION = 2
"""Version of documents that list pages; see `meshwire.dataset.paged_snapshot`."""
PREPARED_NAME = "samples.snapshot"
"""Name of the object of a document that the SDK prepared."""
_VERSION = 1
_BLOCK = 1 << 16
_VIEWED = 1 << 20
"""Bytes from which on a document is not copied into columns of this process."""


@dataclass(frozen=True, slots=True, eq=False)
class ObjectTable:
    """A table of objects in order of key: `keys`, `etags` (without quotes), `sizes` int64[n] in bytes. A
    joined snapshot has two such runs, from one bucket or several: `which` int64[n] is 0 for `bucket`, else
    1 plus an index into `others`; None if all objects are in `bucket`.
    """

    bucket: str
    keys: StringColumn
    etags: StringColumn
    sizes: Integers
    others: tuple[str, ...] = ()
    which: Integers | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.etags) == self.sizes.size:
            raise ColumnError("the objects' keys, ETags and sizes differ in number")

    @property
    def buckets(self) -> tuple[str, ...]:
        return (self.bucket, *self.others)

    def bucket_of(self, number: int) -> str:
        """Return the bucket of an object."""
        return self.bucket if self.which is None else self.buckets[int(self.which[number])]

    def keys_by_bucket(self) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield every bucket with the keys of its objects."""
        if self.which is None:
            yield self.bucket, self.keys
            return
        for number, bucket in enumerate(self.buckets):
            yield bucket, self.keys.take_rows(np.flatnonzero(self.which == number))

    def take_rows(self, numbers: Integers) -> ObjectTable:
        """Return these rows in the order given; buckets without objects are dropped."""
        which = np.zeros(len(self), np.int64) if self.which is None else self.which
        return _of_buckets(
            self.buckets,
            which[numbers],
            StringColumn.from_strings(self.keys.take_rows(numbers)),
            StringColumn.from_strings(self.etags.take_rows(numbers)),
            self.sizes[numbers],
        )

    def append(self, other: ObjectTable) -> ObjectTable:
        """Return this table followed by `other`."""
        return ObjectTable.concatenate((self, other))

    @classmethod
    def concatenate(cls, runs: Sequence[ObjectTable]) -> ObjectTable:
        """Concatenate several tables."""
        buckets = list(dict.fromkeys(bucket for run in runs for bucket in run.buckets))
        which = [
            np.array([buckets.index(bucket) for bucket in run.buckets], np.int64)[
                np.zeros(len(run), np.int64) if run.which is None else run.which
            ]
            for run in runs
        ]
        return _of_buckets(
            tuple(buckets),
            np.concatenate(which),
            StringColumn.from_strings([key for run in runs for key in run.keys]),
            StringColumn.from_strings([etag for run in runs for etag in run.etags]),
            np.concatenate([run.sizes for run in runs]),
        )


def _of_buckets(
    buckets: tuple[str, ...], which: Integers, keys: StringColumn, etags: StringColumn, sizes: Integers
) -> ObjectTable:
    used = np.unique(which).tolist()
    first, *others = [buckets[number] for number in used]
    if not others:
        return ObjectTable(first, keys, etags, sizes)
    return ObjectTable(
        first, keys, etags, sizes, tuple(others), np.searchsorted(used, which).astype(np.int64)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A pinned dataset. `samples` N; `shard_starts` int64[S+1], rising from 0 to N; `names`: sample names
    within archives, numbers of lines or rows, or names relative to the left source of a join; None for
    plain objects, whose names are the stems of their keys; `hash`: SHA-256 of the document, in hex.
    """

    source: str
    kind: SnapshotKind
    objects: ObjectTable
    samples: int
    shard_starts: Integers
    fields: Mapping[str, BytesColumn | LabelColumn]
    specs: Mapping[str, FieldSpec]
    names: StringColumn | None
    hash: str
    # The document of which `hash` was computed, until it is asked for: a great one is not encoded twice.
    _document: list[Buffer] = field(default_factory=list, init=False, repr=False)

    @property
    def shards(self) -> int:
        return self.shard_starts.size - 1

    def pieces(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that continue the bytes of others, in their order, by the field they continue."""
        found: dict[str, tuple[str, ...]] = {}
        for name, spec in self.specs.items():
            if spec.piece_of:
                found[spec.piece_of] = (*found.get(spec.piece_of, ()), name)
        return found

    def lengths_of(self, name: str, samples: Integers | None = None) -> Integers:
        """Return the bytes of a field of some samples, or of all, with those that continue it."""
        columns = (self.fields[each] for each in (name, *self.pieces().get(name, ())))
        found = [
            column.length if samples is None else column.lengths_at(samples)
            for column in columns
            if isinstance(column, BytesColumn)
        ]
        return found[0] if len(found) == 1 else np.sum(found, axis=0, dtype=np.int64)

    def own_fields(self) -> list[str]:
        """Return the fields of a sample in order of name, without those that continue others."""
        return [name for name, spec in self.specs.items() if not spec.piece_of]

    @property
    def total_bytes(self) -> int:
        """Total bytes of all fields of all samples."""
        columns = (column for column in self.fields.values() if isinstance(column, BytesColumn))
        return sum(column.total_bytes() for column in columns)

    def sample_name(self, sample: int) -> str:
        """Return the name used in errors and ledgers: `a/b/0001`, in a tar `shard.tar/a/b/0001`. Raises
        IndexError."""
        first = next(column for column in self.fields.values() if isinstance(column, BytesColumn))
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of {self.samples}")
        if self.kind == "joined" and self.names is not None:
            return self.names[sample]
        key = self.objects.keys[int(first.objects_at(sample))]
        return sample_key(key)[0] if self.names is None else f"{key}/{self.names[sample]}"

    def names_at(self, samples: Integers) -> StringColumn | None:
        """Return the `names` of some samples."""
        return None if self.names is None else StringColumn.from_strings(self.names.take_rows(samples))

    def summary(self) -> dict[str, Any]:
        """Return the response of `POST /-/snapshots` as plain JSON values."""
        return {
            "snapshot": self.hash,
            "kind": self.kind,
            "samples": self.samples,
            "shards": self.shards,
            "objects": len(self.objects),
            "bytes": self.total_bytes,
            "fields": {name: _summary(self.fields[name], self.specs[name]) for name in self.own_fields()},
        }

    def to_bytes(self) -> bytes:
        """Encode the document. `hash` is its SHA-256."""
        return b"".join(self.document_pieces())

    def document_pieces(self) -> Sequence[Buffer]:
        """Return the document in consecutive pieces, of which the long ones are views of the columns."""
        pieces = tuple(self._document)
        self._document.clear()
        return pieces or _document(
            self.source, self.kind, self.objects, self.shard_starts, self.fields, self.specs, self.names
        )

    @classmethod
    def from_parts(
        cls,
        source: str,
        kind: SnapshotKind,
        objects: ObjectTable,
        shard_starts: Integers,
        fields: Mapping[str, BytesColumn | LabelColumn],
        specs: Mapping[str, FieldSpec],
        names: StringColumn | None,
    ) -> Snapshot:
        """Build a snapshot from columns made by this process, and compute its hash."""
        document = _document(source, kind, objects, shard_starts, fields, specs, names)
        digest = hashlib.sha256()
        for piece in document:
            digest.update(piece)
        samples = int(shard_starts[-1])
        made = cls(source, kind, objects, samples, shard_starts, fields, specs, names, digest.hexdigest())
        made._document.extend(document)
        return made

    @classmethod
    def from_bytes(cls, document: Buffer, digest: str = "") -> Snapshot:
        """Decode the document. `digest`: its SHA-256 in hex, where that is known. Raises ColumnError for any
        other bytes."""
        return _read(document, digest)

    def __repr__(self) -> str:
        return f"Snapshot({self.hash[:12]}, {self.source!r}, samples={self.samples}, shards={self.shards})"


def pinned_files(document: Buffer) -> Iterator[str]:
    """Yield the ETags of the files whose samples come from an index, given a snapshot document of any
    version; none for snapshots of other kinds. Raises ColumnError."""
    reader = ColumnReader(document, FORMAT, _VERSION, PAGED_VERSION)
    if reader.version != PAGED_VERSION and reader.read_text("kind") in _UNINDEXED:
        return iter(())
    return iter(reader.read_strings("objects.etags"))


def _summary(column: BytesColumn | LabelColumn, spec: FieldSpec) -> dict[str, Any]:
    if isinstance(column, LabelColumn):
        return {"kind": "label", "classes": list(column.classes)}
    return {"kind": "bytes"} | ({"dtype": spec.dtype, "shape": list(spec.shape)} if spec.dtype else {})


def _document(
    source: str,
    kind: str,
    objects: ObjectTable,
    shard_starts: Integers,
    fields: Mapping[str, BytesColumn | LabelColumn],
    specs: Mapping[str, FieldSpec],
    names: StringColumn | None,
) -> Sequence[Buffer]:
    described = canonical_json(fields_document(specs)).decode()
    metadata = {"source": source, "bucket": objects.bucket, "kind": kind, "fields": described}
    if objects.others:
        metadata["others"] = canonical_json(list(objects.others)).decode()
    tables = _record_groups(fields)
    if tables:
        places = {
            name: [tables.index(column.records), column.distance, column.width]
            for name, column in sorted(fields.items())
            if isinstance(column, RecordColumn)
        }
        metadata["records"] = canonical_json(places).decode()
    writer = ColumnWriter(FORMAT, _VERSION, metadata)
    writer.add_strings("objects.keys", objects.keys)
    writer.add_strings("objects.etags", objects.etags)
    writer.add_integers("objects.sizes", objects.sizes)
    if objects.which is not None:
        writer.add_integers("objects.which", objects.which)
    writer.add_integers("shards", np.diff(shard_starts))
    if names is not None:
        writer.add_strings("names", names)
    for number, table in enumerate(tables):
        writer.add_integers(f"records.{number}.object", table.object)
        writer.add_integers(f"records.{number}.offset", table.offset)
    for name, column in sorted(fields.items()):
        if isinstance(column, RecordColumn):
            continue
        if isinstance(column, LabelColumn):
            writer.add_integers(f"fields.{name}.values", column.values)
            writer.add_strings(f"fields.{name}.classes", StringColumn.from_strings(column.classes))
            continue
        writer.add_integers(f"fields.{name}.object", column.object)
        if kind != "objects":  # a plain object's bytes are the whole object
            writer.add_integers(f"fields.{name}.offset", column.offset)
            writer.add_integers(f"fields.{name}.length", column.length)
    return writer.pieces()


def _record_groups(fields: Mapping[str, BytesColumn | LabelColumn]) -> list[Records]:
    """Return the different records that fields are in, in order of the fields."""
    found: list[Records] = []
    for _, column in sorted(fields.items()):
        if isinstance(column, RecordColumn) and column.records not in found:
            found.append(column.records)
    return found


def _read(document: Buffer, digest: str) -> Snapshot:
    reader = ColumnReader(document, FORMAT, _VERSION)
    kind, viewed = reader.read_text("kind"), len(document) >= _VIEWED
    if kind not in KINDS:
        raise ColumnError(f"the kind of a snapshot is one of {', '.join(KINDS)}, not {kind[:60]!r}")
    source, specs = read_description(reader)
    objects = read_objects(reader, viewed=viewed)
    lengths = reader.read_integers("shards", low=0, high=MAX_SAMPLES)
    shard_starts = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=shard_starts[1:])
    samples = int(shard_starts[-1])
    records = _read_records(reader, objects, samples)
    fields = {
        name: records.get(name) or _read_field(reader, spec, objects, samples, kind, viewed=viewed)
        for name, spec in specs.items()
    }
    read = reader.view_strings if viewed else reader.read_strings
    names = read("names") if kind != "objects" else None
    if names is not None and len(names) != samples:
        raise ColumnError(f"{len(names)} names for {samples} samples")
    digest = digest or hashlib.sha256(document).hexdigest()
    return Snapshot(source, kind, objects, samples, shard_starts, fields, specs, names, digest)


def read_description(reader: ColumnReader) -> tuple[str, Mapping[str, FieldSpec]]:
    """Return the source and the fields that a document describes. Raises ColumnError."""
    try:
        source = parse_source(reader.read_text("source"))
        specs = parse_fields(reader.read_text("fields"))
    except PlanError as error:
        raise ColumnError(f"the snapshot's description is malformed: {error}") from error
    moved = source.bucket != reader.read_text("bucket") and reader.read_text("kind") != "joined"
    if moved or len(specs) > MAX_FIELDS:
        raise ColumnError("the snapshot's bucket differs from the bucket of its source")
    return str(source), specs


def read_objects(reader: ColumnReader, *, viewed: bool = False) -> ObjectTable:
    """Return the objects of a document. `viewed`: their names stay in its memory. Raises ColumnError."""
    read = reader.view_strings if viewed else reader.read_strings
    keys, etags = read("objects.keys"), read("objects.etags")
    sizes = reader.read_integers("objects.sizes", low=0, high=MAX_BYTES)
    if "others" not in reader.metadata:
        return ObjectTable(reader.read_text("bucket"), keys, etags, sizes)
    try:
        others = read_json(reader.read_text("others"))
        buckets = tuple(checked_text(item, "others", at_most=63) for item in others)
    except (PlanError, TypeError) as error:
        raise ColumnError(f"the snapshot's other buckets are malformed: {error}") from error
    which = reader.read_integers("objects.which", low=0, high=len(buckets), count=len(keys))
    return ObjectTable(reader.read_text("bucket"), keys, etags, sizes, buckets, which)


def _read_records(reader: ColumnReader, objects: ObjectTable, samples: int) -> dict[str, RecordColumn]:
    if "records" not in reader.metadata:
        return {}
    try:
        described = read_json(reader.metadata["records"])
        places = {str(name): [int(each) for each in place] for name, place in described.items()}
        found: list[tuple[Records, int]] = []
        for number in range(1 + max(group for group, _, _ in places.values())):
            prefix = f"records.{number}"
            which = reader.view_integers(f"{prefix}.object", low=0, high=len(objects) - 1, count=samples)
            offset = reader.view_integers(f"{prefix}.offset", low=0, high=MAX_BYTES, count=samples)
            room = int((objects.sizes[which] - offset).min()) if samples else 0
            found.append((Records(which, offset), room))
        columns = {}
        for name, (group, distance, width) in places.items():
            records, room = found[group]
            if distance < 0 or width < 1 or (samples and distance + width > room):
                raise ColumnError(f"a sample's {name!r} extends beyond its object")
            columns[name] = RecordColumn(records, distance, width)
    except (PlanError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ColumnError(f"the records of the snapshot are malformed: {error}") from error
    return columns


def _read_field(
    reader: ColumnReader, spec: FieldSpec, objects: ObjectTable, samples: int, kind: str, *, viewed: bool
) -> BytesColumn | LabelColumn:
    prefix = f"fields.{spec.name}"
    if spec.kind == "label":
        classes = tuple(reader.read_strings(f"{prefix}.classes"))
        values = reader.view_integers(f"{prefix}.values", low=0, high=len(classes) - 1, count=samples)
        return StoredLabels(values, classes) if viewed else LabelColumn(values.astype(np.int64), classes)
    which = reader.view_integers(f"{prefix}.object", low=0, high=len(objects) - 1, count=samples)
    if kind == "objects":
        whole = StoredColumn(which, None, objects.sizes)
        return whole if viewed else BytesColumn(whole.object, whole.offset, whole.length)
    offset = reader.view_integers(f"{prefix}.offset", low=0, high=MAX_BYTES, count=samples)
    length = reader.view_integers(f"{prefix}.length", low=0, high=MAX_BYTES, count=samples)
    for at in range(0, samples, _BLOCK):  # a column is larger than what checks it
        some = slice(at, at + _BLOCK)
        if (offset[some].astype(np.int64) + length[some] > objects.sizes[which[some]]).any():
            raise ColumnError(f"a sample's {spec.name!r} extends beyond its object")
    found = StoredColumn(which, offset, length)
    return found if viewed else BytesColumn(found.object, found.offset, found.length)
