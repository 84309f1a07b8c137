"""Mixes: how many positions of an epoch each part gets, and where its weights change.

Law: pure integers, exact at any epoch and position. In each block a part gets its share if that is a whole
number; otherwise the following blocks compensate, at most half a position off per halving of the parts.
Law: concatenation, the snapshot that a mix draws its parts from, is a pure function, so the same parts always
give the same hash. Samples keep their order, and each part starts a new shard.
Invariant: classes of one name are one class; class numbers follow the order of all names.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.dataset.derive_snapshot import SnapshotParts
from meshwire.dataset.snapshot import MAX_SAMPLES, BytesColumn, LabelColumn, ObjectTable
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    checked_hash,
    checked_integer,
    checked_object,
    required_field,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwire.dataset.snapshot import Snapshot


BLOCK = 65_536
MAX_BLOCK = 1 << 18
MAX_PARTS = 256
MAX_STAGES = 1000
MAX_WEIGHTS = 1 << 14  # over all stages together
MAX_WEIGHT = 1 << 32
MAX_POSITIONS = 1 << 40


@dataclass(frozen=True, slots=True)
class Stage:
    """The weights of the parts from `position` of `epoch` on: whole numbers, of which only the ratio
    matters.
    """

    weights: tuple[int, ...]
    epoch: int = 0
    position: int = 0

    @property
    def start(self) -> tuple[int, int]:
        return self.epoch, self.position


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of parts. `parts`: samples of each, in stored order; `stages` rise, and the first starts at
    epoch 0, position 0; `positions` per epoch, 0 for the number of samples or packed rows; `block`:
    positions over which quotas are kept.
    """

    parts: tuple[int, ...]
    stages: tuple[Stage, ...]
    positions: int = 0
    block: int = BLOCK


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `start` to `end` of an epoch, within one stage; blocks are counted from `start`."""

    start: int
    end: int
    weights: tuple[int, ...]


def parse_mix(value: Any) -> Mix:
    """Parse a mix. Raises PlanError with the path of the bad field."""
    document = checked_object(value, "mix", ("parts", "stages", "positions", "block"))
    parts = _integers(required_field(document, "parts", "mix"), "mix.parts", 1, MAX_POSITIONS)
    stages = required_field(document, "stages", "mix")
    if not isinstance(stages, list) or not 1 <= len(stages) <= MAX_STAGES:
        raise PlanError("mix.stages", f"expected a list of 1…{MAX_STAGES} stages")
    if len(stages) * len(parts) > MAX_WEIGHTS:
        raise PlanError(
            "mix.stages", f"{len(stages)} stages of {len(parts)} weights; at most {MAX_WEIGHTS} together"
        )
    found = tuple(_parse_stage(item, f"mix.stages[{at}]", len(parts)) for at, item in enumerate(stages))
    if found[0].start != (0, 0):
        raise PlanError("mix.stages[0]", "the first stage must begin at epoch 0, position 0")
    for at, (earlier, later) in enumerate(itertools.pairwise(found), 1):
        if later.start <= earlier.start:
            raise PlanError(f"mix.stages[{at}]", "stages must be in order, each later than the one before")
    return Mix(
        parts,
        found,
        checked_integer(document.get("positions", 0), "mix.positions", 0, MAX_POSITIONS),
        checked_integer(document.get("block", BLOCK), "mix.block", 2, MAX_BLOCK),
    )


def _parse_stage(value: Any, path: str, parts: int) -> Stage:
    document = checked_object(value, path, ("weights", "epoch", "position"))
    weights = _integers(required_field(document, "weights", path), f"{path}.weights", 0, MAX_WEIGHT)
    if len(weights) != parts:
        raise PlanError(
            f"{path}.weights", f"{len(weights)} weights for {parts} parts; give one weight per part"
        )
    if not any(weights):
        raise PlanError(f"{path}.weights", "all weights are 0; at least one must be positive")
    return Stage(
        weights,
        checked_integer(document.get("epoch", 0), f"{path}.epoch", 0, MAX_INTEGER),
        checked_integer(document.get("position", 0), f"{path}.position", 0, MAX_POSITIONS),
    )


def _integers(value: Any, path: str, low: int, high: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise PlanError(path, f"expected a list of 1…{MAX_PARTS} whole numbers")
    return tuple(checked_integer(item, f"{path}[{at}]", low, high) for at, item in enumerate(value))


def mix_document(mix: Mix) -> dict[str, Any]:
    """Return the mix as plain JSON values; `parse_mix` restores it."""
    stages = [
        {"epoch": stage.epoch, "position": stage.position, "weights": list(stage.weights)}
        for stage in mix.stages
    ]
    return {"parts": list(mix.parts), "stages": stages, "positions": mix.positions, "block": mix.block}


def shares(weights: Sequence[int], count: int) -> tuple[int, ...]:
    """Return how many of the first `count` positions each part has: they add up to `count`, and none
    decreases as `count` grows.

    The weights are halved recursively; each half gets its share of the positions, rounded to nearest.
    """
    if len(weights) == 1:
        return (count,)
    middle = len(weights) // 2
    left, whole = sum(weights[:middle]), sum(weights)
    first = (2 * count * left + whole) // (2 * whole) if whole else 0
    return (*shares(weights[:middle], first), *shares(weights[middle:], count - first))


def segments(mix: Mix, positions: int, epoch: int) -> tuple[Segment, ...]:
    """Split an epoch of this many positions where its weights change."""
    starts = [stage.start for stage in mix.stages]
    first = bisect.bisect_right(starts, (epoch, 0)) - 1
    inside = [s for s in mix.stages[first + 1 :] if s.epoch == epoch and s.position < positions]
    edges = itertools.pairwise([0, *(stage.position for stage in inside), positions])
    weights = [mix.stages[first].weights, *(stage.weights for stage in inside)]
    return tuple(Segment(begin, end, each) for (begin, end), each in zip(edges, weights, strict=True))


def draw_counts(mix: Mix, positions: int, epoch: int) -> tuple[int, ...]:
    """Return how many positions of an epoch each part has."""
    counts = [shares(part.weights, part.end - part.start) for part in segments(mix, positions, epoch)]
    return tuple(map(sum, zip(*counts, strict=True)))


@lru_cache(64)
def draw_counts_before(mix: Mix, positions: int, epoch: int) -> tuple[int, ...]:
    """Return how many positions each part had in all earlier epochs; epochs without a change are counted
    together."""
    changes = {number for stage in mix.stages for number in (stage.epoch, stage.epoch + 1)}
    marks = sorted({0, epoch, *(number for number in changes if number < epoch)})
    total = [0] * len(mix.parts)
    for begin, end in itertools.pairwise(marks):
        for part, count in enumerate(draw_counts(mix, positions, begin)):
            total[part] += (end - begin) * count
    return tuple(total)


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
