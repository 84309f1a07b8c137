"""Layout units: runs of keys that belong together on the disk, and what it costs to read one.

Law: pure. A unit is the least that a loader reads at once in `Blocks`: a shard of loose objects, or 32 MiB
for each disk. Within a unit the order on the disk does not matter: a window is read in the disk's own order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.batches.read_ahead.extents import plan_reads
from meshd.batches.read_ahead.read_cost import MEDIA_RATE, SEEK_SECONDS, cost_of_reads
from meshd.jobs.relayout.messages import LayoutCost
from meshwire.dataset.snapshot import SAMPLES_PER_SHARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.store.engine.relocation import PlacedObject
    from meshd.store.records import Extent

UNIT_BYTES: Final = 32 << 20
UNIT_OBJECTS: Final = SAMPLES_PER_SHARD
MAX_OBJECTS: Final = 1 << 16
"""Objects of a unit, however small they are: bounds its memory."""
_MEMBER_BYTES: Final = 5 << 10  # header, padding and alignment of a member in a data file, at most
_WORTHWHILE_RATIO: Final = 1.3
_WORTHWHILE_SEEKS: Final = 3


class UnitBuilder:
    """Collects objects, in order of key, into units. `disks`: how many they are spread over."""

    def __init__(self, disks: int) -> None:
        self._least = UNIT_BYTES * max(1, disks)
        self._unit: list[PlacedObject] = []
        self._bytes = 0

    def add(self, objects: Iterable[PlacedObject]) -> Iterator[list[PlacedObject]]:
        """Add objects; yields the units that they complete."""
        for each in objects:
            self._unit.append(each)
            self._bytes += each.extent.length
            enough = len(self._unit) >= UNIT_OBJECTS and self._bytes >= self._least
            if enough or len(self._unit) >= MAX_OBJECTS:
                yield from self.rest()

    def rest(self) -> Iterator[list[PlacedObject]]:
        """Yield the unit that is not complete, if it has objects."""
        if self._unit:
            unit, self._unit, self._bytes = self._unit, [], 0
            yield unit


def present_cost(extents: Sequence[Extent]) -> LayoutCost:
    """Return what it costs to read these extents at once, each disk in its own order."""
    disks: dict[int, list[Extent]] = defaultdict(list)
    for extent in extents:
        if extent.length:
            disks[extent.disk].append(extent)
    total = LayoutCost(objects=len(extents))
    for found in disks.values():
        files = np.unique([extent.file for extent in found], return_inverse=True)[1]
        offsets = np.array([extent.offset for extent in found], np.int64)
        lengths = np.array([extent.length for extent in found], np.int64)
        cost = cost_of_reads(plan_reads(files, offsets, lengths), len(found), float(lengths.sum()))
        total += LayoutCost(0, cost.read, cost.seeks, cost.disk_seconds, cost.media_seconds)
    return total


def cost_in_order(extents: Sequence[Extent], segment_bytes: int) -> LayoutCost:
    """Return what it costs, at most, to read these extents if those of a disk are in one piece, or in pieces
    of a data file's size."""
    sizes: dict[int, int] = defaultdict(int)
    wanted = 0
    for extent in extents:
        if extent.length:
            sizes[extent.disk] += extent.length + _MEMBER_BYTES
            wanted += extent.length
    read, seeks = sum(sizes.values()), sum(1 + size // segment_bytes for size in sizes.values())
    seconds = seeks * SEEK_SECONDS + read / MEDIA_RATE
    return LayoutCost(len(extents), read, seeks, seconds, wanted / MEDIA_RATE)


def is_scattered(present: LayoutCost, in_order: LayoutCost) -> bool:
    """Return whether a unit is worth writing again."""
    saved = present.disk_seconds - in_order.disk_seconds
    ratio = _WORTHWHILE_RATIO * in_order.disk_seconds
    return present.disk_seconds > ratio and saved >= _WORTHWHILE_SEEKS * SEEK_SECONDS
