"""Derived snapshots: select, rename and relabel fields, keep samples, join two sources, slice runs.

Law: pure functions, so the same derivation always gives the same hash. Samples keep their order, and
objects that no sample uses any more are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild
from meshwire.dataset.fields import MAX_FIELDS, parse_fields, parse_source
from meshwire.dataset.snapshot import BytesColumn, LabelColumn, Snapshot
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, checked_text, join_path, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from meshwire.dataset.fields import FieldSpec
    from meshwire.dataset.snapshot import ObjectTable, SnapshotKind
    from meshwire.frame.columns import Integers


Columns = dict[str, BytesColumn | LabelColumn]
_EXAMPLES = 5


@dataclass(frozen=True)
class SnapshotParts:
    """The parts from which a snapshot is sealed."""

    source: str
    kind: SnapshotKind
    objects: ObjectTable
    shard_starts: Integers
    fields: Columns
    specs: Mapping[str, FieldSpec]
    names: StringColumn | None

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> SnapshotParts:
        return cls(
            snapshot.source,
            snapshot.kind,
            snapshot.objects,
            snapshot.shard_starts,
            dict(snapshot.fields),
            snapshot.specs,
            snapshot.names,
        )

    def keep_samples(self, samples: Integers) -> SnapshotParts:
        """Keep only these samples; shards without samples are dropped."""
        starts = np.unique(np.searchsorted(samples, self.shard_starts)).astype(np.int64)
        names = None if self.names is None else StringColumn.from_strings(self.names.take_rows(samples))
        fields = {name: _take_samples(column, samples) for name, column in self.fields.items()}
        return replace(self, shard_starts=starts, fields=fields, names=names)

    def seal(self) -> Snapshot:
        """Build the snapshot, without unused objects."""
        objects, fields = _used(self.objects, self.fields)
        return Snapshot.from_parts(
            self.source, self.kind, objects, self.shard_starts, fields, self.specs, self.names
        )


def select_fields(snapshot: Snapshot, names: Sequence[str]) -> Snapshot:
    """Keep only these fields. Raises PlanError for an unknown field, or if no field has bytes."""
    for number, name in enumerate(names):
        _check_field(snapshot, name, f"select[{number}]")
    pieces = snapshot.pieces()
    chosen = sorted({*names, *(piece for name in names for piece in pieces.get(name, ()))})
    if not any(isinstance(snapshot.fields[name], BytesColumn) for name in chosen):
        raise PlanError("select", "keep at least one field with bytes: a label alone is not a dataset")
    parts = SnapshotParts.from_snapshot(snapshot)
    fields = {name: snapshot.fields[name] for name in chosen}
    return replace(parts, fields=fields, specs={name: snapshot.specs[name] for name in chosen}).seal()


def rename_fields(snapshot: Snapshot, names: Mapping[str, str]) -> Snapshot:
    """Rename fields, {old: new}. Raises PlanError."""
    for old, new in names.items():
        _check_field(snapshot, old, "rename")
        parse_fields({new: {"ext": "x"}})  # raises for an invalid name
    called = {name: names.get(name, name) for name in snapshot.fields}
    for name, pieces in snapshot.pieces().items():
        called |= {piece: f"{called[name]}{piece.removeprefix(name)}" for piece in pieces}
    if len(set(called.values())) != len(called):
        raise PlanError(
            "rename", "two fields would have the same name; rename the other one too, or drop it with select"
        )
    order = sorted(called, key=called.__getitem__)
    fields = {called[name]: snapshot.fields[name] for name in order}
    specs = {called[name]: _rename(snapshot.specs[name], called) for name in order}
    return replace(SnapshotParts.from_snapshot(snapshot), fields=fields, specs=specs).seal()


def _rename(spec: FieldSpec, called: Mapping[str, str]) -> FieldSpec:
    return replace(spec, name=called[spec.name], piece_of=called.get(spec.piece_of, ""))


def _check_field(snapshot: Snapshot, name: str, path: str) -> None:
    if name not in snapshot.own_fields():
        hint = suggestion(name, snapshot.own_fields())
        raise PlanError(path, f"the snapshot has no field {shown_value(name)}{hint}")


def keep_samples(snapshot: Snapshot, samples: Integers) -> Snapshot:
    """Keep only these samples, given as rising indices; shards without samples are dropped. Raises
    EmptySnapshotError."""
    if not samples.size:
        raise EmptySnapshotError("filter", f"none of the {snapshot.samples} samples is left")
    return SnapshotParts.from_snapshot(snapshot).keep_samples(samples).seal()


def _take_samples(column: BytesColumn | LabelColumn, samples: Integers) -> BytesColumn | LabelColumn:
    if isinstance(column, LabelColumn):
        return LabelColumn(column.values[samples], column.classes)
    return column.take(samples)


def relabel_classes(snapshot: Snapshot, maps: Mapping[str, Mapping[str, str | None]]) -> SnapshotBuild:
    """Rename classes of label fields, {field: {class: new name}}. Classes with the same new name are
    merged, samples of a class that maps to None are left out and counted, and unmapped classes keep their
    name. Class numbers follow the order of the new names. Raises PlanError, EmptySnapshotError.
    """
    kept = np.ones(snapshot.samples, np.bool_)
    fields = dict(snapshot.fields)
    for name, mapping in maps.items():
        column = fields[name] = _relabel(snapshot, name, mapping)
        kept &= column.values >= 0
    some = np.flatnonzero(kept)
    if not some.size:
        raise EmptySnapshotError("relabel", f"none of the {snapshot.samples} samples is left")
    renamed = replace(SnapshotParts.from_snapshot(snapshot), fields=fields)
    if some.size < snapshot.samples:
        renamed = renamed.keep_samples(some)
    return SnapshotBuild(renamed.seal(), snapshot.samples - int(some.size), ())


def _relabel(snapshot: Snapshot, name: str, mapping: Mapping[str, str | None]) -> LabelColumn:
    """Return the column with new class numbers, −1 for dropped classes."""
    path = join_path("relabel", name)
    _check_field(snapshot, name, path)
    column = snapshot.fields[name]
    if not isinstance(column, LabelColumn):
        raise PlanError(path, f"{shown_value(name)} is not a class label; use the op label_map")
    unknown = next((old for old in mapping if old not in column.classes), None)
    if unknown is not None:
        hint = suggestion(unknown, column.classes[:1000])
        raise PlanError(join_path(path, unknown), f"there is no class {shown_value(unknown)}{hint}")
    new = [mapping.get(old, old) for old in column.classes]
    classes = tuple(sorted({label for label in new if label is not None}))
    numbers = np.array([-1 if label is None else classes.index(label) for label in new], np.int64)
    return LabelColumn(numbers[column.values], classes)


def relative_names(snapshot: Snapshot) -> list[str]:
    """Return the sample names relative to the source, which two sources can have in common: `a/0001` for
    `s3://photos/train/a/0001.jpg` and for the member `a/0001.jpg` of a tar."""
    if snapshot.names is not None:
        return list(snapshot.names)
    prefix = parse_source(snapshot.source).prefix
    return [snapshot.sample_name(sample).removeprefix(prefix) for sample in range(snapshot.samples)]


def join_snapshots(
    left: Snapshot, right: Snapshot, left_keys: Sequence[str | None], right_keys: Sequence[str | None]
) -> SnapshotBuild:
    """Join each sample of `left` with the fields of the sample of `right` that has the same key, in the
    order of `left`; samples without a partner or a key are left out and counted.

    Raises PlanError if two fields have the same name or two samples of `right` the same key;
    EmptySnapshotError.
    """
    doubled = sorted(left.fields.keys() & right.fields.keys())
    if doubled:
        raise PlanError(
            "join", f"both have a field {shown_value(doubled[0])}; rename it or drop it with select first"
        )
    if len(left.own_fields()) + len(right.own_fields()) > MAX_FIELDS:
        raise PlanError("join", f"more than {MAX_FIELDS} fields in total")
    partners = _partners(right, right_keys)
    found = np.fromiter(
        (-1 if key is None else partners.get(key, -1) for key in left_keys), np.int64, left.samples
    )
    lacking = np.flatnonzero(found < 0)
    examples = tuple(
        f"{shown_value(left.sample_name(sample))} has no partner in the other source"
        for sample in lacking[:_EXAMPLES].tolist()
    )
    if lacking.size == left.samples:
        keys = f"{shown_value(next(iter(left_keys), None))} and {shown_value(next(iter(right_keys), None))}"
        raise EmptySnapshotError("join", f"the two sources have no key in common; the first keys are {keys}")
    kept = np.flatnonzero(found >= 0)
    snapshot = _side_by_side(keep_samples(left, kept), right, found[kept])
    return SnapshotBuild(snapshot, int(lacking.size), examples)


def _partners(right: Snapshot, keys: Sequence[str | None]) -> dict[str, int]:
    partners: dict[str, int] = {}
    for number, key in enumerate(keys):
        if key is not None and partners.setdefault(key, number) != number:
            one, two = right.sample_name(partners[key]), right.sample_name(number)
            raise PlanError(
                "join", f"{shown_value(one)} and {shown_value(two)} have the same key {shown_value(key)}"
            )
    return partners


def _side_by_side(left: Snapshot, right: Snapshot, partners: Integers) -> Snapshot:
    moved = np.arange(len(right.objects), dtype=np.int64) + len(left.objects)
    fields: Columns = dict(left.fields)
    for name, column in right.fields.items():
        taken = _take_samples(column, partners)
        if isinstance(taken, BytesColumn):
            taken = taken.renumber(moved)
        fields[name] = taken
    specs = {**left.specs, **right.specs}
    names = StringColumn.from_strings(relative_names(left))
    return SnapshotParts(
        left.source,
        "joined",
        left.objects.append(right.objects),
        left.shard_starts,
        {name: fields[name] for name in sorted(fields)},
        {name: specs[name] for name in sorted(specs)},
        names,
    ).seal()


def _used(objects: ObjectTable, fields: Columns) -> tuple[ObjectTable, Columns]:
    needed = np.zeros(len(objects), dtype=np.bool_)
    for column in fields.values():
        if isinstance(column, BytesColumn):
            needed[column.object] = True
    if needed.all():
        return objects, fields
    numbers = (np.cumsum(needed) - 1).astype(np.int64)
    moved: Columns = {
        name: column.renumber(numbers) if isinstance(column, BytesColumn) else column
        for name, column in fields.items()
    }
    return objects.take_rows(np.flatnonzero(needed)), moved


def parse_names(value: Any, path: str) -> tuple[str, ...]:
    """Parse a list of field names. Raises PlanError."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_FIELDS:
        raise PlanError(path, f"expected a list of 1…{MAX_FIELDS} field names")
    return tuple(checked_text(item, f"{path}[{number}]", at_most=100) for number, item in enumerate(value))


def parse_renames(value: Any, path: str) -> dict[str, str]:
    """Parse an object of new names by old ones. Raises PlanError."""
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_FIELDS:
        raise PlanError(path, 'expected an object of new names by old ones, such as {"jpg": "image"}')
    return {str(old): checked_text(new, join_path(path, old), at_most=100) for old, new in value.items()}


def parse_relabels(value: Any, path: str) -> dict[str, dict[str, str | None]]:
    """Parse {field: {class: new name, or null}}. Raises PlanError."""
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_FIELDS:
        raise PlanError(
            path, 'expected an object of fields, such as {"label": {"tabby": "cat", "rest": null}}'
        )
    return {str(name): _parse_relabel(item, join_path(path, name)) for name, item in value.items()}


def _parse_relabel(value: Any, path: str) -> dict[str, str | None]:
    if not isinstance(value, Mapping) or not value:
        raise PlanError(path, 'expected an object of classes, such as {"tabby": "cat", "rest": null}')
    return {
        str(old): None if new is None else checked_text(new, join_path(path, old), at_most=1000)
        for old, new in value.items()
    }


def slice_field(snapshot: Snapshot, name: str, samples: range) -> Snapshot:
    """Return the run `samples` with only the bytes field `name`."""
    column = _column(snapshot, name)
    chosen = np.arange(samples.start, samples.stop)
    used, which = np.unique(column.objects_at(chosen), return_inverse=True)
    places = BytesColumn(which.astype(np.int32), column.offsets_at(chosen), column.lengths_at(chosen))
    return Snapshot.from_parts(
        snapshot.source,
        snapshot.kind,
        snapshot.objects.take_rows(used.astype(np.int64)),
        np.array([0, len(samples)], dtype=np.int64),
        {name: places},
        {name: snapshot.specs[name]},
        snapshot.names_at(chosen),
    )


def content_digest(snapshot: Snapshot, name: str, samples: range) -> bytes:
    """Hash the bytes of a field over a run of samples by ETags, offsets and lengths; names do not matter."""
    column = _column(snapshot, name)
    chosen = np.arange(samples.start, samples.stop)
    hasher = hashlib.sha256()
    for number in column.objects_at(chosen).tolist():
        hasher.update(f"{snapshot.objects.etags[number]}\0".encode())
    hasher.update(column.offsets_at(chosen).tobytes())
    hasher.update(column.lengths_at(chosen).tobytes())
    return hasher.digest()


def referenced_objects(snapshot: Snapshot, names: Sequence[str], samples: range) -> list[int]:
    """Return the numbers of the objects that hold these bytes fields of a run of samples."""
    chosen = np.arange(samples.start, samples.stop)
    columns = [_column(snapshot, name).objects_at(chosen) for name in names]
    found: list[int] = np.unique(np.concatenate(columns)).tolist()
    return found


def _column(snapshot: Snapshot, name: str) -> BytesColumn:
    column = snapshot.fields[name]
    assert isinstance(column, BytesColumn)
    return column
