"""Builds snapshots of plain objects from their listing, grouped by name.

Law: a pure function of the listing, so building twice gives the same hash.
Invariant: a sample has every field. Samples that lack one are counted and left out, with every object that
only they used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwire.dataset.fields import class_name, parse_source, sample_key
from meshwire.dataset.snapshot import (
    CONTENT_TYPE,
    MAX_SAMPLES,
    SAMPLES_PER_SHARD,
    BytesColumn,
    LabelColumn,
    ObjectTable,
    Snapshot,
)
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.frame.columns import Integers

    Columns = dict[str, BytesColumn | LabelColumn]

_EXAMPLES = 5
__all__ = [
    "CONTENT_TYPE",
    "SAMPLES_PER_SHARD",
    "BytesColumn",
    "EmptySnapshotError",
    "LabelColumn",
    "ObjectTable",
    "Snapshot",
    "SnapshotBuild",
    "build_from_objects",
]


class EmptySnapshotError(PlanError):
    """The source contains no complete sample; the message says what was expected and what was found.
    `skipped`, `examples`: see `SnapshotBuild`."""

    skipped: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotBuild:
    """A built snapshot. `skipped`: number of samples left out because a field was missing; `examples`: the
    first few, with what they lack.
    """

    snapshot: Snapshot
    skipped: int
    examples: tuple[str, ...]


class _Tally:
    """Counts what was seen and skipped, for messages; bounded whatever the names are."""

    def __init__(self) -> None:
        self.extensions: Counter[str] = Counter()
        self.seen = 0
        self.skipped = 0
        self.examples: list[str] = []

    def count(self, ext: str) -> None:
        self.seen += 1
        if ext and (ext in self.extensions or len(self.extensions) < 1000):
            self.extensions[ext] += 1

    def skip(self, name: str, lacking: Iterable[str]) -> None:
        self.skipped += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{shown_value(name)} lacks {', '.join(lacking)}")

    def empty(self, source: Source, specs: Mapping[str, FieldSpec]) -> EmptySnapshotError:
        if not self.seen:
            return EmptySnapshotError("source", f"no sample in {source}: it is empty")
        wanted = "; ".join(f"{name}: {wanted_part(spec)}" for name, spec in specs.items())
        there = ", ".join(
            f".{shown_value(ext)[1:-1]} ({count})" for ext, count in self.extensions.most_common(8)
        )
        examples = "".join(f"; {example}" for example in self.examples)
        message = f"no sample in {source} has all its fields ({wanted}). Names there: {self.seen}, "
        error = EmptySnapshotError("source", f"{message}{there or 'none with an extension'}{examples}")
        error.skipped, error.examples = self.skipped, tuple(self.examples)
        return error


def wanted_part(spec: FieldSpec) -> str:
    return " or ".join(f".{ext}" for ext in spec.ext) if spec.ext else "a folder below the source"


def build_from_objects(
    listing: Iterable[tuple[str, str, int]], *, source: str | Source, fields: Mapping[str, FieldSpec]
) -> SnapshotBuild:
    """Build the snapshot of plain objects: (key, ETag, size in bytes) each, in order of key.

    Objects whose names differ only in the extension form a sample. Raises EmptySnapshotError, and PlanError
    for a listing out of order.
    """
    place = parse_source(source) if isinstance(source, str) else source
    grouping = _Grouping(fields)
    grouping.extend(listing)
    return grouping.build(place)


class _Grouping:
    """Collects objects: for each sample, the object that holds each bytes field (−1: none yet)."""

    def __init__(self, specs: Mapping[str, FieldSpec]) -> None:
        self.specs = specs
        self.tally = _Tally()
        self.keys: list[str] = []
        self.etags: list[str] = []
        self.sizes: list[int] = []
        self.samples: dict[str, int] = {}
        self.columns: dict[str, list[int]] = {
            name: [] for name, spec in specs.items() if spec.kind == "bytes"
        }
        self.users: dict[str, list[str]] = {}  # extension → fields
        for name in self.columns:
            for ext in specs[name].ext:
                self.users.setdefault(ext, []).append(name)

    def extend(self, listing: Iterable[tuple[str, str, int]]) -> None:
        # The only loop over all objects: about two microseconds each.
        last, users, samples, columns = "", self.users, self.samples, list(self.columns.values())
        for key, etag, size in listing:
            if key <= last:
                raise out_of_order(key)
            last = key
            stem, ext = sample_key(key)
            names = users.get(ext)
            if names is None:
                self.tally.count(ext)
                continue
            sample = samples.get(stem)
            if sample is None:
                sample = samples[stem] = len(samples)
                for column in columns:
                    column.append(-1)
            for name in names:
                self._offer(name, sample, ext)
            self.keys.append(key)
            self.etags.append(etag)
            self.sizes.append(size)

    def _offer(self, name: str, sample: int, ext: str) -> None:
        """Use the object being added for a field, unless the sample has one with a preferred extension."""
        column = self.columns[name]
        held = column[sample]
        if held >= 0:
            wanted = self.specs[name].ext
            if wanted.index(ext) > wanted.index(sample_key(self.keys[held])[1]):
                return
        column[sample] = len(self.keys)

    def build(self, source: Source) -> SnapshotBuild:
        columns = {name: np.array(column, dtype=np.int64) for name, column in self.columns.items()}
        stems = list(self.samples)
        labels = _Labels(self.specs, [class_name(stem, source.prefix) for stem in stems])
        kept = _kept(columns, labels, stems, self.tally)
        if not kept.size:
            for key in self.keys:
                self.tally.count(sample_key(key)[1])
            raise self.tally.empty(source, self.specs)
        columns = {name: column[kept] for name, column in columns.items()}
        needed = np.zeros(len(self.keys), dtype=np.bool_)
        for column in columns.values():
            needed[column] = True
        used = np.flatnonzero(needed)
        renumbered = np.cumsum(needed) - 1
        sizes = np.array(self.sizes, dtype=np.int64)[used]
        numbers = used.tolist()
        keys = StringColumn.from_strings([self.keys[number] for number in numbers])
        etags = StringColumn.from_strings([self.etags[number] for number in numbers])
        found: dict[str, BytesColumn] = {}
        for name, column in columns.items():
            which = renumbered[column]
            found[name] = BytesColumn(which.astype(np.int32), np.zeros_like(which), sizes[which])
        starts = np.append(np.arange(0, kept.size, SAMPLES_PER_SHARD), kept.size).astype(np.int64)
        objects = ObjectTable(source.bucket, keys, etags, sizes)
        fields = _ordered(self.specs, found, labels, kept)
        snapshot = Snapshot.from_parts(str(source), "objects", objects, starts, fields, self.specs, None)
        return SnapshotBuild(snapshot, self.tally.skipped, tuple(self.tally.examples))


def out_of_order(key: str) -> PlanError:
    # Compared as text: code point order equals the order of UTF-8 bytes, which is the store's order.
    return PlanError(
        "source", f"the listing is out of order at {shown_value(key)}; sort keys by their UTF-8 bytes"
    )


class _Labels:
    """The class label of each sample, shared by all label fields because all use the same folder."""

    def __init__(self, specs: Mapping[str, FieldSpec], classes: Sequence[str | None]) -> None:
        self.names = [name for name, spec in specs.items() if spec.kind == "label"]
        self.classes = classes
        self.lacking = np.zeros(len(classes), dtype=np.bool_)
        if self.names:
            self.lacking = np.fromiter((name is None for name in classes), np.bool_, len(classes))

    def column(self, kept: Integers) -> LabelColumn:
        chosen = [self.classes[sample] or "" for sample in kept.tolist()]
        classes = sorted(set(chosen))
        number = {name: index for index, name in enumerate(classes)}
        values = np.fromiter((number[name] for name in chosen), np.int64, len(chosen))
        return LabelColumn(values, tuple(classes))


def _kept(columns: Mapping[str, Integers], labels: _Labels, names: Sequence[str], tally: _Tally) -> Integers:
    """Return the samples that have every field, and count the others."""
    lacking = {name: column < 0 for name, column in columns.items()}
    lacking.update(dict.fromkeys(labels.names, labels.lacking))
    any_lacking = np.logical_or.reduce(list(lacking.values()))
    skipped = np.flatnonzero(any_lacking)
    for sample in skipped[:_EXAMPLES].tolist():
        tally.skip(names[sample], [name for name, mask in lacking.items() if mask[sample]])
    tally.skipped += max(0, skipped.size - _EXAMPLES)
    kept = np.flatnonzero(~any_lacking)
    if kept.size > MAX_SAMPLES:
        raise PlanError("source", f"{kept.size} samples; a snapshot holds at most {MAX_SAMPLES}")
    return kept


def _ordered(
    specs: Mapping[str, FieldSpec], found: Mapping[str, BytesColumn], labels: _Labels, kept: Integers
) -> Columns:
    label = labels.column(kept)
    return {name: found.get(name, label) for name in specs}
