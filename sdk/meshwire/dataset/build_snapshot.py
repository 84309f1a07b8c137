"""Builds snapshots of plain objects from their listing, grouped by name.

Law: a pure function of the listing, so building twice gives the same hash.
Invariant: a sample has every field. Samples that lack one are counted and left out, with every object that
only they used.
"""

from __future__ import annotations

from array import array
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
from meshwire.frame.string_builder import StringColumnBuilder
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy.typing as npt

    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.frame.columns import Integers

    Columns = dict[str, BytesColumn | LabelColumn]

_EXAMPLES = 5
_SYNONYMS = (("jpg", "jpeg", "jpe", "jfif"), ("tif", "tiff"), ("htm", "html"), ("yml", "yaml"))
"""Extensions of one format: a folder that has files of both rarely has those of one to be left out."""
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

    def add_synonym_examples(self, wanted: Iterable[str]) -> None:
        """Add examples for files of a wanted format that have another extension, which no field has."""
        for ext in synonyms(wanted):
            if self.extensions[ext]:
                files = "1 name" if self.extensions[ext] == 1 else f"{self.extensions[ext]} names"
                self.examples.insert(0, f"{files} in .{ext}, which is the extension of no field")
        del self.examples[_EXAMPLES:]

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


def synonyms(wanted: Iterable[str]) -> list[str]:
    """Return further extensions of the formats that some extensions are of."""
    given = set(wanted)
    return [ext for group in _SYNONYMS if given & {*group} for ext in group if ext not in given]


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
    grouping = _Grouping(place, fields)
    grouping.extend(listing)
    return grouping.build()


class _Grouping:
    """Collects objects in columns: for each sample, the object that holds each bytes field (−1: none yet).
    An object takes about 100 bytes, however long ago its sample was complete."""

    def __init__(self, source: Source, specs: Mapping[str, FieldSpec]) -> None:
        self.source, self.specs = source, specs
        self.tally = _Tally()
        self.keys, self.etags = StringColumnBuilder(), StringColumnBuilder()
        self.sizes = array("q")
        self.first_objects = array("q")  # of each sample: its name is the stem of that key
        self.columns = {name: array("q") for name, spec in specs.items() if spec.kind == "bytes"}
        self.labels = _Labels(specs)
        self.users: dict[str, list[str]] = {}  # extension → fields
        for name in self.columns:
            for ext in specs[name].ext:
                self.users.setdefault(ext, []).append(name)

    def extend(self, listing: Iterable[tuple[str, str, int]]) -> None:
        # The only loop over all objects: two to three microseconds each.
        last, users, columns, label = "", self.users, list(self.columns.values()), self.labels.add
        prefix, labelled = self.source.prefix, bool(self.labels.names)
        add_key, add_etag, add_size = self.keys.append, self.etags.append, self.sizes.append
        stem_before, sample, samples = None, -1, 0
        interrupted: list[tuple[str, int]] = []  # samples with objects on both sides of folders like them
        for key, etag, size in listing:
            if key <= last:
                raise out_of_order(key)
            last = key
            stem, ext = sample_key(key)
            names = users.get(ext)
            if names is None:
                self.tally.count(ext)
                continue
            if stem != stem_before:
                # The objects of a sample are neighbours, except that those of the folder `a.b/` lie between
                # `a.a` and `a.c`.
                if stem_before is not None and key.startswith(f"{stem_before}."):
                    interrupted.append((stem_before, sample))
                while interrupted and not key.startswith(f"{interrupted[-1][0]}."):
                    interrupted.pop()
                if interrupted and interrupted[-1][0] == stem:
                    sample = interrupted.pop()[1]
                else:
                    sample, samples = samples, samples + 1
                    self.first_objects.append(len(self.keys))
                    for column in columns:
                        column.append(-1)
                    if labelled:
                        label(class_name(stem, prefix))
                stem_before = stem
            for name in names:
                self._offer(name, sample, ext)
            add_key(key)
            add_etag(etag)
            add_size(size)

    def _offer(self, name: str, sample: int, ext: str) -> None:
        """Use the object being added for a field, unless the sample has one with a preferred extension."""
        column = self.columns[name]
        held = column[sample]
        if held >= 0:
            wanted = self.specs[name].ext
            if wanted.index(ext) > wanted.index(sample_key(self.keys[held])[1]):
                return
        column[sample] = len(self.keys)

    def _sample_name(self, sample: int) -> str:
        return sample_key(self.keys[self.first_objects[sample]])[0]

    def build(self) -> SnapshotBuild:
        columns = {name: np.array(column, dtype=np.int64) for name, column in self.columns.items()}
        kept = _complete_samples(columns, self.labels, self._sample_name, self.tally)
        if not kept.size:
            for number in range(len(self.keys)):
                self.tally.count(sample_key(self.keys[number])[1])
            raise self.tally.empty(self.source, self.specs)
        columns = {name: column[kept] for name, column in columns.items()}
        needed = np.zeros(len(self.keys), dtype=np.bool_)
        for column in columns.values():
            needed[column] = True
        renumbered = np.cumsum(needed) - 1
        sizes = np.array(self.sizes, dtype=np.int64)[needed]
        keys, etags = self.keys.build(needed), self.etags.build(needed)
        found: dict[str, BytesColumn] = {}
        for name, column in columns.items():
            which = renumbered[column]
            found[name] = BytesColumn(which.astype(np.int32), np.zeros_like(which), sizes[which])
        starts = np.append(np.arange(0, kept.size, SAMPLES_PER_SHARD), kept.size).astype(np.int64)
        self.tally.add_synonym_examples(self.users)
        objects = ObjectTable(self.source.bucket, keys, etags, sizes)
        fields = _order_columns(self.specs, found, self.labels, kept)
        snapshot = Snapshot.from_parts(str(self.source), "objects", objects, starts, fields, self.specs, None)
        return SnapshotBuild(snapshot, self.tally.skipped, tuple(self.tally.examples))


def out_of_order(key: str) -> PlanError:
    # Compared as text: code point order equals the order of UTF-8 bytes, which is the store's order.
    return PlanError(
        "source", f"the listing is out of order at {shown_value(key)}; sort keys by their UTF-8 bytes"
    )


class _Labels:
    """The class label of each sample, shared by all label fields because all use the same folder."""

    def __init__(self, specs: Mapping[str, FieldSpec]) -> None:
        self.names = [name for name, spec in specs.items() if spec.kind == "label"]
        self._numbers: dict[str, int] = {}
        self._values = array("q")

    def add(self, name: str | None) -> None:
        """Add the class of the next sample; None if it has none."""
        self._values.append(-1 if name is None else self._numbers.setdefault(name, len(self._numbers)))

    @property
    def lacking(self) -> npt.NDArray[np.bool_]:
        """Which samples have no class: bool[samples]."""
        return np.array(self._values, dtype=np.int64) < 0

    def column(self, kept: Integers) -> LabelColumn:
        values = np.array(self._values, dtype=np.int64)[kept]
        known = list(self._numbers)
        used = sorted(known[number] for number in np.unique(values).tolist())
        renumbered = np.zeros(len(known), dtype=np.int64)
        renumbered[[self._numbers[name] for name in used]] = np.arange(len(used))
        return LabelColumn(renumbered[values], tuple(used))


def _complete_samples(
    columns: Mapping[str, Integers], labels: _Labels, name_of: Callable[[int], str], tally: _Tally
) -> Integers:
    """Return the samples that have every field, and count the others."""
    lacking = {name: column < 0 for name, column in columns.items()}
    lacking.update({name: labels.lacking for name in labels.names})
    any_lacking = np.logical_or.reduce(list(lacking.values()))
    skipped = np.flatnonzero(any_lacking)
    for sample in skipped[:_EXAMPLES].tolist():
        tally.skip(name_of(sample), [name for name, mask in lacking.items() if mask[sample]])
    tally.skipped += max(0, skipped.size - _EXAMPLES)
    kept = np.flatnonzero(~any_lacking)
    if kept.size > MAX_SAMPLES:
        raise PlanError("source", f"{kept.size} samples; a snapshot holds at most {MAX_SAMPLES}")
    return kept


def _order_columns(
    specs: Mapping[str, FieldSpec], found: Mapping[str, BytesColumn], labels: _Labels, kept: Integers
) -> Columns:
    label = labels.column(kept) if labels.names else None
    return {name: found[name] if label is None else found.get(name, label) for name in specs}
