"""Anti-entropy: compares the local store with one peer and fetches the missing items.

Law: a sync can be interrupted and restarted at any time. It compares digests by slot, then the names of
slots that differ, then fetches metadata and data. Fetched items are applied as a replica applies
changes, so concurrent client writes are never undone. Seam: `SyncPeer`; a local `SyncSource` is one
without a network.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.cluster.rebalance.fetch_windows import LARGE, STREAMS, WINDOW_ITEMS, FetchWindows
from meshd.cluster.rebalance.sync_plan import missing_items, surplus_items
from meshd.cluster.rebalance.sync_source import (
    DigestsRequest,
    FetchFrame,
    FetchRequest,
    InventoryRequest,
    SyncPeerLostError,
    split_name,
)
from meshd.store.errors import DiskFailedError, DiskFullError, StoreError
from meshd.store.records import Record
from meshd.store.replica.changes import Amended, Marked, PartOf, UploadBegun, UploadEnded, VersionGone
from meshd.telemetry import metrics
from meshd.util import failpoints
from meshd.util.shared_counters import PIECE_BYTES
from meshd.util.tenant_limits import ByteSemaphore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    import numpy.typing as npt

    from meshd.cluster.rebalance.sync_plan import Item, RemovalItem, Scope
    from meshd.cluster.rebalance.sync_source import SyncPeer, SyncSource
    from meshd.store.replica.changes import Change
    from meshd.store.replica.inventory import HeldName, InventoryPage
    from meshd.store.store import Store

_REMOVAL_BATCH: Final = 512  # removals applied together
_IN_FLIGHT_BYTES: Final = 32 << 20  # bytes of small items being written
_ITEM_OVERHEAD: Final = 64 << 10  # memory cost of an item besides its bytes
_PAGE: Final = 1000
_SLICE: Final = 100  # names compared before yielding to the event loop


@dataclass(slots=True)
class SyncStats:
    """Statistics of a comparison. `differing`: slots; `total`: bytes to receive, as far as known; `lost`:
    items that the peer no longer had when asked; `failed`: items that could not be fetched or applied."""

    differing: int = 0
    total: int = 0
    names: int = 0
    lacked: int = 0
    entered: int = 0
    bytes: int = 0
    lost: int = 0
    failed: int = 0
    dropped: int = 0

    @property
    def clean(self) -> bool:
        """True if nothing was missing and nothing failed."""
        return not (self.lacked or self.failed or self.lost)


class _DigestSums(msgspec.Struct, frozen=True):
    """One side's digests and sizes of all slots of a scope."""

    sums: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    since: int


class LocalInventory:
    """Reads this store's names of a scope page by page."""

    def __init__(self, offers: SyncSource, scope: Scope) -> None:
        self._offers, self._scope = offers, scope
        self._ahead: list[HeldName] = []
        self._after, self._end = b"", False

    async def has_any(self) -> bool:
        """Returns True if at least one name is left."""
        while not self._ahead and not self._end:
            page = await self._offers.read_inventory(InventoryRequest(self._scope, self._after, _PAGE))
            self._ahead += page.names
            self._after, self._end = page.after, not page.after
        return bool(self._ahead)

    def take_buffered(self) -> list[HeldName]:
        """Returns and skips the names that `has_any` has read."""
        taken, self._ahead = self._ahead, []
        return taken

    async def read_up_to(self, last: bytes) -> dict[bytes, HeldName]:
        """Returns the names up to and including `last`; b"" means all that are left."""
        while not self._end and (not last or self._after < last):
            page = await self._offers.read_inventory(InventoryRequest(self._scope, self._after, _PAGE))
            self._ahead += page.names
            self._after, self._end = page.after, not page.after
        taken = [held for held in self._ahead if not last or held.name <= last]
        self._ahead = self._ahead[len(taken) :]
        return {held.name: held for held in taken}


class AntiEntropySync:
    """One comparison with one peer. `rest` is awaited with the bytes of each piece of work and throttles in
    favor of clients. `standing`: the stamp up to which this store has received every change. If the peer has
    forgotten removals since then, this store's data is not trusted, and `drop` is called with what the peer
    does not have. `window`: how many small items to request at a time."""

    def __init__(
        self,
        store: Store,
        mine: SyncSource,
        holder: SyncPeer,
        scope: Scope,
        *,
        rest: Callable[[int], Awaitable[None]],
        tally: SyncStats,
        standing: int = 1 << 64,
        drop: Callable[[list[HeldName]], Awaitable[None]] | None = None,
        window: Callable[[], int] = lambda: WINDOW_ITEMS,
    ) -> None:
        self._store, self._mine, self._holder, self._scope = store, mine, holder, scope
        self._rest, self._standing, self._drop = rest, standing, drop
        self.stats = tally
        self._windows = FetchWindows(window)
        self._entering = ByteSemaphore(_IN_FLIGHT_BYTES)

    async def run_sync(self) -> SyncStats:
        """Compares and fetches what is missing. Raises SyncPeerLostError, DiskFullError, DiskFailedError;
        items applied until then stay."""
        scope = await self._differing()
        if scope:
            try:
                async with asyncio.TaskGroup() as group:
                    self._start_fetching(group)
                    await self._compare_names(scope)
                    await self._windows.close()
            except BaseExceptionGroup as errors:
                raise _first(errors) from errors
        return self.stats

    async def fetch_items(self, items: Sequence[Item]) -> SyncStats:
        """Fetches exactly these items without comparing. Raises the same errors as `run_sync`."""
        try:
            async with asyncio.TaskGroup() as group:
                self._start_fetching(group)
                self.stats.lacked += len(items)
                await self._windows.add(items)
                await self._windows.close()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        return self.stats

    # comparing slots-----------------------------------------------------------------------------------------

    async def _differing(self) -> Scope:
        forgotten = self._store.inventory.tombstones_complete_since()
        theirs = await self._sum_digests(self._holder, forgotten)
        if theirs.since <= self._standing:
            self._drop = None
        if theirs.since > forgotten:
            forgotten = theirs.since
            theirs = await self._sum_digests(self._holder, forgotten)
        mine = await self._sum_digests(self._mine, forgotten)
        differing = theirs.sums != mine.sums
        more = theirs.sizes.astype(np.int64) - mine.sizes.astype(np.int64)
        self.stats.differing += int(differing.sum())
        self.stats.total += int(more[differing & (more > 0)].sum())
        return self._scope.restrict_to(differing)

    async def _sum_digests(self, holder: SyncPeer, forgotten: int) -> _DigestSums:
        slots, after = self._scope.slots, b""
        sums, sizes = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        while True:
            given = await holder.read_digests(DigestsRequest(self._scope, forgotten, after))
            sums, sizes = sums + given.sum_array(), sizes + given.size_array()
            after = given.after
            if not after:
                return _DigestSums(sums, sizes, given.since)
            await self._rest(0)

    # which names ------------------------------------------------------------------------------------------

    async def _compare_names(self, scope: Scope) -> None:
        own, after = LocalInventory(self._mine, scope), b""
        while True:
            page = await self._holder.read_inventory(InventoryRequest(scope, after, _PAGE))
            mine = await own.read_up_to(page.after)
            ended: list[RemovalItem] = []
            items: list[Item] = []
            for number, theirs in enumerate(page.names):
                if number % _SLICE == 0:
                    await self._rest(PIECE_BYTES)
                self.stats.names += 1
                lacks = missing_items(mine.get(theirs.name), theirs)
                ended += lacks.ended
                items += lacks.items
            await self._apply_removals(ended)
            self.stats.lacked += len(items)
            await self._windows.add(items)
            await self._drop_surplus(mine, page)
            after = page.after
            if not after:
                return
            await self._rest(0)

    async def _apply_removals(self, ended: list[RemovalItem]) -> None:
        self.stats.lacked += len(ended)
        for start in range(0, len(ended), _REMOVAL_BATCH):
            run = ended[start : start + _REMOVAL_BATCH]
            await asyncio.gather(*[self._store.apply_change(_removal_change(each)) for each in run])
            self.stats.entered += len(run)

    async def _drop_surplus(self, mine: dict[bytes, HeldName], page: InventoryPage) -> None:
        if self._drop is None:
            return
        theirs = {held.name: held for held in page.names}
        found = [surplus_items(held, [theirs[name]] if name in theirs else []) for name, held in mine.items()]
        gone = [held for held in found if held.versions or held.uploads]
        if gone:
            self.stats.dropped += len(gone)
            await self._drop(gone)

    # facts and bytes --------------------------------------------------------------------------------------

    def _start_fetching(self, group: asyncio.TaskGroup) -> None:
        for batches in (self._windows.small, *[self._windows.large] * STREAMS):
            group.create_task(self._fetching(batches))

    async def _fetching(self, batches: asyncio.Queue[tuple[Item, ...] | None]) -> None:
        while (batch := await batches.get()) is not None:
            await self._fetch(batch)

    async def _fetch(self, batch: tuple[Item, ...]) -> None:
        """Fetches a batch. A peer that breaks off in the middle costs only the rest of the batch; the next
        comparison finds that."""
        answered = 0
        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(self._holder.fetch_frames(FetchRequest(batch, any_order=True))) as pieces,
            ):
                stream = _FrameStream(pieces)
                for _ in batch:
                    frame = await stream.read_frame(len(batch))
                    item = batch[frame.number]
                    answered += 1
                    if frame.lost:
                        self.stats.lost += 1
                    elif frame.size > LARGE:
                        await self._stream_in(item, frame, stream)
                    else:
                        await self._entering.acquire(frame.size + _ITEM_OVERHEAD)
                        room = _Reservation(self._entering, frame.size + _ITEM_OVERHEAD)
                        try:
                            body = await stream.read_exactly(frame.size)
                        except BaseException:
                            room.release()
                            raise
                        entering = group.create_task(self._apply_item(item, frame, body, room))
                        entering.add_done_callback(room.release)  # also if it is cancelled before it starts
        except BaseExceptionGroup as errors:
            if errors.split(SyncPeerLostError)[1] is not None:
                raise
            self.stats.failed += len(batch) - answered + 1

    async def _apply_item(self, item: Item, frame: FetchFrame, body: bytes, room: _Reservation) -> None:
        try:
            bucket, key = split_name(item.name)
            change = _metadata_change(bucket, key, item, frame)
            if change is not None:
                await self._store.apply_change(change)
            else:
                writer = self._store.replica_writer(bucket, key, size=len(body))
                await writer.write(body)
                await writer.commit_at_stamp(*_commit_arguments(frame))
            self._count(len(body))
        except (DiskFullError, DiskFailedError):
            raise
        except StoreError:  # its upload or version is gone: the next comparison decides
            self.stats.lost += 1
        finally:
            room.release()
        await self._rest(len(body))

    async def _stream_in(self, item: Item, frame: FetchFrame, stream: _FrameStream) -> None:
        writer = self._store.replica_writer(*split_name(item.name), size=frame.size)
        try:
            left = frame.size
            while left:
                piece = await stream.read_some(left)
                left -= len(piece)
                await writer.write(piece)
                await self._rest(len(piece))
            await writer.commit_at_stamp(*_commit_arguments(frame))
            self._count(frame.size)
        except (DiskFullError, DiskFailedError):
            raise
        except StoreError:
            self.stats.lost += 1
            await stream.skip_bytes(left)
        finally:
            await writer.abort()

    def _count(self, size: int) -> None:
        self.stats.entered += 1
        self.stats.bytes += size
        metrics.rebalance_applied.inc()
        failpoints.hit("moves.entered")
        metrics.rebalance_bytes.inc(size)


class _Reservation:
    """Units taken from a semaphore; whichever holder comes first releases them, once."""

    __slots__ = ("_budget", "_units")

    def __init__(self, budget: ByteSemaphore, units: int) -> None:
        self._budget, self._units = budget, units

    def release(self, _: object = None) -> None:
        """Releases the units. Idempotent."""
        units, self._units = self._units, 0
        if units:
            self._budget.release(units)


class _FrameStream:
    """Reads frames and bytes of a response as it arrives. Raises SyncPeerLostError if it ends early."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""
        self._at = 0

    async def read_exactly(self, size: int) -> bytes:
        """Reads exactly `size` bytes."""
        taken, left = [], size
        while left:
            piece = await self.read_some(left)
            left -= len(piece)
            taken.append(piece)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    async def read_some(self, most: int) -> bytes:
        """Returns between 1 and `most` bytes that have arrived."""
        if self._at == len(self._held):
            self._held, self._at = await anext(self._pieces, b""), 0
            if not self._held:
                raise SyncPeerLostError("the peer closed the connection early")
        start, self._at = self._at, min(self._at + most, len(self._held))
        return self._held if self._at - start == len(self._held) else self._held[start : self._at]

    async def skip_bytes(self, size: int) -> None:
        while size:
            size -= len(await self.read_some(size))

    async def read_frame(self, items: int) -> FetchFrame:
        """Reads the frame of one of so many items."""
        length = int.from_bytes(await self.read_exactly(4), "big")
        frame = msgspec.msgpack.decode(await self.read_exactly(length), type=FetchFrame)
        if not 0 <= frame.number < items:
            raise SyncPeerLostError(f"the peer sent item {frame.number} of {items}")
        return frame


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first exception that is not a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _removal_change(ended: RemovalItem) -> Change:
    bucket, key = split_name(ended.name)
    if ended.is_upload:
        return UploadEnded(bucket, key, ended.what, ended.stamp)
    return VersionGone(bucket, key, ended.what, ended.stamp)


def _metadata_change(bucket: str, key: str, item: Item, frame: FetchFrame) -> Change | None:
    """Returns the change in a frame without bytes; None for a frame with bytes."""
    if item.kind == "upload" and frame.upload is not None:
        return UploadBegun(frame.upload)
    if frame.record is None:
        return None
    if item.kind == "amendment":
        return Amended(bucket, key, frame.record)
    return Marked(bucket, key, frame.record) if frame.record.marker else None


def _commit_arguments(frame: FetchFrame) -> tuple[Record, PartOf | None]:
    """Returns the arguments of `commit_at_stamp`."""
    if frame.record is not None:
        return frame.record, None
    assert frame.upload is not None
    assert frame.part is not None
    part = frame.part
    return Record(part.size, part.etag, part.stamp, part.modified, ()), PartOf(frame.upload, part)
