"""Snapshots of tables: a row of each file is a sample, its columns are places in the row's record.

Law: a column has one type in all files. A row is left out, and counted, if it has a null in a column whose
validity is not among the fields, or if the filter does not hold for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.dataset.build_snapshot import EmptySnapshotError, SnapshotBuild
from meshwire.dataset.fields import MAX_FIELDS, FieldSpec, class_name
from meshwire.dataset.snapshot import BytesColumn, LabelColumn, ObjectTable, RecordColumn, Records, Snapshot
from meshwire.formats.table_rows import merged_ids
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from meshwire.dataset.fields import Source
    from meshwire.formats.table_rows import TableColumn, TableIndex
    from meshwire.frame.columns import Integers

_EXAMPLES = 5
_NAMED = 8
_NESTED_NUMBERS = re.compile(r"(?:large_)?list<\w+: (?:large_)?list<\w+: (?:u?int\d+|double|float|halffloat)")


@dataclass(frozen=True, slots=True, eq=False)
class TableFile:
    """A file: its key and ETag, the size under which its copy is pinned, its index, and of the rows in that
    those that the filter keeps and their numbers in the file, if it has others."""

    key: str
    etag: str
    size: int
    index: TableIndex
    kept: npt.NDArray[np.bool_] | None = None
    numbers: Integers | None = None

    def row_numbers(self, rows: Integers) -> Integers:
        """Return the numbers in the file of rows of the index."""
        return rows if self.numbers is None else self.numbers[rows]


def resolve_fields(fields: Mapping[str, FieldSpec], index: TableIndex, key: str) -> dict[str, FieldSpec]:
    """Return the fields with the dtypes and shapes of their columns in the first file. Raises PlanError."""
    return {name: _resolve_spec(name, spec, index, key) for name, spec in fields.items()}


def _resolve_spec(name: str, spec: FieldSpec, index: TableIndex, key: str) -> FieldSpec:
    if spec.column is None:
        return spec
    column = find_column(f"fields.{name}", spec.column, index, key)
    if spec.view == "ids":
        if not column.text:
            raise PlanError(f"fields.{name}", f"{spec.column!r} is {column.kind}; only text has ids")
        return spec
    if spec.view == "valid":
        if not column.nullable:
            raise PlanError(
                f"fields.{name}", f"{spec.column!r} has no nulls by its schema, and so no mask: leave it out"
            )
        return replace(spec, dtype="bool", shape=())
    dtype = "" if column.kind in ("str", "bytes") else column.dtype
    shape = (None,) if column.shape is None else column.shape
    if spec.dtype and (spec.dtype, spec.shape) != (dtype, shape):
        raise PlanError(
            f"fields.{name}",
            f"{spec.column!r} gives {dtype or 'bytes'} ({column.kind}): use ops.cast",
        )
    return replace(spec, dtype=dtype, shape=shape if dtype else ())


def find_column(path: str, name: str, index: TableIndex, key: str) -> TableColumn:
    """Return a column of a file. Raises PlanError, with what to do, if it cannot be read."""
    if name in index.refused:
        kind = index.refused[name]
        advice = "write it as text, a number or a list of numbers"
        if _NESTED_NUMBERS.match(kind):
            advice = (
                "lists in lists need a fixed size, such as pa.list_(pa.list_(pa.float32(), 4)) for boxes; "
                "lists that differ in length: write the numbers as one list"
            )
        raise PlanError(path, f"{name!r} has the type {kind}, which is not supported: {advice}")
    if name not in index.columns:
        members = [known for known in (*index.columns, *index.refused) if known.startswith(f"{name}.")]
        if members:
            told = ", ".join(members[:8]) + ", …" * (len(members) > 8)
            raise PlanError(path, f"{name!r} has members: name those that you want, such as {told}")
        hint = suggestion(name, index.columns)
        raise PlanError(path, f"there is no column {name!r} in {shown_value(key)}{hint}")
    return index.columns[name]


def all_fields(index: TableIndex) -> dict[str, dict[str, str]]:
    """Return a field for each column, with the same name as far as field names allow it. Raises PlanError for
    too many columns."""
    found: dict[str, dict[str, str]] = {}
    for column in sorted(index.columns):
        name = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in column)[:50]
        name = name if name[:1].isalpha() else f"field_{name}"
        while name in found:
            name += "_"
        found[name] = {"column": column}
    _check_count(found)
    return found


def with_columns_left_out(built: SnapshotBuild, files: Sequence[TableFile]) -> SnapshotBuild:
    """Return the snapshot of all columns of the first file, with those of other types, and those that only
    others have, as examples of what was left out."""
    refused = sorted(files[0].index.refused)
    seen = {*files[0].index.columns, *refused}
    found = []
    if refused:
        names = ", ".join(map(shown_value, refused[:_NAMED])) + ", …" * (len(refused) > _NAMED)
        found.append(
            f"the column{'s' * (len(refused) > 1)} {names} of {files[0].key}: columns of such types have to "
            "be named in columns=, if they are supported"
        )
    for file in files[1:]:
        more = [name for name in file.index.columns if name not in seen]
        seen.update(more)
        found += [
            f"the column {shown_value(name)} of {file.key}, which {files[0].key} lacks" for name in more
        ]
    return replace(built, examples=(*found, *built.examples)[:_EXAMPLES]) if found else built


def with_ids(fields: Mapping[str, FieldSpec], columns: Sequence[str]) -> dict[str, FieldSpec]:
    """Return the fields with ids for these columns. Raises PlanError for one that no field has."""
    for number, column in enumerate(columns):
        if not any(spec.column == column and spec.view == "value" for spec in fields.values()):
            known = [spec.column for spec in fields.values() if spec.column]
            hint = suggestion(column, known)
            raise PlanError(f"ids[{number}]", f"no field has the column {shown_value(column)}{hint}")
    made = {}
    for name, spec in fields.items():
        chosen = spec.view == "value" and spec.column in columns
        made[name] = FieldSpec(name, "label", column=spec.column, view="ids") if chosen else spec
    return made


def with_masks(fields: Mapping[str, FieldSpec], index: TableIndex) -> dict[str, FieldSpec]:
    """Return the fields, and NAME_valid for each of a column that may hold nulls. Raises PlanError."""
    made = dict(fields)
    for name, spec in fields.items():
        column = index.columns.get(spec.column or "")
        if column is not None and column.nullable and spec.view != "valid":
            mask = f"{name}_valid"
            made.setdefault(mask, FieldSpec(mask, "bytes", column=spec.column, view="valid"))
    _check_count(made)
    return dict(sorted(made.items()))


def _check_count(fields: Mapping[str, object]) -> None:
    if len(fields) > MAX_FIELDS:
        raise PlanError(
            "fields", f"the table has {len(fields)} fields, a dataset at most {MAX_FIELDS}: name the columns"
        )


def build_from_tables(
    files: Iterable[TableFile], *, source: Source, fields: Mapping[str, FieldSpec]
) -> SnapshotBuild:
    """Build the snapshot of tables, in order of key; `fields` are resolved. Raises EmptySnapshotError,
    PlanError."""
    gathering = _Gathering(fields)
    for file in files:
        gathering.add(file, class_name(file.key, source.prefix))
    return gathering.build(source)


class _Gathering:
    """Collects the files that have samples."""

    def __init__(self, specs: Mapping[str, FieldSpec]) -> None:
        self.specs = specs
        self.wanted = {name: spec for name, spec in specs.items() if spec.column is not None}
        masked = {spec.column for spec in self.wanted.values() if spec.view == "valid"}
        self.strict = sorted({spec.column or "" for spec in self.wanted.values()} - masked)
        self.labelled = len(self.wanted) < len(specs)
        self.taken: list[tuple[TableFile, Integers, str]] = []
        self.kinds: dict[str, tuple[str, str]] = {}
        self.skipped, self.rows, self.examples = 0, 0, list[str]()

    def add(self, file: TableFile, folder: str | None) -> None:
        index = file.index
        self.rows += index.rows
        for name, spec in self.wanted.items():
            kind = find_column(f"fields.{name}", spec.column or "", index, file.key).kind
            first_kind, first = self.kinds.setdefault(spec.column or "", (kind, file.key))
            if kind != first_kind:
                message = f"{spec.column!r} is {first_kind} in {shown_value(first)}, and {kind} in {file.key}"
                raise PlanError(f"fields.{name}", f"{message}; it must have one type in all files")
        whole = np.ones(index.rows, np.bool_)
        for column in self.strict:
            if column in index.nulls:
                whole &= ~index.nulls[column]
        matching = np.ones(index.rows, np.bool_) if file.kept is None else file.kept
        self._note(file, matching & ~whole)
        rows = np.flatnonzero(whole & matching).astype(np.int64)
        if self.labelled and folder is None and rows.size:
            self.skipped += int(rows.size)
            self.examples.append(f"{shown_value(file.key)} is in no folder below the source: it has no class")
        elif rows.size:
            self.taken.append((file, rows, folder or ""))

    def _note(self, file: TableFile, left: npt.NDArray[np.bool_]) -> None:
        self.skipped += int(left.sum())
        for row in np.flatnonzero(left)[: max(0, _EXAMPLES - len(self.examples))].tolist():
            column = next(
                name for name in self.strict if name in file.index.nulls and file.index.nulls[name][row]
            )
            number = int(file.row_numbers(np.array(row)))
            self.examples.append(f"{file.key}: row {number} has null in {shown_value(column)}")

    def build(self, source: Source) -> SnapshotBuild:
        if not self.taken:
            raise self._empty(source)
        counts = [rows.size for _, rows, _ in self.taken]
        which = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        offsets = np.concatenate([file.index.record_offsets()[rows] for file, rows, _ in self.taken])
        records = Records(which, offsets)
        columns = {name: self._column(spec, which, records) for name, spec in self.specs.items()}
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        objects = ObjectTable(
            source.bucket,
            StringColumn.from_strings([file.key for file, _, _ in self.taken]),
            StringColumn.from_strings([file.etag for file, _, _ in self.taken]),
            np.array([file.size for file, _, _ in self.taken], np.int64),
        )
        names = StringColumn.from_numbers(
            np.concatenate([file.row_numbers(rows) for file, rows, _ in self.taken])
        )
        snapshot = Snapshot.from_parts(str(source), "table", objects, starts, columns, self.specs, names)
        return SnapshotBuild(snapshot, self.skipped, tuple(self.examples[:_EXAMPLES]))

    def _column(self, spec: FieldSpec, which: Any, records: Records) -> BytesColumn | LabelColumn:
        if spec.column is None:
            return self._folders()
        if spec.view == "ids":
            return self._ids(spec)
        first = self.taken[0][0].index
        column = first.columns[spec.column]
        if column.is_ragged and spec.view == "value":
            offsets = [file.index.value_offsets(spec.column)[rows] for file, rows, _ in self.taken]
            lengths = [file.index.lengths[spec.column][rows] for file, rows, _ in self.taken]
            return BytesColumn(which, np.concatenate(offsets), np.concatenate(lengths))
        distances = [self._distance(file.index, spec) for file, _, _ in self.taken]
        width = 1 if spec.view == "valid" else column.width
        if len(set(distances)) == 1:
            return RecordColumn(records, distances[0], width)
        apart = np.array(distances, np.int64)[which]
        return BytesColumn(which, records.offset + apart, np.full(which.size, width, np.int64))

    @staticmethod
    def _distance(index: TableIndex, spec: FieldSpec) -> int:
        values, valid = index.distances()
        return (valid if spec.view == "valid" else values)[spec.column or ""]

    def _ids(self, spec: FieldSpec) -> LabelColumn:
        name = spec.column or ""
        for file, _, _ in self.taken:
            if name not in file.index.ids:
                raise PlanError(
                    f"fields.{spec.name}",
                    f"{name!r} has too many texts for ids in {shown_value(file.key)}: leave it bytes",
                )
        codes = []
        for file, rows, _ in self.taken:
            found, values = file.index.ids[name]
            codes.append((found[rows], values))
        return LabelColumn(*merged_ids(codes))

    def _folders(self) -> LabelColumn:
        folders = [folder for _, _, folder in self.taken]
        classes = sorted(set(folders))
        numbers = np.array([classes.index(folder) for folder in folders], np.int64)
        return LabelColumn(np.repeat(numbers, [rows.size for _, rows, _ in self.taken]), tuple(classes))

    def _empty(self, source: Source) -> EmptySnapshotError:
        if not self.rows and not self.examples:
            return EmptySnapshotError("source", f"the tables in {source} have no rows")
        why = "".join(f"; {example}" for example in self.examples[:_EXAMPLES])
        fails = "is a sample" if self.skipped or not self.rows else "matches the filter"
        return EmptySnapshotError("source", f"no row of the {self.rows} in {source} {fails}{why}")
