"""The assembler: frames by address, each built once however many ask, kept while there is room.

Law: admission is bounded (rows and bytes being built, bytes in slow clients' hands); beyond it callers are
told to come back, unless they have less than an even share. Jobs take turns. When nobody waits for a frame
any more, its rows are not begun.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from meshd.assembly.addressing import BlockAddress, DerivedAddress, FrameAddress, PartAddress, RowsAddress
from meshd.assembly.assets import asset_key
from meshd.assembly.building import FrameBuilder, Kitchen, bad_bound, partners_of, rows_of
from meshd.assembly.catalog import Catalog
from meshd.assembly.deriving import derive
from meshd.assembly.drafting import MAX_FRAME_BYTES
from meshd.assembly.elsewhere import ALONE
from meshd.assembly.errors import BatchError, busy
from meshd.assembly.ledger import Ledger
from meshd.assembly.memory import FrameCache
from meshd.assembly.packing import Packing, PackTables, row_bounds
from meshd.assembly.parting import own_rows, require_parts
from meshd.assembly.plans import Plan
from meshd.kit.accounts import account
from meshd.kit.admission import Admission, FullError
from meshd.kit.singleflight import SingleFlight
from meshd.telemetry import metrics
from meshwire.documents import PlanError
from meshwire.epochs import epoch_order, snapshot_order
from meshwire.frameparts import part_metadata
from meshwire.frames import FRAME_VERSION
from meshwire.plans import batch_rows, rank_rows, rank_slice
from meshwire.snapshots import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.assembly.addressing import Address, Asked, Frame, FrameResult
    from meshd.assembly.drafting import Rows
    from meshd.assembly.elsewhere import Elsewhere
    from meshd.assembly.memory import MemoryFrame
    from meshd.assembly.rendering import Renderer
    from meshd.assembly.sources import PlainArchives
    from meshd.config import TransformSettings
    from meshd.store.interface import ObjectStore
    from meshwire.packing import PackTable
    from meshwire.permutations import Order

MAX_ROWS = 32768  # being built at a time; a larger frame is built alone
MAX_FRAME_ROWS = 1 << 18
DERIVED_ROWS = 32  # what an object of a view counts as: a thousand of them may wait
MIN_BUILDING_BYTES = 256 << 20
_ORDERS = 64


class Hints(Protocol):
    """Who wants to know which plans are read, and how far."""

    def reading(self, plan: Plan, snapshot: Snapshot, address: FrameAddress) -> None:
        """A frame is built now. Returns at once."""
        ...


class Assembler:
    """One a node. Use on one event loop only; `aclose` at the end."""

    def __init__(
        self,
        store: ObjectStore,
        pool: Renderer,
        settings: TransformSettings,
        archives: PlainArchives,
        *,
        node: str = "local",
        elsewhere: Elsewhere = ALONE,
        catalog: Catalog | None = None,
    ) -> None:
        self.catalog = Catalog(store, elsewhere) if catalog is None else catalog
        self._kitchen = Kitchen(store, pool, Ledger(self.catalog), node, archives, elsewhere)
        self._cache: FrameCache[Asked] = FrameCache(settings.frame_cache_bytes)
        self._flights: SingleFlight[Asked, MemoryFrame] = SingleFlight()
        self._packs = PackTables(self.catalog)
        self._orders: OrderedDict[tuple[str, int], Order] = OrderedDict()
        self._rows_room = Admission(MAX_ROWS)
        self._bytes_room = Admission(max(settings.frame_cache_bytes, MIN_BUILDING_BYTES))
        self.hints: Hints | None = None

    def __repr__(self) -> str:
        return f"<Assembler {self._rows_room.held} rows being built, {self._cache!r}>"

    async def frame(self, address: Asked) -> Frame:
        """The frame at an address; the handle is the caller's to close.

        Raises BatchError: InvalidPlan, NoSuchPlan, NoSuchSnapshot, SnapshotChanged, BadSample, OpFailed,
        Busy.
        """
        cached = self._cache.get(address)
        if cached is not None:
            await self._judge(address, cached)
            await self._count("hit", address, cached.rows)
            return cached.hand_out("hit")
        built, joined = await self._flights.run(address, lambda: self._build(address))
        await self._judge(address, built)
        await self._count("joined" if joined else "miss", address, built.rows)
        return built.hand_out("joined" if joined else "miss")

    async def _judge(self, address: Asked, frame: MemoryFrame) -> None:
        """Raises BatchError BadSample when more rows of the global batch are bad than `max_bad` says.

        Some slice has more than its own share then: only who has looks at the others, which are asked for
        anyway.
        """
        complaint = frame.complaint
        if complaint is None or not isinstance(address, FrameAddress):
            return
        plan = await self.catalog.plan(address.plan)
        if frame.bad <= plan.spec.max_bad * _real_rows(address, plan, address.rank, address.world):
            return
        bound, bad = bad_bound(plan.spec, _real_rows(address, plan, 0, 1)), frame.bad
        for rank in range(address.world):
            if rank == address.rank:
                continue
            other = msgspec.structs.replace(address, rank=rank)
            found = self._cache.get(other)
            if found is None:
                found, _ = await self._flights.run(other, partial(self._build, other))
            bad += found.bad
            if bad > bound:
                raise complaint.with_traceback(None)
        frame.complaint = None  # it is settled

    async def _count(self, result: FrameResult, address: Asked, rows: int) -> None:
        """In the metrics: what was asked for, and the ops' work that was spared."""
        metrics.frames.labels(result).inc()
        if result == "miss" or isinstance(address, DerivedAddress | BlockAddress):
            return
        for op in (await self.catalog.plan(address.plan)).spec.ops:
            metrics.op_cache_hits.labels(metrics.op_label(op.op)).inc(rows)

    async def aclose(self) -> None:
        """Forget the finished frames."""
        self._cache.clear()

    async def _build(self, address: Asked) -> MemoryFrame:
        if isinstance(address, DerivedAddress):
            return await self._derive(address)
        if isinstance(address, BlockAddress):
            return await self._block(address)
        if isinstance(address, PartAddress):
            return await self._part(address)
        return await self._assemble(address)

    async def _derive(self, address: DerivedAddress) -> MemoryFrame:
        await self.catalog.ensure(map(asset_key, address.assets))
        with self._admission(DERIVED_ROWS, 0):
            made = await derive(self._kitchen, address)
        self._cache.put(address, made)  # until whoever asked has written it to the store
        return made

    async def _block(self, address: BlockAddress) -> MemoryFrame:
        plan = Plan.from_bytes(address.digest, address.plan)
        await self.catalog.ensure(map(asset_key, plan.assets))
        snapshot = await asyncio.to_thread(Snapshot.from_bytes, address.snapshot)
        samples = np.arange(snapshot.samples, dtype=np.int64)
        with self._admission(snapshot.samples, snapshot.samples * _row_bytes(plan)):
            rows, metadata = rows_of(samples + address.first, samples), block_metadata(address.block)
            frame = await FrameBuilder(self._kitchen, plan, snapshot, 0, rows, metadata).build()
        self._cache.put(address, frame)  # until whoever asked has written it to the store
        return frame

    async def _part(self, address: PartAddress) -> MemoryFrame:
        whole = address.whole
        plan = await self.catalog.plan(whole.plan)
        await self.catalog.ensure(map(asset_key, plan.assets))
        snapshot = await self.catalog.snapshot(plan.snapshot)
        require_parts(plan)
        if self.hints is not None:
            self.hints.reading(plan, snapshot, whole)
        with self._admission(count_rows(whole, plan), 0):
            rows = self._rows(whole, plan, snapshot)
            places = await own_rows(self._kitchen.elsewhere, snapshot, rows, address.version)
        with self._admission(len(places), len(places) * _row_bytes(plan)):
            metadata = part_metadata(metadata_of(whole), address.version, len(rows))
            builder = FrameBuilder(self._kitchen, plan, snapshot, whole.epoch, rows.part(places), metadata)
            frame = await builder.build_part()
        self._cache.put(address, frame)
        return frame

    async def _assemble(self, address: Address) -> MemoryFrame:
        plan = await self.catalog.plan(address.plan)
        await self.catalog.ensure(map(asset_key, plan.assets))
        snapshot = await self.catalog.snapshot(plan.snapshot)
        if plan.within:
            return await self._pack(address, plan)
        if self.hints is not None and isinstance(address, FrameAddress):
            self.hints.reading(plan, snapshot, address)
        count = count_rows(address, plan)
        with self._admission(count, count * _row_bytes(plan)):
            rows = self._rows(address, plan, snapshot)
            whole = _real_rows(address, plan, 0, 1) if isinstance(address, FrameAddress) else None
            builder = FrameBuilder(
                self._kitchen, plan, snapshot, address.epoch, rows, metadata_of(address), whole
            )
            frame = await builder.build()
        if isinstance(address, FrameAddress):
            self._cache.put(address, frame)
        return frame

    async def _pack(self, address: Address, plan: Plan) -> MemoryFrame:
        count, table = count_rows(address, plan), await self._packs.table(plan)
        rows = self._rows(address, plan, table)
        samples = table.samples_of(rows.samples)
        within = await self._assemble(RowsAddress(plan.within, 0, tuple(samples.tolist())))
        with self._admission(0, count * _row_bytes(plan)):
            packing = Packing(plan, table, rows, samples)
            made = await asyncio.to_thread(packing.frame, within, metadata_of(address), self._kitchen.memory)
        made.took = within.took
        within.close()
        if isinstance(address, FrameAddress):
            self._cache.put(address, made)
        return made

    def _rows(self, address: Address, plan: Plan, within: Snapshot | PackTable) -> Rows:
        try:
            if isinstance(address, RowsAddress):
                return _chosen_rows(address, plan)
            piece = rank_slice(
                plan.positions,
                address.batch,
                address.origin,
                address.step,
                address.rank,
                address.world,
                plan.spec.tail,
            )
        except PlanError as error:
            raise BatchError("InvalidPlan", str(error), detail={"path": error.path}) from error
        order = self._order(plan, within, address.epoch)
        rows = rows_of(piece.positions, order.many(piece.positions), piece.pad)
        if plan.pairs is not None:
            rows.partners = partners_of(rows.positions, plan.positions, order.many)
        return rows

    def _order(self, plan: Plan, within: Snapshot | PackTable, epoch: int) -> Order:
        key = plan.hash, epoch
        found = self._orders.get(key)
        if found is None:
            if isinstance(within, Snapshot):
                found = snapshot_order(plan.spec, within, epoch)
            else:
                found = epoch_order(plan.spec, within.shard_starts, epoch, row_bounds(within, plan.spec))
            self._orders[key] = found
            if len(self._orders) > _ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(key)
        return found

    @contextmanager
    def _admission(self, rows: int, size: int) -> Iterator[None]:
        """A frame's rows and bytes, counted while it is built. Raises BatchError Busy or TooLarge."""
        if size > MAX_FRAME_BYTES:
            raise BatchError(
                "TooLarge",
                f"the frame would have {size} bytes; at most {MAX_FRAME_BYTES} are assembled",
                help="use a smaller batch, or more ranks",
            )
        who = account()
        self._check_clients(who)
        with ExitStack() as held:
            for room, units, unit in ((self._rows_room, rows, "rows"), (self._bytes_room, size, "bytes")):
                try:
                    held.enter_context(room.hold(who, units))
                except FullError as error:
                    raise busy(f"{error.held} {unit} are being built already") from error
            yield

    def _check_clients(self, who: str) -> None:
        """Raises BatchError Busy when too much of what was built waits for clients to take it, and the caller
        has its share of that."""
        memory, cache, room = self._kitchen.memory, self._cache, self._bytes_room
        sending = memory.bytes - cache.bytes - room.held
        if sending <= room.limit:
            return
        own = memory.by_account[who] - cache.by_account[who] - room.held_by(who)
        if sending > 2 * room.limit or own > room.limit // max(1, len(memory.by_account)):
            raise busy(f"{sending} bytes of finished frames wait for slow clients")


def count_rows(address: Address, plan: Plan) -> int:
    """The rows of a frame, before they are worked out. Raises BatchError InvalidPlan, TooLarge."""
    if isinstance(address, RowsAddress):
        return len(address.samples)
    try:
        whole = batch_rows(plan.positions, address.batch, address.origin, address.step, plan.spec.tail)
        first, end = rank_rows(whole, address.rank, address.world)
    except PlanError as error:
        raise BatchError("InvalidPlan", str(error), detail={"path": error.path}) from error
    if end - first > MAX_FRAME_ROWS:
        raise BatchError(
            "TooLarge",
            f"the frame would have {end - first} rows; at most {MAX_FRAME_ROWS} are assembled",
            help="use a smaller batch, or more ranks",
        )
    return end - first


def _real_rows(address: FrameAddress, plan: Plan, rank: int, world: int) -> int:
    """The rows of a slice that do not only fill up the last batch."""
    whole = batch_rows(plan.positions, address.batch, address.origin, address.step, plan.spec.tail)
    first, end = rank_rows(whole, rank, world)
    left = plan.positions - address.origin - address.step * address.batch
    return max(0, min(end, left) - first)


def _chosen_rows(address: RowsAddress, plan: Plan) -> Rows:
    samples = np.array(address.samples, dtype=np.int64)
    if samples.size and (int(samples.min()) < 0 or int(samples.max()) >= plan.samples):
        raise PlanError("samples", f"indices lie in 0…{plan.samples - 1}")
    rows = rows_of(samples, samples)
    if plan.pairs is not None:
        rows.partners = partners_of(samples, plan.samples, lambda positions: positions)
    return rows


def _row_bytes(plan: Plan) -> int:
    """Bytes a row has at least."""
    sizes = (
        int(np.prod(output.shape, dtype=np.int64)) * np.dtype(output.dtype).itemsize
        for output in plan.columns.values()
        if output.shape is not None
    )
    return sum(sizes)


def block_metadata(block: str) -> dict[str, str]:
    """The same for a block."""
    return {"version": FRAME_VERSION, "block": block}


def metadata_of(address: Address) -> dict[str, str]:
    """What a frame says of itself, besides checksums."""
    values: dict[str, object] = {"version": FRAME_VERSION, "plan": address.plan, "epoch": address.epoch}
    if isinstance(address, FrameAddress):
        values |= {name: getattr(address, name) for name in ("step", "rank", "world", "batch", "origin")}
    return {name: str(value) for name, value in values.items()}
