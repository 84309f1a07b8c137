"""Index of records: where each sample's parts are in their files, and the snapshot of a folder.

Law: a part (a feature of a TFRecord, a column of MDS) has one type in all files of a dataset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild
from meshwire.dataset.fields import class_name
from meshwire.dataset.page_document import write_page
from meshwire.dataset.paged_snapshot import PageNotes
from meshwire.dataset.snapshot import MAX_BYTES, BytesColumn, LabelColumn, ObjectTable, Snapshot
from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.paged_snapshot import PageParts
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.frame.columns import Integers
    from meshwire.frame.tensor_frame import Buffer

_KIND, _VERSION = "shardmesh.records", 1
MAX_RECORD_BYTES: Final = 1 << 32
_EXAMPLES = 5
_EXAMPLE_CHARS = 1000
_TOLD = 1000


@dataclass(frozen=True, slots=True, eq=False)
class RecordIndex:
    """Record positions. `numbers` int64[n]: the records that have every wanted part, from 0; `places` by
    part: offset and length int64[n] in the file; `kinds` by part ("" if no record has it); `told`: the
    existing parts with their kinds; `examples`: the first few records left out, and why; `size`:
    uncompressed bytes of the file, 0 if unknown."""

    numbers: Integers
    places: Mapping[str, tuple[Integers, Integers]]
    kinds: Mapping[str, str]
    skipped: int = 0
    examples: tuple[str, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict)
    size: int = 0

    def to_bytes(self) -> bytes:
        facts = {
            "parts": list(self.places),
            "kinds": dict(self.kinds),
            "skipped": self.skipped,
            "examples": list(self.examples),
            "told": dict(self.told),
            "size": self.size,
        }
        writer = ColumnWriter(_KIND, _VERSION, {"facts": json.dumps(facts)})
        writer.add_integers("steps", np.diff(self.numbers, prepend=-1))
        for number, (offsets, lengths) in enumerate(self.places.values()):
            writer.add_integers(f"gaps.{number}", np.diff(offsets, prepend=0))
            writer.add_integers(f"lengths.{number}", lengths)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> RecordIndex:
        """Decode the document. Raises ColumnError for any other bytes."""
        reader = ColumnReader(document, _KIND, _VERSION)
        try:
            facts: dict[str, Any] = json.loads(reader.read_text("facts"))
            names, skipped = [str(name) for name in facts["parts"]], int(facts["skipped"])
            kinds, told, size = dict(facts["kinds"]), dict(facts["told"]), int(facts.get("size", 0))
            if not 0 <= size <= MAX_BYTES:
                raise ColumnError(f"invalid file size {shown_value(size)}")
            examples = tuple(map(str, facts["examples"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ColumnError(f"the facts of the index are malformed: {error}") from error
        steps = reader.read_integers("steps", low=1, high=MAX_BYTES)
        places = {}
        for number, name in enumerate(names):
            gaps = reader.read_integers(f"gaps.{number}", low=0, high=MAX_BYTES, count=steps.size)
            lengths = reader.read_integers(
                f"lengths.{number}", low=0, high=MAX_RECORD_BYTES, count=steps.size
            )
            places[name] = np.cumsum(gaps), lengths
        return cls(np.cumsum(steps) - 1, places, kinds, skipped, examples, told, size)


def write_record_page(index: RecordIndex, parts: PageParts) -> bytes:
    """Encode the page of a file of records from an index of these parts."""
    names = [name for name, *_ in parts.parts]
    examples = tuple((example[:_EXAMPLE_CHARS], ()) for example in index.examples)
    told = dict(list(index.told.items())[:_TOLD])
    kinds = tuple(index.kinds[name] for name in names)
    notes = PageNotes(index.skipped, examples, kinds=kinds, told=told)
    nowhere = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of a part that the file does not have
    places = [index.places.get(name, nowhere) for name in names]
    return write_page(places, index.numbers, None, notes, index.size)


IndexedFile = tuple[str, str, int, RecordIndex]
"""Key, ETag, size in bytes, and the positions of the parts of its records."""


def build_from_records(
    files: Iterable[IndexedFile],
    *,
    kind: SnapshotKind,
    source: Source,
    fields: Mapping[str, FieldSpec],
) -> SnapshotBuild:
    """Build the snapshot of record files: (key, ETag, size in bytes, index) each, in order of key. A class
    label is the folder of the file below the source. Raises EmptySnapshotError, PlanError."""
    gathering = _Gathering(kind, fields)
    for key, etag, size, index in files:
        gathering.add(key, etag, size, index, class_name(key, source.prefix))
    return gathering.build(source)


class _Gathering:
    """Collects the files that have samples."""

    def __init__(self, kind: SnapshotKind, specs: Mapping[str, FieldSpec]) -> None:
        self.kind, self.specs = kind, specs
        self.wanted = {name: spec.part for name, spec in specs.items() if spec.kind == "bytes"}
        self.labelled = len(self.wanted) < len(specs)
        self.taken: list[tuple[str, str, int, RecordIndex, str]] = []
        self.kinds: dict[str, tuple[str, str]] = {}
        self.told: dict[str, str] = {}
        self.skipped, self.examples = 0, list[str]()

    def add(self, key: str, etag: str, size: int, index: RecordIndex, folder: str | None) -> None:
        self.told = self.told or dict(index.told)
        self.skipped += index.skipped
        self.examples += [f"{key}: {example}" for example in index.examples]
        if self.labelled and folder is None and index.numbers.size:
            self.skipped += int(index.numbers.size)
            self.examples.append(f"{shown_value(key)} is in no folder below the source, so it has no class")
            return
        if not index.numbers.size:
            return
        for name, part in self.wanted.items():
            offsets, lengths = index.places[part]
            if int((offsets + lengths).max()) > size:
                raise PlanError("source", f"the index of {shown_value(key)} extends beyond its {size} bytes")
            kind, first = self.kinds.setdefault(part, (index.kinds[part], key))
            if kind != index.kinds[part]:
                message = (
                    f"{shown_value(part)} is {kind} in {shown_value(first)}, and {index.kinds[part]} in {key}"
                )
                raise PlanError(f"fields.{name}", f"{message}; it must have one type in all files")
        self.taken.append((key, etag, size, index, folder or ""))

    def build(self, source: Source) -> SnapshotBuild:
        if not self.taken:
            raise self._empty(source)
        keys, etags, sizes, indexes, folders = zip(*self.taken, strict=True)
        counts = [index.numbers.size for index in indexes]
        which = np.repeat(np.arange(len(keys), dtype=np.int32), counts)
        columns: dict[str, BytesColumn | LabelColumn] = {}
        for name, spec in self.specs.items():
            if spec.kind == "label":
                classes = sorted(set(folders))
                values = np.array([classes.index(folder) for folder in folders], np.int64)
                columns[name] = LabelColumn(np.repeat(values, counts), tuple(classes))
                continue
            places = [index.places[spec.part] for index in indexes]
            offsets, lengths = (np.concatenate([pair[side] for pair in places]) for side in (0, 1))
            columns[name] = BytesColumn(which, offsets, lengths)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        names = StringColumn.from_numbers(np.concatenate([index.numbers for index in indexes]))
        objects = ObjectTable(
            source.bucket,
            StringColumn.from_strings(keys),
            StringColumn.from_strings(etags),
            np.array(sizes, np.int64),
        )
        snapshot = Snapshot.from_parts(str(source), self.kind, objects, starts, columns, self.specs, names)
        return SnapshotBuild(snapshot, self.skipped, tuple(self.examples[:_EXAMPLES]))

    def _empty(self, source: Source) -> EmptySnapshotError:
        wanted = ", ".join(f"{name}: {shown_value(part)}" for name, part in self.wanted.items())
        there = ", ".join(f"{name} ({kind or 'empty'})" for name, kind in self.told.items())
        why = "".join(f"; {example}" for example in self.examples[:_EXAMPLES])
        message = f"no record in {source} has all its fields ({wanted}). Existing parts: "
        return EmptySnapshotError("source", f"{message}{there or 'none'}{why}")
