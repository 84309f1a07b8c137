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

    from meshwire.dataset.snapshot import Snapshot
    from meshwire.frame.columns import Integers


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of whole numbers, such as byte counts: minimum, median, 99th percentile, maximum and
    sum."""

    least: int
    median: int
    p99: int
    most: int
    total: int

    @classmethod
    def from_values(cls, values: Integers) -> Spread:
        """Compute the spread of at least one number; each percentile is one of the values, never
        interpolated."""
        last = values.size - 1
        middle, high = last // 2, -(-last * 99 // 100)
        ordered = np.partition(values, (0, middle, high, last))
        least, median, p99, most = (int(ordered[rank]) for rank in (0, middle, high, last))
        return cls(least, median, p99, most, int(values.sum()))

    def document(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("least", "median", "p99", "most", "total")}


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """Statistics of a snapshot. `sizes`: bytes per sample, by bytes field; `classes`: samples per class, by
    label field; `shards`: samples per shard; `empty`: samples with zero bytes, by bytes field."""

    samples: int
    objects: int
    bytes: int
    shards: Spread
    sizes: Mapping[str, Spread]
    classes: Mapping[str, Mapping[str, int]]
    empty: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """Return the statistics as plain JSON values."""
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
    """Compute the statistics of a snapshot, which always has at least one sample."""
    sizes: dict[str, Spread] = {}
    classes: dict[str, Mapping[str, int]] = {}
    empty: dict[str, int] = {}
    for name in snapshot.own_fields():
        column = snapshot.fields[name]
        if isinstance(column, BytesColumn):
            lengths = snapshot.lengths_of(name)
            sizes[name] = Spread.from_values(lengths)
            empty[name] = int(np.count_nonzero(lengths == 0))
        else:
            counts = column.counts().tolist()
            classes[name] = dict(zip(column.classes, counts, strict=True))
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
