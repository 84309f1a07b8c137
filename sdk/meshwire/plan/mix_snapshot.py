"""Concatenation of snapshots: the snapshot that a mix draws its parts from.

Law: a pure function, so the same parts always give the same hash. Samples keep their order, and each part
starts a new shard.
Invariant: classes of one name are one class; class numbers follow the order of all names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.dataset.derive_snapshot import SnapshotParts
from meshwire.dataset.snapshot import MAX_SAMPLES, BytesColumn, LabelColumn, ObjectTable
from meshwire.frame.columns import StringColumn
from meshwire.plan.loader_state import checked_hash
from meshwire.plan.mix import MAX_PARTS
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.dataset.snapshot import Snapshot


def concat_snapshots(parts: Sequence[Snapshot]) -> Snapshot:
    """Concatenate snapshots with the same fields. Raises PlanError."""
    first = parts[0]
    for number, part in enumerate(parts[1:]):
        _check_fields(first, part, f"concat[{number}]")
    samples = sum(part.samples for part in parts)
    if samples > MAX_SAMPLES:
        raise PlanError("concat", f"{samples} samples; a snapshot can have at most {MAX_SAMPLES}")
    starts, begin = [np.zeros(1, np.int64)], 0
    for part in parts:
        starts.append(part.shard_starts[1:] + begin)
        begin += part.samples
    names = [part.sample_name(sample) for part in parts for sample in range(part.samples)]
    return SnapshotParts(
        first.source,
        "joined",
        ObjectTable.concatenate([part.objects for part in parts]),
        np.concatenate(starts),
        {name: _column(parts, name) for name in sorted(first.fields)},
        first.specs,
        StringColumn.from_strings(names),
    ).seal()


def _check_fields(first: Snapshot, part: Snapshot, path: str) -> None:
    for name in sorted(first.fields.keys() | part.fields.keys()):
        labels = [isinstance(side.fields.get(name), LabelColumn) for side in (first, part)]
        if labels[0] is not labels[1] or not (name in first.fields and name in part.fields):
            raise PlanError(
                path,
                f"the field {shown_value(name)} is not in both, or is a class label in only one: "
                "select and rename until all have the same fields",
            )


def _column(parts: Sequence[Snapshot], name: str) -> BytesColumn | LabelColumn:
    columns = [part.fields[name] for part in parts]
    labels = [column for column in columns if isinstance(column, LabelColumn)]
    if labels:
        return _labels(labels)
    shifts = np.cumsum([0, *(len(part.objects) for part in parts)])
    found = [column for column in columns if isinstance(column, BytesColumn)]
    moved = [column.object.astype(np.int64) + shift for column, shift in zip(found, shifts, strict=False)]
    return BytesColumn(
        np.concatenate(moved).astype(np.int32),
        np.concatenate([column.offset for column in found]),
        np.concatenate([column.length for column in found]),
    )


def _labels(columns: Sequence[LabelColumn]) -> LabelColumn:
    classes = tuple(sorted({label for column in columns for label in column.classes}))
    number = {label: index for index, label in enumerate(classes)}
    values = [np.array([number[c] for c in column.classes], np.int64)[column.values] for column in columns]
    return LabelColumn(np.concatenate(values), classes)


def parse_hashes(value: Any, path: str) -> tuple[str, ...]:
    """Parse a list of snapshot hashes. Raises PlanError."""
    if not isinstance(value, list) or not 1 <= len(value) < MAX_PARTS:
        raise PlanError(path, f"expected a list of 1…{MAX_PARTS - 1} snapshot hashes")
    return tuple(checked_hash(item, f"{path}[{number}]") for number, item in enumerate(value))
