"""Files of TFRecords as datasets: where the features of each record lie, a sample a record, a file a shard.

Law: every length and message is compared with its crc32c before anything of it is believed. A file that
cannot be followed from record to record is an error; a record that is damaged, or lacks a feature, is left
out and counted. Pure: pieces of a file in, places out.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from awscrt.checksums import crc32c

from meshwire.columns import ColumnError, ColumnReader, ColumnWriter, StringColumn
from meshwire.documents import PlanError, shown
from meshwire.examples import ExampleError, Feature, features
from meshwire.fields import class_of, parse_source
from meshwire.snapshotdocuments import MAX_BYTES, BytesColumn, LabelColumn, Objects, Snapshot
from meshwire.snapshots import Built, EmptySnapshotError
from meshwire.tfrecords import masked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshwire.columns import Integers
    from meshwire.fields import FieldSpec, Source
    from meshwire.frames import Buffer

_KIND, _VERSION = "shardmesh.tfrecords", 1
MAX_RECORD_BYTES: Final = 128 << 20
HEAD_BYTES: Final = 12
_EXAMPLES, _TOLD = 5, 64
_NAME = re.compile(r"\.tf_?rec(ords?)?\b|-\d+-of-\d+$", re.IGNORECASE)
_OTHER = re.compile(r"\.(gz|zz|json|pbtxt|txt|md|csv|index|idx)$", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_WHOLE = b""


class TfrecordError(ValueError):
    """The file cannot be followed from record to record."""


def is_tfrecord(key: str) -> bool:
    """Whether an object's name is that of a file of records: `x.tfrecord`, `x.tfrecord-00000-of-00008`,
    `train-00000-of-01024`."""
    name = key[key.rfind("/") + 1 :]
    return _NAME.search(name) is not None and _OTHER.search(name) is None


def head_size(head: bytes) -> int:
    """Bytes of the message of a record that begins so. Raises TfrecordError."""
    size: int = struct.unpack_from("<Q", head)[0]
    if masked(crc32c(head[:8])) != head[8:HEAD_BYTES]:
        told = "is compressed with gzip: unpack it first" if head.startswith(_GZIP) else ""
        raise TfrecordError(told or "does not begin with a length and its crc32c: no TFRecord, or damaged")
    if size > MAX_RECORD_BYTES:
        raise TfrecordError(f"has {size} bytes; a record has at most {MAX_RECORD_BYTES}")
    return size


def records(pieces: Iterable[Buffer]) -> Iterator[tuple[int, bytes | None]]:
    """(where it begins in the file, the message) of each record of a file given in pieces of any sizes; None
    for a message that has not its crc32c. Raises TfrecordError."""
    held, at, base, number = bytearray(), 0, 0, 0
    needed = HEAD_BYTES
    for piece in pieces:
        held += piece
        while len(held) - at >= needed:
            if needed == HEAD_BYTES:
                needed += _sized(held[at : at + HEAD_BYTES], number, base + at) + 4
                continue
            message = bytes(held[at + HEAD_BYTES : at + needed - 4])
            sound = masked(crc32c(message)) == held[at + needed - 4 : at + needed]
            yield base + at + HEAD_BYTES, message if sound else None
            at, number, needed = at + needed, number + 1, HEAD_BYTES
        del held[:at]
        base, at = base + at, 0
    if held:
        raise TfrecordError(f"record {number}, at byte {base}, is cut off: the file ends within it")


def _sized(head: bytes | bytearray, number: int, at: int) -> int:
    try:
        return head_size(bytes(head))
    except TfrecordError as error:
        raise TfrecordError(f"record {number}, at byte {at}, {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class TfrecordIndex:
    """`numbers` int64[n]: the records that have every wanted feature, from 0 on; `places` by feature: offset
    and length int64[n] in the file; `kinds` by feature ("" where no record has it). `told`: features of the
    first sound record with their kinds; `examples`: the first few records left out, and why."""

    numbers: Integers
    places: Mapping[str, tuple[Integers, Integers]]
    kinds: Mapping[str, str]
    skipped: int = 0
    examples: tuple[str, ...] = ()
    told: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        facts = {
            "features": list(self.places),
            "kinds": dict(self.kinds),
            "skipped": self.skipped,
            "examples": list(self.examples),
            "told": dict(self.told),
        }
        writer = ColumnWriter(_KIND, _VERSION, {"facts": json.dumps(facts)})
        writer.integers("steps", np.diff(self.numbers, prepend=-1))
        for number, (offsets, lengths) in enumerate(self.places.values()):
            writer.integers(f"gaps.{number}", np.diff(offsets, prepend=0))
            writer.integers(f"lengths.{number}", lengths)
        return writer.to_bytes()

    @classmethod
    def from_bytes(cls, document: Buffer) -> TfrecordIndex:
        """Raises ColumnError for what is no such document."""
        reader = ColumnReader(document, _KIND, _VERSION)
        try:
            facts: dict[str, Any] = json.loads(reader.text("facts"))
            names, skipped = [str(name) for name in facts["features"]], int(facts["skipped"])
            kinds, told = dict(facts["kinds"]), dict(facts["told"])
            examples = tuple(map(str, facts["examples"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ColumnError(f"the facts of the index are malformed: {error}") from error
        steps = reader.integers("steps", low=1, high=MAX_BYTES)
        places = {}
        for number, name in enumerate(names):
            gaps = reader.integers(f"gaps.{number}", low=0, high=MAX_BYTES, count=steps.size)
            lengths = reader.integers(f"lengths.{number}", low=0, high=MAX_RECORD_BYTES, count=steps.size)
            places[name] = np.cumsum(gaps), lengths
        return cls(np.cumsum(steps) - 1, places, kinds, skipped, examples, told)


def index_records(pieces: Iterable[Buffer], wanted: Sequence[str]) -> TfrecordIndex:
    """The records of a file that have the `wanted` features ("" is the whole message), of one kind each
    throughout the file. Raises TfrecordError."""
    indexing = _Indexing(wanted)
    for number, (offset, message) in enumerate(records(pieces)):
        if message is None:
            indexing.skip(number, "does not have its crc32c")
        else:
            indexing.add(number, offset, message)
    return indexing.index()


class _Indexing:
    """Records so far."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.names = {name.encode(): name for name in wanted}
        self.asked = frozenset(name for name in self.names if name != _WHOLE)
        self.kinds = dict.fromkeys(wanted, "")
        self.rows: list[list[int]] = []
        self.skipped = 0
        self.examples: list[str] = []
        self.told: dict[str, str] | None = None

    def skip(self, number: int, reason: str) -> None:
        self.skipped += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"record {number} {reason}")

    def add(self, number: int, offset: int, message: bytes) -> None:
        try:
            found = features(message, self.asked if self.told is not None else None) if self.asked else {}
        except ExampleError as error:
            self.skip(number, f"is no tf.Example: {error}")
            return
        if self.told is None and found:
            self.told = told(found)
        row = [number]
        for encoded, name in self.names.items():
            feature = found.get(encoded) if encoded else Feature("bytes", 0, len(message))
            reason = self._reason(name, feature)
            if reason or feature is None:
                self.skip(number, reason)
                return
            row += (offset + feature.begin, feature.end - feature.begin)
        self.rows.append(row)
        for place, name in enumerate(self.names.values()):
            self.kinds[name] = self.kinds[name] or self._kind(found, place)

    def _kind(self, found: Mapping[bytes, Feature], place: int) -> str:
        name = list(self.names)[place]
        return found[name].kind if name else "bytes"

    def _reason(self, name: str, feature: Feature | None) -> str:
        """Why a record is no sample."""
        if feature is None or not feature.kind:
            return f"lacks {shown(name)}"
        if feature.values != 1:
            return f"holds {feature.values} values of bytes in {shown(name)}; a field is one"
        if self.kinds[name] and feature.kind != self.kinds[name]:
            return f"holds {feature.kind} in {shown(name)}; records before it {self.kinds[name]}"
        return ""

    def index(self) -> TfrecordIndex:
        table = np.array(self.rows, np.int64).reshape(len(self.rows), 1 + 2 * len(self.names))
        places = {
            name: (table[:, 1 + 2 * place].copy(), table[:, 2 + 2 * place].copy())
            for place, name in enumerate(self.names.values())
        }
        return TfrecordIndex(
            table[:, 0].copy(), places, self.kinds, self.skipped, tuple(self.examples), self.told or {}
        )


def told(found: Mapping[bytes, Feature]) -> dict[str, str]:
    """Names and kinds of the first few features of a record, for messages and guesses."""
    names = sorted(found)[:_TOLD]
    return {name.decode(errors="replace")[:200]: found[name].kind for name in names}


def build_from_tfrecords(
    files: Iterable[tuple[str, str, int, TfrecordIndex]],
    *,
    source: str | Source,
    fields: Mapping[str, FieldSpec],
) -> Built:
    """The snapshot of files of records: (key, ETag, size in bytes, index) each, in order of key. A class
    label is the folder of the file below the source. Raises EmptySnapshotError, PlanError."""
    place = parse_source(source) if isinstance(source, str) else source
    gathering = _Gathering(fields)
    for key, etag, size, index in files:
        gathering.add(key, etag, size, index, class_of(key, place.prefix))
    return gathering.build(place)


class _Gathering:
    """Files so far that have samples."""

    def __init__(self, specs: Mapping[str, FieldSpec]) -> None:
        self.specs = specs
        self.wanted = {name: spec.feature or "" for name, spec in specs.items() if spec.kind == "bytes"}
        self.labelled = len(self.wanted) < len(specs)
        self.taken: list[tuple[str, str, int, TfrecordIndex, str]] = []
        self.kinds: dict[str, tuple[str, str]] = {}
        self.told: dict[str, str] = {}
        self.skipped, self.examples = 0, list[str]()

    def add(self, key: str, etag: str, size: int, index: TfrecordIndex, folder: str | None) -> None:
        self.told = self.told or dict(index.told)
        self.skipped += index.skipped
        self.examples += [f"{key}: {example}" for example in index.examples]
        if self.labelled and folder is None and index.numbers.size:
            self.skipped += int(index.numbers.size)
            self.examples.append(f"{shown(key)} lies in no folder below the source, so it has no class")
            return
        if not index.numbers.size:
            return
        for name, feature in self.wanted.items():
            offsets, lengths = index.places[feature]
            if int((offsets + lengths).max()) > size:
                raise PlanError("source", f"the index of {shown(key)} reaches beyond its {size} bytes")
            kind, first = self.kinds.setdefault(feature, (index.kinds[feature], key))
            if kind != index.kinds[feature]:
                message = f"{shown(feature)} is {kind} in {shown(first)}, and {index.kinds[feature]} in {key}"
                raise PlanError(f"fields.{name}", f"{message}: files of one kind make a dataset")
        self.taken.append((key, etag, size, index, folder or ""))

    def build(self, source: Source) -> Built:
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
            places = [index.places[spec.feature or ""] for index in indexes]
            offsets, lengths = (np.concatenate([pair[side] for pair in places]) for side in (0, 1))
            columns[name] = BytesColumn(which, offsets, lengths)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        names = StringColumn.of([f"{number:09d}" for index in indexes for number in index.numbers.tolist()])
        objects = Objects(
            source.bucket, StringColumn.of(keys), StringColumn.of(etags), np.array(sizes, np.int64)
        )
        snapshot = Snapshot.sealed(str(source), "tfrecord", objects, starts, columns, self.specs, names)
        return Built(snapshot, self.skipped, tuple(self.examples[:_EXAMPLES]))

    def _empty(self, source: Source) -> EmptySnapshotError:
        wanted = ", ".join(f"{name}: {shown(feature)}" for name, feature in self.wanted.items())
        there = ", ".join(f"{name} ({kind or 'empty'})" for name, kind in self.told.items())
        why = "".join(f"; {example}" for example in self.examples[:_EXAMPLES])
        message = f"no record in {source} has all its features ({wanted}). Features there: "
        return EmptySnapshotError("source", f"{message}{there or 'none'}{why}")
