"""Statistics of a snapshot: sizes by field, samples by class and by shard.

Law: computed from the snapshot's document alone; no sample is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.dataset.snapshot import BytesColumn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.dataset.snapshot import LabelColumn, Snapshot
    from meshwire.frame.columns import Integers


@dataclass(frozen=True, slots=True)
class Spread:
    """Of whole numbers, such as bytes: the least, the middle one, the one that 99 % do not exceed, the
    greatest, and their sum."""

    least: int
    median: int
    p99: int
    most: int
    total: int

    @classmethod
    def from_values(cls, values: Integers) -> Spread:
        """Of at least one number; a rank's number is one of them, never between two."""
        last = values.size - 1
        middle, high = last // 2, -(-last * 99 // 100)
        ordered = np.partition(values, (0, middle, high, last))
        least, median, p99, most = (int(ordered[rank]) for rank in (0, middle, high, last))
        return cls(least, median, p99, most, int(values.sum()))

    def document(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("least", "median", "p99", "most", "total")}


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """`sizes`: bytes a sample by bytes field; `classes`: samples by class, by label field; `shards`: samples
    a shard. `empty`: by bytes field, samples whose bytes are none at all."""

    samples: int
    objects: int
    bytes: int
    shards: Spread
    sizes: Mapping[str, Spread]
    classes: Mapping[str, Mapping[str, int]]
    empty: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "samples": self.samples,
            "objects": self.objects,
            "bytes": self.bytes,
            "shards": self.shards.document(),
            "sizes": {name: spread.document() for name, spread in self.sizes.items()},
            "classes": {name: dict(counts) for name, counts in self.classes.items()},
            "empty": dict(self.empty),
        }


def snapshot_stats(snapshot: Snapshot) -> SnapshotStats:
    """Of a snapshot with at least one sample, as all are."""
    sizes: dict[str, Spread] = {}
    classes: dict[str, Mapping[str, int]] = {}
    empty: dict[str, int] = {}
    for name, column in snapshot.fields.items():
        if isinstance(column, BytesColumn):
            sizes[name] = Spread.from_values(column.length)
            empty[name] = int(np.count_nonzero(column.length == 0))
        else:
            classes[name] = _counted(column)
    shards = np.diff(snapshot.shard_starts)
    return SnapshotStats(
        snapshot.samples,
        len(snapshot.objects),
        snapshot.total_bytes,
        Spread.from_values(shards),
        sizes,
        classes,
        empty,
    )


def _counted(column: LabelColumn) -> Mapping[str, int]:
    counts = np.bincount(column.values, minlength=len(column.classes)).tolist()
    return dict(zip(column.classes, counts, strict=True))
