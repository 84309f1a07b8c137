"""Access hints: the order in which plans read objects of backed buckets, passed to the cache manager.

Hints cover the current epoch of a plan and the next one. The process that builds the frames of a plan sends
them to the cache manager of its own node; a snapshot with too many samples gives no hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece, cache_name
from meshd.util.async_tasks import BackgroundTasks
from meshwire.dataset.build_snapshot import BytesColumn
from meshwire.plan.epoch_order import snapshot_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from meshd.batches.read_ahead.read_hints import PlannedFrame
    from meshd.control.buckets import BucketTable
    from meshd.core.plan_record import Plan
    from meshd.origins.cache.cache_manager import CacheManager
    from meshwire.dataset.build_snapshot import Snapshot

_log = logging.getLogger("meshd.cache")
_MOST: Final = 200_000  # samples; their order takes about 200 bytes per read of the coordinator's memory
_PLANS: Final = 4  # plans with hints at a time; a further plan replaces the oldest
_ROUNDS: Final = 4  # rounds over the samples of a mix that are used as hints
_BEHIND: Final = 2  # batches of margin, since ranks are not all in the same step


def pieces_read(
    snapshot: Snapshot, samples: npt.NDArray[np.int64], shelves: dict[str, str]
) -> Iterator[Piece]:
    """Yield the pieces that reading these samples takes, in that order, of the buckets in `shelves`."""
    objects = snapshot.objects
    columns = [
        (
            column.objects_at(samples).tolist(),
            column.offsets_at(samples).tolist(),
            column.lengths_at(samples).tolist(),
        )
        for column in snapshot.fields.values()
        if isinstance(column, BytesColumn)
    ]
    for row in range(len(samples)):
        for numbers, offsets, lengths in columns:
            number = numbers[row]
            cache_bucket = shelves.get(objects.bucket_of(number))
            if cache_bucket is None:
                continue
            key, size = objects.keys[number], int(objects.sizes[number])
            if size <= CHUNK_BYTES:
                yield Piece(cache_bucket, key, -1, size)
                continue
            end = offsets[row] + max(lengths[row], 1)
            for chunk in range(offsets[row] // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
                yield Piece(cache_bucket, key, chunk, min(CHUNK_BYTES, size - chunk * CHUNK_BYTES))


def cache_names_of(snapshot: Snapshot, buckets: BucketTable) -> dict[str, str]:
    """Return the cache names of those buckets of a snapshot that have an origin."""
    found = {}
    for name, _ in snapshot.objects.keys_by_bucket():
        bucket = buckets.get(name)
        if bucket is not None and bucket.origin is not None:
            found[name] = cache_name(bucket)
    return found


def epoch_samples(plan: Plan, snapshot: Snapshot, epoch: int) -> npt.NDArray[np.int64]:
    """Return the samples of an epoch in the order in which they are read. A packed plan reads them as they
    are stored; of a mix that repeats its samples, only the first rounds are returned."""
    if plan.within:
        return np.arange(snapshot.samples, dtype=np.int64)
    every, count = snapshot_order(plan.spec, snapshot, epoch), min(plan.positions, _ROUNDS * snapshot.samples)
    return np.asarray(every.samples_at(np.arange(count, dtype=np.int64)), dtype=np.int64)


def _list_pieces(plan: Plan, snapshot: Snapshot, epoch: int, shelves: dict[str, str]) -> list[Piece]:
    return list(pieces_read(snapshot, epoch_samples(plan, snapshot, epoch), shelves))


class PlanReadHints:
    """Sends the reads of plans to the cache manager. One instance per node, in the coordinator."""

    def __init__(self, manager: CacheManager, buckets: BucketTable) -> None:
        self._cache_manager, self._buckets = manager, buckets
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._tasks = BackgroundTasks("plan-hints")

    def __repr__(self) -> str:
        return f"<PlanReadHints {len(self._epochs)} plans reported>"

    def frame_requested(self, frame: PlannedFrame) -> None:
        """Note that a frame of a plan is being built. Takes microseconds; longer work runs in the
        background."""
        plan, snapshot, address = frame.plan, frame.snapshot, frame.address
        if not self._buckets.has_backed_buckets() or max(snapshot.samples, plan.positions) > _MOST:
            return
        newest = self._epochs.get(plan.hash, -1)
        if address.epoch > newest:
            self._epochs[plan.hash] = address.epoch
            self._epochs.move_to_end(plan.hash)
            while len(self._epochs) > _PLANS:
                self._cache_manager.unplan(self._epochs.popitem(last=False)[0])
            self._tasks.spawn(self._tell(plan, snapshot, address.epoch), "tell")
        elif address.epoch == newest:
            step = max(0, address.step - _BEHIND)
            self._cache_manager.advance(
                plan.hash, min(1.0, (address.origin + step * address.batch) / plan.positions)
            )

    async def _tell(self, plan: Plan, snapshot: Snapshot, epoch: int) -> None:
        try:
            shelves = cache_names_of(snapshot, self._buckets)
            if not shelves:
                return
            both = [
                await asyncio.to_thread(_list_pieces, plan, snapshot, each, shelves)
                for each in (epoch, epoch + 1)
            ]
        except Exception:
            _log.exception("the read order of a plan could not be sent to the cache manager")
            return
        if self._epochs.get(plan.hash) == epoch:
            self._cache_manager.plan(plan.hash, *both)

    async def aclose(self) -> None:
        await self._tasks.aclose()
