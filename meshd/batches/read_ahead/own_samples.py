"""OwnSamples: which samples of a snapshot this node reads from its own disks, by the cluster map, and of how
many it builds the rows.

Law: a function of map and keys; the index is not asked. It decides what is read ahead, never what is read:
after a change of the map, a sample may be read when its batch is built.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.core.peer_source import SINGLE_NODE
from meshd.core.sample_locations import bytes_columns, main_objects
from meshd.transform.decoded_cache.sample_set import OwnRows
from meshwire.cluster.routes import slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.core.peer_source import PeerSource
    from meshwire.dataset.snapshot import Snapshot

    Integers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

_SNAPSHOTS: Final = 16
_UNKNOWN: Final = -1
COUNTED_OBJECTS: Final = 32768
"""Of more objects, the slots are as even as anybody needs: their owners are not looked up one by one."""
_AT_A_TIME: Final = 1 << 18


class OwnSamples:
    """The node's samples of one snapshot under one map. `masks`: bool[slots] of each bucket; `slots`:
    int32[objects], of which the unknown ones are filled in when they are needed."""

    def __init__(self, snapshot: Snapshot, masks: Sequence[Flags], slots: npt.NDArray[np.int32]) -> None:
        self._snapshot, self._slots = snapshot, slots
        self._masks = np.stack(masks)
        self.fraction = float(self._masks.mean())
        """About how much of the snapshot is the node's: 0 if nothing is."""

    def __repr__(self) -> str:
        return f"<OwnSamples, {self.fraction:.3g} of {self._snapshot!r}>"

    def includes(self, samples: Integers) -> Flags:
        """Return bool[n]: the samples of which the node reads at least one field (blocking)."""
        found = np.zeros(samples.size, np.bool_)
        asked: npt.NDArray[np.int32] | None = None
        for column in bytes_columns(self._snapshot).values():  # their objects are mostly the same
            objects = column.objects_at(samples)
            if asked is None or not np.array_equal(objects, asked):
                found |= self._own_objects(objects)
            asked = objects
        return found

    @property
    def masks(self) -> Flags:
        """The node's slots of each bucket: bool[buckets, slots]."""
        return self._masks

    def builds(self, samples: Integers) -> Flags:
        """Return bool[n]: the samples with most of their bytes in objects of the node, whose rows it builds
        when each node builds its own (blocking)."""
        return self._own_objects(main_objects(self._snapshot, samples).astype(np.int32))

    def count_rows(self) -> int:
        """Return the number of samples of the snapshot for which `builds` is true (blocking); an estimate if
        there are more than COUNTED_OBJECTS objects.
        """
        samples, table = self._snapshot.samples, self._snapshot.objects
        if len(table) > COUNTED_OBJECTS:
            every = None if table.which is None else np.bincount(table.which, minlength=len(self._masks))
            return round(samples * float(np.average(self._masks.mean(axis=1), weights=every)))
        held = np.zeros(len(table), np.int64)
        for start in range(0, samples, _AT_A_TIME):
            some = np.arange(start, min(samples, start + _AT_A_TIME), dtype=np.int64)
            held += np.bincount(main_objects(self._snapshot, some), minlength=len(table))
        objects = np.flatnonzero(held).astype(np.int32)
        return int(held[objects[self._own_objects(objects)]].sum())

    def _own_objects(self, objects: npt.NDArray[np.int32]) -> Flags:
        slots, table = self._slots[objects], self._snapshot.objects
        if (slots == _UNKNOWN).any():
            numbers = np.unique(objects[slots == _UNKNOWN]).astype(np.int64)
            count = self._masks.shape[1]
            keys = zip(numbers.tolist(), table.keys.take_rows(numbers), strict=True)
            self._slots[numbers] = [slot_of(table.bucket_of(number), key, count) for number, key in keys]
            slots = self._slots[objects]
        found: Flags = self._masks[0 if table.which is None else table.which[objects], slots]
        return found


class OwnSampleFinder:
    """Finds a node's samples of snapshots. `remote`: knows the map. Use on one event loop only."""

    def __init__(self, remote: PeerSource = SINGLE_NODE) -> None:
        self._remote = remote
        self._slots: OrderedDict[tuple[str, int], npt.NDArray[np.int32]] = OrderedDict()
        self._rows: OrderedDict[str, tuple[Flags, OwnRows]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<OwnSampleFinder over {self._remote!r}>"

    def find(self, snapshot: Snapshot, *, in_parts: bool) -> OwnSamples | None:
        """Return the node's samples under the current map; None if it reads all. `in_parts`: each node builds
        the rows that it is asked for first; else it builds whole batches, and reads all that it has."""
        masks = [
            self._remote.slots_read_here(bucket, first_only=in_parts) for bucket in snapshot.objects.buckets
        ]
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            return None
        key = snapshot.hash, known[0].size
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots[key] = np.full(len(snapshot.objects), _UNKNOWN, np.int32)
        self._slots.move_to_end(key)
        if len(self._slots) > _SNAPSHOTS:
            self._slots.popitem(last=False)
        return OwnSamples(snapshot, known, slots)

    async def find_rows(self, snapshot: Snapshot) -> OwnRows | None:
        """Return the samples whose rows this node builds under the current map, if each node builds its own;
        None if it builds all. While the map gives it the same slots, this is a look-up and returns the same
        object."""
        own = self.find(snapshot, in_parts=True)
        if own is None:
            return None
        masks, rows = self._rows.get(snapshot.hash, (None, None))
        if masks is None or rows is None or not np.array_equal(masks, own.masks):
            rows = OwnRows(await asyncio.to_thread(own.count_rows), own.builds)
            self._rows[snapshot.hash] = own.masks, rows
            self._rows.move_to_end(snapshot.hash)
            if len(self._rows) > _SNAPSHOTS:
                self._rows.popitem(last=False)
        return rows
