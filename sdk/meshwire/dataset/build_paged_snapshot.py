"""Builds snapshots from the pages of shards.

Law: a pure function of the pages and of the shards' names, so building twice gives the same hash.
Invariant: a sample has every field. Those that lack one are on no page, but the notes of a page count them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild, out_of_order, wanted_part
from meshwire.dataset.fields import class_name, parse_source
from meshwire.dataset.member_pages import EXAMPLES
from meshwire.dataset.paged_snapshot import BESIDE_KINDS, PagedSnapshot, PageParts, PageTable
from meshwire.dataset.snapshot import MAX_SAMPLES, ObjectTable
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PageFacts
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.frame.columns import Integers

    Shard = tuple[str, str, PageFacts]


def build_from_pages(
    shards: Iterable[Shard],
    *,
    kind: SnapshotKind,
    source: str | Source,
    fields: Mapping[str, FieldSpec],
    open_pages: Callable[[PagedSnapshot, Sequence[int]], list[Page]],
) -> SnapshotBuild:
    """Build the snapshot of shards: (key, ETag, page) each, in order of key, or in that of the file that
    describes them; those without samples are left out.

    A class label is the folder of the shard below the source or, if its page has classes of its own, the
    sample's first folder within the shard. Raises EmptySnapshotError, and PlanError for shards out of order.
    """
    place, last = parse_source(source) if isinstance(source, str) else source, ""
    labelled = any(spec.kind == "label" for spec in fields.values())
    building = _Building(place, kind, fields)
    for key, etag, page in shards:
        if key <= last and kind not in BESIDE_KINDS:
            raise out_of_order(key)
        last = key
        folder = class_name(key, place.prefix) if labelled else ""
        building.add((key, etag, page), page.classes if folder is None else (folder,))
    return building.build(open_pages)


class _Building:
    """Collects the shards that have samples, with the classes of each."""

    def __init__(self, source: Source, kind: SnapshotKind, specs: Mapping[str, FieldSpec]) -> None:
        self.source, self.kind, self.specs = source, kind, specs
        self.parts = PageParts.of_fields(kind, specs)
        self.taken: list[Shard] = []
        self.classes: list[Sequence[str]] = []
        self.skipped, self.examples = 0, list[str]()
        self.files, self.extensions = 0, Counter[str]()
        self.kinds: tuple[str, tuple[str, ...]] | None = None  # of the first shard that tells them
        self.told: Mapping[str, str] = {}

    def add(self, shard: Shard, classes: Sequence[str]) -> None:
        """Add a shard, unless it has no samples or they have no class."""
        key, _, page = shard
        notes = page.notes
        self.files += notes.files
        self.extensions.update(notes.extensions)
        self.skipped += notes.skipped
        self.told = self.told or notes.told
        self.examples += [
            f"{name} lacks {self._lacking(parts)}" if parts else f"{key}: {name}"
            for name, parts in notes.examples
        ]
        if page.samples and classes:
            self._check_kinds(key, notes.kinds)
            self.taken.append(shard)
            self.classes.append(classes)
        elif page.samples:
            self.skipped += page.samples
            self.examples.append(f"{shown_value(key)} is in no folder below the source, so it has no class")

    def _check_kinds(self, key: str, kinds: tuple[str, ...]) -> None:
        """Raise PlanError if a part has another type than in an earlier shard."""
        if not kinds:
            return
        first, expected = self.kinds = self.kinds or (key, kinds)
        for part, (one, other) in enumerate(zip(expected, kinds, strict=True)):
            if one != other:
                name = next(name for name, spec in self.specs.items() if self.parts.part_of(spec) == part)
                message = (
                    f"{shown_value(self.parts.parts[part][0])} is {one} in {shown_value(first)}, and {other}"
                )
                raise PlanError(f"fields.{name}", f"{message} in {key}; it must have one type in all files")

    def _lacking(self, parts: Sequence[int]) -> str:
        """Return the names of the fields that these parts are, −1 for a class."""
        wanted = {
            name: -1 if spec.kind == "label" else self.parts.part_of(spec)
            for name, spec in self.specs.items()
        }
        names = [name for name, part in wanted.items() if part in parts]
        return ", ".join(sorted(names, key=lambda name: wanted[name] < 0))

    def build(self, open_pages: Callable[[PagedSnapshot, Sequence[int]], list[Page]]) -> SnapshotBuild:
        """Return the snapshot. Raises EmptySnapshotError, PlanError."""
        if not self.taken:
            raise self._empty()
        keys, etags, pages = zip(*self.taken, strict=True)
        samples = sum(page.samples for page in pages)
        if samples > MAX_SAMPLES:
            raise PlanError("source", f"{samples} samples; a snapshot holds at most {MAX_SAMPLES}")
        strings = StringColumn.from_strings(keys), StringColumn.from_strings(etags)
        objects = ObjectTable(self.source.bucket, *strings, np.array([page.size for page in pages], np.int64))
        label = self._label()
        labels = {name: label for name, spec in self.specs.items() if spec.kind == "label"}
        table = PageTable.from_facts(pages)
        snapshot = PagedSnapshot(str(self.source), self.kind, objects, table, self.specs, labels, open_pages)
        return SnapshotBuild(snapshot, self.skipped, tuple(self.examples[:EXAMPLES]))

    def _label(self) -> tuple[Integers, Integers, tuple[str, ...]]:
        classes = sorted(set().union(*self.classes))
        numbers = {name: number for number, name in enumerate(classes)}
        values = [numbers[name] for own in self.classes for name in own]
        bounds = np.zeros(len(self.classes) + 1, np.int64)
        np.cumsum([len(own) for own in self.classes], out=bounds[1:])
        return np.array(values, np.int64), bounds, tuple(classes)

    def _empty(self) -> EmptySnapshotError:
        source, examples = self.source, "".join(f"; {example}" for example in self.examples[:EXAMPLES])
        if self.kind == "lines":
            endings = " or ".join(sorted({f".{ext}" for spec in self.specs.values() for ext in spec.ext}))
            return EmptySnapshotError(
                "source", f"no line of text in the files of {source} that end in {endings}{examples}"
            )
        if self.kind in ("tfrecord", "parquet", *BESIDE_KINDS):
            named = {name: spec.part for name, spec in self.specs.items() if spec.kind == "bytes"}
            wanted = ", ".join(f"{name}: {shown_value(part)}" for name, part in named.items())
            there = ", ".join(f"{name} ({kind or 'empty'})" for name, kind in self.told.items())
            message = f"no record in {source} has all its fields ({wanted}). Existing parts: "
            return EmptySnapshotError("source", f"{message}{there or 'none'}{examples}")
        if not self.files:
            return EmptySnapshotError("source", f"no sample in {source}: it is empty")
        wanted = "; ".join(f"{name}: {wanted_part(spec)}" for name, spec in self.specs.items())
        there = ", ".join(
            f".{shown_value(ext)[1:-1]} ({count})" for ext, count in self.extensions.most_common(9) if ext
        )
        message = f"no sample in {source} has all its fields ({wanted}). Names there: {self.files}, "
        return EmptySnapshotError("source", f"{message}{there or 'none with an extension'}{examples}")
