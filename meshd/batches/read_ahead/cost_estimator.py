"""ReadCostEstimator: what orders of a snapshot would cost this node's rotational disks, before anyone trains.

Law: an estimate reads the index alone, never a sample, and changes nothing. It cuts windows as the scheduler
does for a job that has the budget to itself, and takes all bytes for not cached. Its work is bounded: a large
epoch is estimated from windows that are spread over it, large windows from a run of their samples.
Bytes on other nodes, in compressed archives without a decompressed copy, and on other kinds of disks are left
out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.read_ahead.read_cost import ReadCost, cost_of_reads
from meshd.batches.read_ahead.windows import (
    MAX_WINDOW_SPAN,
    MIN_WINDOW_BYTES,
    awaited_size,
    cut_window,
    first_size,
    fitting_size,
    next_size,
)
from meshd.core.api_errors import busy
from meshd.core.document_store import RESERVED_BUCKET
from meshd.core.sample_locations import bytes_columns
from meshd.datasets.archives.archive_service import copy_key
from meshwire.dataset.archive_paths import TABLE_COPY_UNIT, archive_kind, copy_kind, is_table, pinned_table
from meshwire.dataset.snapshot import LabelColumn
from meshwire.plan.shuffle import (
    BlocksOrder,
    ShuffleSpec,
    StoredOrder,
    parse_shuffle,
    shuffle_document,
    shuffle_order,
)
from meshwire.strict_json import PlanError, checked_integer, checked_object, read_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from meshd.auth.identity import Caller
    from meshd.batches.read_ahead.own_samples import OwnSamples
    from meshd.batches.read_ahead.window_lookup import WindowLookup
    from meshd.batches.read_ahead.windows import CutWindow, Integers
    from meshd.datasets.service import DatasetService
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.archive_paths import CopyKind
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.shuffle import Indices, SampleOrder

MAX_ORDERS: Final = 4
MAX_ROWS: Final = 1 << 15
"""Samples that are looked up for one order."""
MAX_WINDOWS: Final = 64
_SPREAD: Final = 16  # windows of a large epoch
_BATCH: Final = 256
_MAX_BATCH: Final = 1 << 24
_SEED = 0


class CostRequest(msgspec.Struct, frozen=True):
    """The orders to estimate; None stands for blocks of as many shards as a window holds. `batch`: rows of a
    step, which the size of the first windows depends on."""

    shuffles: tuple[ShuffleSpec | None, ...]
    batch: int = _BATCH


def parse_cost_request(body: bytes) -> CostRequest:
    """Parse `{"shuffles": [...], "batch": N}`. Raises PlanError."""
    document = checked_object(read_json(body), "", ("shuffles", "batch"))
    shuffles = document.get("shuffles")
    if not isinstance(shuffles, list) or not 1 <= len(shuffles) <= MAX_ORDERS:
        raise PlanError("shuffles", f"expected a list of 1 to {MAX_ORDERS} shuffles")
    parsed = tuple(None if each == {"kind": "blocks"} else parse_shuffle(each) for each in shuffles)
    return CostRequest(parsed, checked_integer(document.get("batch", _BATCH), "batch", 1, _MAX_BATCH))


class StoredCopies:
    """The decompressed copies of archives that exist already."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def decompressed(self, bucket: str, key: str, record: Record, pinned: int | None = None) -> Record:
        """Return the copy of an archive. Raises BatchError Busy if it would have to be made."""
        kind: CopyKind | None = copy_kind(key) or archive_kind(key)
        if is_table(key) and pinned is not None and pinned % TABLE_COPY_UNIT == 0:
            made, size = pinned_table(pinned)
            table = self._store.get(RESERVED_BUCKET, copy_key(made, record))
            if table is not None and table.size == size:
                return table
        found = None if kind is None else self._store.get(RESERVED_BUCKET, copy_key(kind, record))
        if found is None:
            raise busy(f"s3://{bucket}/{key} has no decompressed copy")
        return found


class ReadCostEstimator:
    """Answers what orders cost; one per worker, one estimate at a time. `lookup`: None if the node has no
    rotational disk; `budget`: bytes of page cache that windows may use; `own`: finds the samples that the
    node reads itself."""

    def __init__(
        self,
        datasets: DatasetService,
        lookup: WindowLookup | None,
        node: str,
        budget: int,
        own: OwnSampleFinder | None = None,
    ) -> None:
        self._datasets, self._lookup, self._node = datasets, lookup, node
        self._share, self._own = max(budget, 2 * MIN_WINDOW_BYTES), own or OwnSampleFinder()
        self._turn = asyncio.Semaphore(1)

    def __repr__(self) -> str:
        return f"<ReadCostEstimator of {self._node} over {self._lookup!r}>"

    async def estimate(self, caller: Caller, digest: str, body: bytes) -> dict[str, Any]:
        """Return the answer to `POST /-/snapshots/{hash}/read-cost`.

        Raises PlanError for a wrong body, and BatchError NoSuchSnapshot, AccessDenied: the caller must be
        allowed to read all objects.
        """
        request = parse_cost_request(body)
        snapshot = await self._datasets.snapshot(caller, digest)
        answer: dict[str, Any] = {"snapshot": digest, "node": self._node, "rotational": False, "orders": []}
        if self._lookup is None:
            return answer
        orders = await self.estimate_orders(snapshot, request.shuffles, request.batch)
        rotational = any(order["samples"] for order in orders)
        return answer | {"rotational": rotational, "orders": orders if rotational else []}

    @property
    def has_rotational_disks(self) -> bool:
        """Whether the node has a rotational disk."""
        return self._lookup is not None

    async def estimate_orders(
        self, snapshot: Snapshot, shuffles: Sequence[ShuffleSpec | None], batch: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the cost of each order, as plain JSON values; see `CostRequest`. The node must have a
        rotational disk."""
        assert self._lookup is not None
        async with self._turn:
            return [await self._estimate(self._lookup, snapshot, each, batch or _BATCH) for each in shuffles]

    async def _estimate(
        self, lookup: WindowLookup, snapshot: Snapshot, shuffle: ShuffleSpec | None, batch: int
    ) -> dict[str, Any]:
        own = self._own.find(snapshot, in_parts=True)
        if shuffle is None:
            size = int(fitting_size(self._share, self._share) / (own.fraction or 1 if own else 1))
            shuffle = ShuffleSpec("blocks", fitting_shards(snapshot, size))
        order = await asyncio.to_thread(shuffle_order, shuffle, snapshot.shard_starts, _SEED, 0)
        total, covered, windows, largest = ReadCost(), 0.0, 0, 0
        cuts = _Cuts(snapshot, order, batch, self._share, own)
        async for window, samples in cuts.windows():
            cost = ReadCost()
            of_samples = await asyncio.to_thread(_total_bytes, snapshot, samples)
            for part in await lookup.cold_reads(snapshot, samples):
                fraction = part.wanted / of_samples if of_samples else 0.0
                cost += cost_of_reads(part.reads, fraction * samples.size, part.wanted)
            total += cost
            covered += (window.end - window.first) * samples.size / (window.samples.size or 1)
            covered += 0 if window.samples.size else window.end - window.first
            windows, largest = windows + 1, max(largest, window.bytes)
        scaled = total.scaled(order.n / covered) if covered else total
        return {
            "shuffle": shuffle_document(shuffle),
            **scaled.document(),
            "windows": windows,
            "window_bytes": largest,
            "estimated": covered < order.n - 0.5,
            "randomness": await asyncio.to_thread(_randomness, snapshot, order),
        }


class _Cuts:
    """The windows of an epoch that an estimate looks up. `own`: the node's samples; None: all."""

    def __init__(
        self, snapshot: Snapshot, order: SampleOrder, batch: int, share: int, own: OwnSamples | None
    ) -> None:
        self._snapshot, self._order, self._batch, self._share = snapshot, order, batch, share
        self._own, self._fraction = own, own.fraction if own else 1.0

    async def windows(self) -> AsyncIterator[tuple[CutWindow, Integers]]:
        """Yield windows, each with those of its samples that are looked up."""
        order, batch = self._order, self._batch * self._fraction
        size, usual = awaited_size(order, batch, self._snapshot, self._fraction), first_size(order, batch)
        if not self._is_small():
            async for found in self._spread():
                yield found
            return
        first = 0
        while first < order.n:
            cut = await asyncio.to_thread(
                cut_window, self._snapshot, order, first, fitting_size(size, self._share), self._own
            )
            yield cut, cut.samples
            first, size = cut.end, next_size(order, size, self._share, usual)

    def _steady_size(self) -> int:
        """Return the bytes of windows far from the beginning of the epoch."""
        whole = MIN_WINDOW_BYTES if isinstance(self._order, StoredOrder) else self._share
        return fitting_size(whole, self._share)

    def _is_small(self) -> bool:
        typical, whole = self._steady_size(), self._snapshot.total_bytes * self._fraction
        if isinstance(self._order, BlocksOrder):
            block = int(whole) // max(1, self._order.window_ends.size)
            typical = min(typical, max(block, MIN_WINDOW_BYTES))
        few = self._order.n * self._fraction <= MAX_ROWS and self._order.n <= MAX_WINDOW_SPAN
        return few and whole <= MAX_WINDOWS * typical

    async def _spread(self) -> AsyncIterator[tuple[CutWindow, Integers]]:
        """Yield evenly spaced windows, each as a run of its samples in stored order."""
        order, size = self._order, self._steady_size()
        rows = max(1, int(size * order.n / max(1, self._snapshot.total_bytes)))
        span = min(MAX_WINDOW_SPAN, rows / (self._fraction or 1))
        count = max(1, min(_SPREAD, MAX_ROWS // rows, int(MAX_WINDOW_SPAN / span)))
        most = MAX_ROWS // count
        for number in range(count):
            first = order.n * number // count
            if isinstance(order, BlocksOrder):
                first = _block_start(order, first)
            cut = await asyncio.to_thread(cut_window, self._snapshot, order, first, size, self._own)
            samples = np.sort(cut.samples)
            skipped = int((samples.size - most) * (number + 0.5) / count)
            yield cut, samples if samples.size <= most else samples[skipped : skipped + most]


def fitting_shards(snapshot: Snapshot, size: int) -> int:
    """Return how many shards of a snapshot a window of `size` bytes holds, rounded down to a power of two; at
    least 1."""
    fitting = max(1, size * snapshot.shards // max(1, snapshot.total_bytes))
    return min(1 << (fitting.bit_length() - 1), max(1, snapshot.shards))


def _block_start(order: BlocksOrder, position: int) -> int:
    """Return where the block begins that a position is in."""
    ends = order.window_ends
    number = int(np.searchsorted(ends, position, side="right"))
    return int(ends[number - 1]) if number else 0


def _randomness(snapshot: Snapshot, order: SampleOrder) -> dict[str, float]:
    """Return figures relative to a full shuffle: `distance`, `shard_runs` and, if a field is a class label,
    `label_runs`."""
    starts = snapshot.shard_starts
    runs = relative_run_length(
        order, np.diff(starts), lambda samples: np.searchsorted(starts, samples, side="right") - 1
    )
    found = {"distance": relative_distance(order), "shard_runs": runs}
    labels = [column for column in snapshot.fields.values() if isinstance(column, LabelColumn)]
    if labels:
        label = labels[0]
        found["label_runs"] = relative_run_length(order, label.counts(), label.values_at)
    return {name: round(value, 4) for name, value in found.items()}


def _total_bytes(snapshot: Snapshot, samples: Integers) -> int:
    return sum(int(column.lengths_at(samples).sum()) for column in bytes_columns(snapshot).values())


POSITIONS: Final = 1 << 16
"""Positions of an epoch that are looked at."""
_STRETCH: Final = 1 << 10  # consecutive positions within which runs are counted


def relative_distance(order: SampleOrder) -> float:
    """Return how far samples are from their places in stored order: the mean, divided by that of a full
    shuffle, a third of the epoch. 0 in stored order."""
    if order.n < 2:
        return 1.0
    positions = np.unique(np.linspace(0, order.n - 1, min(order.n, POSITIONS)).astype(np.int64))
    moved = np.abs(order.samples_at(positions) - positions)
    return float(moved.mean()) * 3 / order.n


def relative_run_length(order: SampleOrder, sizes: Indices, group_of: Callable[[Indices], Indices]) -> float:
    """Return how long runs of samples of the same group are: the mean, divided by that of a full shuffle.

    `sizes`: int64[groups], the number of samples of each group; `group_of`: from samples int64[k] to their
    groups, such as shards or classes. Runs that are longer than the positions looked at count as so long.
    """
    counts = sizes.astype(np.float64)
    total = float(counts.sum())
    if total < 2:
        return 1.0
    expected = 1.0 - float((counts * (counts - 1)).sum()) / (total * (total - 1))
    if counts.max() == total:  # a single group
        return 1.0
    changes = pairs = 0
    for first in _stretches(order.n):
        stretch = np.arange(first, min(first + _STRETCH, order.n), dtype=np.int64)
        found = group_of(order.samples_at(stretch))
        changes += int(np.count_nonzero(found[1:] != found[:-1]))
        pairs += found.size - 1
    return expected * pairs / max(changes, 1)


def _stretches(n: int) -> Indices:
    """Return where the stretches begin that are looked at: all of them, or some at even distances."""
    firsts = np.arange(0, n, _STRETCH, dtype=np.int64)
    return firsts[:: max(1, -(-firsts.size * _STRETCH // POSITIONS))]
