"""One node's part of a relayout: it measures, moves one unit after the other, and measures again.

Law: a unit that is in order is not moved, so a new task continues where an earlier one stopped. Objects for
which the node is the first choice of readers are stored apart from its other copies, which an epoch does not
read. A unit is the least that a loader reads at once in `Blocks`: a shard of loose objects, or 32 MiB for
each disk. The order within a unit does not matter, because a window is read in the disk's own order.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.batches.read_ahead.extents import plan_reads
from meshd.batches.read_ahead.read_cost import MEDIA_RATE, SEEK_SECONDS, cost_of_reads
from meshd.core.api_errors import BatchError
from meshd.core.node_tasks import RPC_ERRORS, NodeTasks
from meshd.jobs.relayout.messages import (
    MAX_FAILURES,
    RELAYOUT,
    RELAYOUT_HERE,
    LayoutCost,
    RelayoutRequest,
    RelayoutStatus,
)
from meshd.rpc.peer_rpc import handler
from meshd.rpc.process_client import ProcessClient
from meshd.telemetry import metrics
from meshd.util.byte_rate import RateLimiter
from meshwire.dataset.snapshot import SAMPLES_PER_SHARD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
    from pathlib import Path

    from meshd.core.peer_source import PeerSource
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.disks.disk_type import RotationalDisks
    from meshd.store.engine.key_order_rewrite import KeyOrderRewriter, PlacedObject
    from meshd.store.records import Extent
    from meshd.util.clock import Clock


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


_PAGE: Final = 4096
_PIECE_BYTES: Final = 32 << 20  # in memory at a time
NOT_ROTATIONAL: Final = (
    "the node has no rotational disk (`--disk-type rotational` if it has one all the same)"
)
ELSEWHERE: Final = "on a solid-state disk"
Relayouts = NodeTasks[RelayoutRequest, RelayoutStatus]


class RelayoutContext(msgspec.Struct, frozen=True):
    """The dependencies of all tasks of a node."""

    rewriter: KeyOrderRewriter
    disks: RotationalDisks
    remote: PeerSource
    clock: Clock


def relayouts(context: RelayoutContext) -> Relayouts:
    """Return the tasks of a node."""
    return Relayouts(lambda request: RelayoutTask(context, request), RelayoutStatus(done=True), RELAYOUT_HERE)


class RelayoutTask:
    """The node's part of one relayout; `status` has the totals at any time."""

    def __init__(self, context: RelayoutContext, request: RelayoutRequest) -> None:
        self._context, self.request = context, request
        self.status = RelayoutStatus()
        self.rate = request.rate
        self._budget = RateLimiter(lambda: self.rate)

    def __repr__(self) -> str:
        status = self.status
        return f"<RelayoutTask {self.request.session}, {status.moved} of {status.to_move} objects>"

    async def run(self) -> None:
        """Measure, move the units that are scattered, and measure again. Raises BatchError, StoreError."""
        status, context = self.status, self._context
        if not context.disks.any_of(context.rewriter.roots.values()):
            status.refused = NOT_ROTATIONAL
            return
        by_disk = await self._measure()
        status.measured = True
        missing = await asyncio.to_thread(self._missing_space, by_disk)
        if self.request.measure or not status.to_move:
            status.refused = missing
            return
        if missing:
            raise BatchError("TooLarge", missing)
        for slots in self._groups():
            async for unit in self._units(slots):
                if self._is_scattered(unit):
                    await self._move(unit)
        status.after = LayoutCost()
        first, *_ = self._groups()
        async for unit in self._units(first):
            status.after += await asyncio.to_thread(present_cost, [each.extent for each in unit])

    def _groups(self) -> list[bytes | None]:
        """Return the slots of the objects that are laid out apart from each other: first those that an epoch
        reads here."""
        first = self._context.remote.slots_read_here(self.request.bucket, first_only=True)
        return [None] if first is None else [first.tobytes(), (~first).tobytes()]

    async def _units(
        self, slots: bytes | None, left_out: Counter[str] | None = None
    ) -> AsyncIterator[list[PlacedObject]]:
        """Yield the units of this node's objects that can be moved."""
        rewriter, request, after = self._context.rewriter, self.request, ""
        rotational = {disk for disk, root in rewriter.roots.items() if self._context.disks.any_of([root])}
        builder = UnitBuilder(len(rotational))
        while True:
            page = await asyncio.to_thread(rewriter.page, request.bucket, request.prefix, after, _PAGE, slots)
            if not page:
                break
            after, movable = page[-1].key, []
            for each in page:
                why = each.fixed or ("" if each.extent.disk in rotational else ELSEWHERE)
                if not why:
                    movable.append(each)
                elif left_out is not None:
                    left_out[why] += 1
            for unit in builder.add(movable):
                yield unit
        for unit in builder.rest():
            yield unit

    async def _measure(self) -> Counter[int]:
        """Count, and say what the layout costs. Returns the bytes to be moved on each disk."""
        status, left_out, by_disk = self.status, Counter[str](), Counter[int]()
        for number, slots in enumerate(self._groups()):
            async for unit in self._units(slots, left_out):
                extents = [each.extent for each in unit]
                present = await asyncio.to_thread(present_cost, extents)
                in_order = cost_in_order(extents, self._context.rewriter.segment_bytes)
                scattered = is_scattered(present, in_order)
                status.objects += len(unit)
                status.size += sum(extent.length for extent in extents)
                if not number:
                    status.before += present
                    status.expected += in_order if scattered else present
                if scattered:
                    status.to_move += len(unit)
                    for extent in extents:
                        by_disk[extent.disk] += extent.length
                    status.to_move_bytes = by_disk.total()
        status.left_out = dict(left_out)
        return by_disk

    def _missing_space(self, by_disk: Counter[int]) -> str:
        """Return what is to be done if the copies do not fit beside what is there, else "" (blocking)."""
        rewriter = self._context.rewriter
        for disk, size in sorted(by_disk.items()):
            free = rewriter.free_bytes(disk)
            if free <= size:
                return (
                    f"{rewriter.roots[disk]} needs {size:,} bytes for the copies, which replace the "
                    f"originals some minutes later, and has {max(0, free):,} above its reserve: delete "
                    "objects, add a disk, or put smaller prefixes into order one after the other"
                )
        return ""

    def _is_scattered(self, unit: list[PlacedObject]) -> bool:
        extents = [each.extent for each in unit]
        return is_scattered(
            present_cost(extents), cost_in_order(extents, self._context.rewriter.segment_bytes)
        )

    async def _move(self, unit: list[PlacedObject]) -> None:
        """Write a unit again, and rest as long as that took, so that others get half of the disk's time."""
        status, context = self.status, self._context
        for piece in _pieces(unit, min(_PIECE_BYTES, self.rate or _PIECE_BYTES)):
            await self._budget.acquire_bytes(sum(each.extent.length for each in piece))
            began = context.clock.monotonic()
            moved, damaged = await context.rewriter.move(self.request.bucket, piece)
            status.moved += len(piece) - len(damaged)
            status.moved_bytes += moved
            metrics.relayout_objects.labels("moved").inc(len(piece) - len(damaged))
            metrics.relayout_objects.labels("damaged").inc(len(damaged))
            metrics.relayout_bytes.inc(moved)
            status.damaged += len(damaged)
            for key in damaged[: MAX_FAILURES - len(status.failures)]:
                status.failures.append((key, "its bytes are damaged; the next scrub reports it"))
            await asyncio.sleep(context.clock.monotonic() - began)


def _pieces(unit: list[PlacedObject], least: int) -> Iterator[list[PlacedObject]]:
    """Yield a unit in pieces of about `least` bytes."""
    piece: list[PlacedObject] = []
    size = 0
    for each in unit:
        piece.append(each)
        size += each.extent.length
        if size >= least:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


class RelayoutHandlers:
    """Passes the calls of other nodes on to the coordinator behind `socket`. One instance per process."""

    def __init__(self, socket: Path) -> None:
        self._client = ProcessClient(socket, RPC_ERRORS)

    @handler(RELAYOUT)
    async def relayout(self, request: RelayoutRequest, context: CallContext) -> RelayoutStatus:
        return await self._client.call(RELAYOUT_HERE, request)
