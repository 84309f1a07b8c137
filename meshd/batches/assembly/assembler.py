"""The assembler: returns frames by address, builds each frame once, and caches finished frames.

Law: admission bounds the rows and bytes under construction and the bytes that slow clients hold. Above a
bound, callers must retry unless they use less than an even share. Jobs take turns. The assembler stops
starting rows of a frame that nobody waits for, except of a few frames that are requested next while a disk
reads their window.

It runs in the coordinator; HTTP workers request frames with `assembler_client`.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.batches.assembly.bad_sample_ledger import BadSampleLedger, max_bad_rows
from meshd.batches.assembly.column_copies import FEWEST_ROWS, block_fields
from meshd.batches.assembly.frame_buffer import MAX_FRAME_BYTES, block_metadata, fixed_row_bytes, metadata_of
from meshd.batches.assembly.frame_builder import BuildContext, FrameBuilder
from meshd.batches.assembly.frame_cache import FrameCache
from meshd.batches.assembly.frame_rows import (
    RowLookup,
    count_rows,
    new_rows,
    own_rows,
    real_rows,
    require_parts,
)
from meshd.batches.assembly.frames_ahead import EarlyRenderer, FramesAhead
from meshd.batches.assembly.packed_frame_builder import PackedFrameBuilder
from meshd.batches.assembly.packed_rows import PackedRows, PackTables
from meshd.batches.assembly.sequence_renderer import SequenceRenderer
from meshd.batches.assembly.series_builder import MOST_BYTES, MOST_ROWS, SeriesBuilder, series_fields
from meshd.batches.assembly.stored_sequences import no_stored_sequences
from meshd.batches.assembly.view_result_renderer import render_derived_object
from meshd.batches.read_ahead.arrivals import Arrivals
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.read_ahead.page_prefetcher import PagePrefetcher
from meshd.batches.read_ahead.read_hints import PlannedFrame
from meshd.core.api_errors import BatchError, busy
from meshd.core.document_store import DocumentStore, asset_key
from meshd.core.frame_address import (
    BlockAddress,
    DerivedAddress,
    FrameAddress,
    PartAddress,
    consecutive_steps,
    leading_frames,
)
from meshd.core.memory_frames import hand_out_all
from meshd.core.peer_source import SINGLE_NODE
from meshd.core.plan_record import Plan
from meshd.store.errors import StoreError
from meshd.telemetry import metrics, tracing
from meshd.telemetry.metric_registry import bounded_label
from meshd.telemetry.training_metrics import DIGITS, plan_frames
from meshd.util.async_tasks import GroupFlights, SingleFlight
from meshd.util.tenant_limits import Admission, AdmissionRejectedError, current_tenant
from meshwire.dataset.build_snapshot import Snapshot
from meshwire.frame.split_frames import part_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.batches.assembly.stored_sequences import StoredSequences
    from meshd.batches.read_ahead.read_hints import ReadHints
    from meshd.batches.read_ahead.scheduler import ReadScheduler
    from meshd.config import TransformSettings
    from meshd.core.frame_address import Address, AnyFrameAddress, Frame, FrameResult
    from meshd.core.memory_frames import MemoryFrame, SharedFrame
    from meshd.core.peer_source import PeerSource
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.store.api import ObjectStore
    from meshd.transform.renderer import Renderer


MAX_ROWS = 32768  # limit of rows under construction; a larger frame is built alone
COPIED_ROWS = 32  # rows copied as arrays that count as one
DERIVED_ROWS = 32  # rows that an object of a view counts as: about a thousand may be under construction
MIN_BUILDING_BYTES = 256 << 20
AHEAD_SHARE: Final = 4
"""Frames that are built ahead of their requests take a quarter of the cache of frames and of MAX_ROWS."""
MAX_SERIES_BYTES: Final = 32 << 20  # of packed frames that are built together


class Assembler:
    """Builds and caches a node's frames. Use on one event loop only; `aclose` at the end."""

    def __init__(
        self,
        store: ObjectStore,
        pool: Renderer,
        settings: TransformSettings,
        archives: DecompressedArchives,
        *,
        node: str = "local",
        remote: PeerSource = SINGLE_NODE,
        catalog: DocumentStore | None = None,
        hints: Sequence[ReadHints] = (),
        read_ahead: ReadScheduler | None = None,
        stored: StoredSequences | None = None,
    ) -> None:
        self.catalog = DocumentStore(store) if catalog is None else catalog
        self._context = BuildContext(store, pool, BadSampleLedger(self.catalog), node, archives, remote)
        self._own = OwnSampleFinder(remote)
        self._cache: FrameCache[AnyFrameAddress] = FrameCache(settings.frame_cache_bytes)
        self._flights: SingleFlight[AnyFrameAddress, SharedFrame] = SingleFlight()
        self._series: GroupFlights[AnyFrameAddress, SharedFrame] = GroupFlights()
        self._packs = PackTables(self.catalog)
        self._stored = stored or no_stored_sequences(store)
        self._packed = PackedFrameBuilder(self._context, self._stored, SequenceRenderer(self), read_ahead)
        self._row_lookup = RowLookup()
        self._rows_room = Admission(MAX_ROWS)
        self._bytes_room = Admission(max(settings.frame_cache_bytes, MIN_BUILDING_BYTES))
        self._prefetcher = PagePrefetcher(
            self.catalog, lambda *frame: self._row_lookup.rows_at(*frame).samples
        )
        self._hints: list[ReadHints] = [self._prefetcher, *hints]
        if read_ahead is not None:
            self._hints.append(read_ahead)
        self._read_ahead = read_ahead
        self._early = replace(self._context, renderer=EarlyRenderer(pool))
        self._ahead = FramesAhead(
            settings.frame_cache_bytes // AHEAD_SHARE,
            MAX_ROWS // AHEAD_SHARE,
            lambda address, kept: self._flights.run(address, lambda: self._build(address, kept, early=True)),
            self._is_known,
            self._hints,
        )

    def __repr__(self) -> str:
        return f"<Assembler {self._rows_room.held} rows being built, {self._cache!r}>"

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        """Return the frame at an address; the caller closes the handle. `kept_bytes`: see `FrameSource`.

        Raises BatchError: InvalidPlan, NoSuchPlan, NoSuchSnapshot, SnapshotChanged, BadSample, OpFailed,
        Busy.
        """
        with tracing.stage("frame") as span:
            cached, joined, early = self._cache.get(address), False, self._ahead.claim(address)
            found = cached
            if found is None and address in self._series:
                found = await self._series.result_of(address)
                joined = found is not None
            if found is None:
                frame, joined = await self._flights.run(address, lambda: self._build(address, kept_bytes))
            else:
                frame = found
            await self._judge(address, frame)
            result: FrameResult = "hit" if cached is not None else "joined" if joined else "miss"
            if early:  # it was built for this request
                result = "miss"
            await self._count(result, address, frame.rows)
            if span is not None:
                span.attributes |= {"shardmesh.result": result, "shardmesh.rows": frame.rows}
        return frame.hand_out(result)

    async def get_frames(self, first: FrameAddress, count: int, kept_bytes: int | None = None) -> list[Frame]:
        """Return the frames of consecutive steps; see `FrameSource`."""
        steps = consecutive_steps(first, count)
        if self._series.is_running(steps) or not any(map(self._is_known, steps)):
            with tracing.stage("frame"):
                frames, joined = await self._series.run(steps, lambda: self._build_series(steps, kept_bytes))
            if frames is not None:
                result: FrameResult = "joined" if joined else "miss"
                await self._count(result, first, sum(frame.rows for frame in frames), len(frames))
                return hand_out_all(frames, result)
        return await leading_frames(self.get_frame(step, kept_bytes) for step in steps)

    def _is_known(self, address: AnyFrameAddress) -> bool:
        """Whether a frame is there or being built."""
        return address in self._flights or address in self._series or self._cache.get(address) is not None

    async def _judge(self, address: AnyFrameAddress, frame: SharedFrame) -> None:
        """Raises BatchError BadSample if more rows of the global batch are bad than `max_bad` allows.

        In that case at least one slice has more than its own share of bad rows. So only a frame that
        exceeds its share examines the other slices, which clients request anyway.
        """
        complaint = frame.complaint
        if complaint is None or not isinstance(address, FrameAddress):
            return
        plan = await self.catalog.plan(address.plan)
        if frame.bad <= plan.spec.max_bad * real_rows(address, plan, address.rank, address.world):
            return
        bound, bad = max_bad_rows(plan.spec, real_rows(address, plan, 0, 1)), frame.bad
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
        frame.complaint = None  # the batch is within the bound

    async def _count(self, result: FrameResult, address: AnyFrameAddress, rows: int, frames: int = 1) -> None:
        """Count the request and the op work that the cache saved in the metrics."""
        metrics.frames.labels(result).inc(frames)
        if isinstance(address, DerivedAddress | BlockAddress):
            return
        plan_frames.labels(address.plan[:DIGITS], result).inc(frames)
        if result == "miss":
            return
        for op in (await self.catalog.plan(address.plan)).spec.ops:
            metrics.op_cache_hits.labels(bounded_label("op", op.op)).inc(rows)

    async def aclose(self) -> None:
        """Drop the finished frames."""
        await self._ahead.aclose()
        await self._prefetcher.aclose()
        await self._stored.aclose()
        self._cache.clear()

    async def _build(
        self, address: AnyFrameAddress, kept_bytes: int | None = None, *, early: bool = False
    ) -> SharedFrame:
        if isinstance(address, DerivedAddress):
            return await self._derive(address)
        if isinstance(address, BlockAddress):
            return await self._block(address)
        if isinstance(address, PartAddress):
            return await self._part(address, kept_bytes, early=early)
        return await self._assemble(address, kept_bytes, early=early)

    async def _derive(self, address: DerivedAddress) -> MemoryFrame:
        await self.catalog.ensure_local_copies(map(asset_key, address.assets))
        with self._admission(DERIVED_ROWS, 0):
            made = await render_derived_object(self._context, address)
        self._cache.put(address, made)  # until the caller has written it to the store
        return made

    async def _block(self, address: BlockAddress) -> MemoryFrame:
        plan = Plan.from_bytes(address.digest, address.plan)
        await self.catalog.ensure_local_copies(map(asset_key, plan.assets))
        snapshot = await asyncio.to_thread(Snapshot.from_bytes, address.snapshot)
        samples = np.arange(snapshot.samples, dtype=np.int64)
        with self._admission(snapshot.samples, snapshot.samples * fixed_row_bytes(plan)):
            rows, metadata = new_rows(samples + address.first, samples), block_metadata(address.block)
            builder = FrameBuilder(self._context, plan, snapshot, 0, rows, metadata, kept_bytes=0)
            frame = await builder.build()
        self._cache.put(address, frame)  # until the caller has written it to the store
        return frame

    async def _part(
        self, address: PartAddress, kept_bytes: int | None, *, early: bool = False
    ) -> MemoryFrame:
        whole = address.whole
        plan = await self.catalog.plan(whole.plan)
        await self.catalog.ensure_local_copies(map(asset_key, plan.assets))
        snapshot = await self.catalog.snapshot(plan.snapshot)
        require_parts(plan)
        wanted = PlannedFrame(plan, snapshot, whole, kept_bytes, in_parts=True)
        arrivals = await self._read_batch_ahead(wanted, early=early)
        if not early:
            self._ahead.begin(wanted, address, arrivals)
        with self._admission(count_rows(whole, plan), 0):
            rows = self._row_lookup.rows_at(whole, plan, snapshot)
            await self._prefetcher.open_now(snapshot, rows.samples, whole)
            places = await own_rows(self._context.remote, snapshot, rows, address.version)
            # with samples mixed in pairs, this node builds rows of any sample
            own = await self._own.find_rows(snapshot) if plan.pairs is None else None
        with self._admission(len(places), len(places) * fixed_row_bytes(plan)):
            metadata = part_metadata(metadata_of(whole), address.version, len(rows))
            part = rows.part_rows(places)
            context = self._early if early else self._context
            builder = FrameBuilder(
                context,
                plan,
                snapshot,
                whole.epoch,
                part,
                metadata,
                kept_bytes=kept_bytes,
                arrivals=arrivals,
                own=own,
            )
            frame = await builder.build()
        self._cache.put(address, frame)
        return frame

    async def _assemble(
        self, address: Address, kept_bytes: int | None, *, early: bool = False
    ) -> MemoryFrame:
        plan = await self.catalog.plan(address.plan)
        await self.catalog.ensure_local_copies(map(asset_key, plan.assets))
        snapshot = await self.catalog.snapshot(plan.snapshot)
        if plan.within:
            return await self._pack(address, plan, snapshot, kept_bytes)
        arrivals = Arrivals()
        if isinstance(address, FrameAddress):
            wanted = PlannedFrame(plan, snapshot, address, kept_bytes)
            arrivals = await self._read_batch_ahead(wanted, early=early)
            if not self._context.remote.single_node:  # the others' bytes are fetched when they have read them
                await arrivals.until_read()
            elif not early:  # in a mesh, the reader requests the next frames from other nodes
                self._ahead.begin(wanted, address, arrivals)
        count = count_rows(address, plan)
        with self._admission(_admitted_rows(plan, snapshot, count), count * fixed_row_bytes(plan)):
            rows = self._row_lookup.rows_at(address, plan, snapshot)
            ahead = address if isinstance(address, FrameAddress) else None
            await self._prefetcher.open_now(snapshot, rows.samples, ahead)
            whole = None if ahead is None else real_rows(ahead, plan, 0, 1)
            context, metadata = self._early if early else self._context, metadata_of(address)
            builder = FrameBuilder(
                context,
                plan,
                snapshot,
                address.epoch,
                rows,
                metadata,
                whole=whole,
                kept_bytes=kept_bytes,
                arrivals=arrivals,
            )
            frame = await builder.build()
        if isinstance(address, FrameAddress):
            self._cache.put(address, frame)
        return frame

    async def _build_series(
        self, steps: Sequence[FrameAddress], kept_bytes: int | None
    ) -> Sequence[SharedFrame] | None:
        """Build and cache the frames of consecutive steps together; None if each is to be built alone."""
        try:
            plan = await self.catalog.plan(steps[0].plan)
            snapshot = await self.catalog.snapshot(plan.snapshot)
            if plan.within:
                return await self._pack_series(steps, plan, snapshot)
            if not self._context.remote.single_node:
                return None
            fields = series_fields(plan, snapshot)
            count = sum(count_rows(step, plan) for step in steps)
            size = count * fixed_row_bytes(plan)
            if fields is None or not FEWEST_ROWS <= count <= MOST_ROWS or size > MOST_BYTES:
                return None
            await self.catalog.ensure_local_copies(map(asset_key, plan.assets))
            for step in steps:
                arrivals = await self._read_batch_ahead(PlannedFrame(plan, snapshot, step, kept_bytes))
                await arrivals.until_read()
            with self._admission(_admitted_rows(plan, snapshot, count), size):
                rows = self._row_lookup.rows_of_steps(steps, plan, snapshot)
                samples = np.concatenate([each.samples for each in rows])
                await self._prefetcher.open_now(snapshot, samples)
                frames = await SeriesBuilder(self._context, plan, snapshot, fields, steps, rows).build()
        except (BatchError, StoreError, EOFError):  # the first frame that has a fault reports it
            return None
        return self._put_series(steps, frames)

    def _put_series(
        self, steps: Sequence[FrameAddress], frames: Sequence[SharedFrame] | None
    ) -> Sequence[SharedFrame] | None:
        if frames is not None:
            self._cache.put_all(zip(steps, frames, strict=True))
        return frames

    async def _pack_series(
        self, steps: Sequence[FrameAddress], plan: Plan, snapshot: Snapshot
    ) -> Sequence[SharedFrame] | None:
        """Build and cache the frames of consecutive steps of a packed plan; None as `_build_series`."""
        size = sum(count_rows(step, plan) for step in steps) * fixed_row_bytes(plan)
        if size > MAX_SERIES_BYTES:
            return None
        table, within = await self._packs.get_table(plan), await self.catalog.plan(plan.within)
        with self._admission(0, size):
            rows = [self._row_lookup.rows_at(step, plan, table) for step in steps]
            packings = [PackedRows(plan, table, each) for each in rows]
            frames = await self._packed.build_series(packings, within, snapshot, steps)
        return self._put_series(steps, frames)

    async def _read_batch_ahead(self, wanted: PlannedFrame, *, early: bool = False) -> Arrivals:
        """Pass the request on as a hint, unless it is still to come; wait until the first bytes of its batch
        are read ahead, and return the reads that are left."""
        if not early:
            for each in self._hints:
                each.frame_requested(wanted)
        if self._read_ahead is None:
            return Arrivals()
        with tracing.stage("read ahead"):
            return await self._read_ahead.arrivals(wanted.address)

    async def _pack(
        self, address: Address, plan: Plan, snapshot: Snapshot, kept_bytes: int | None
    ) -> MemoryFrame:
        count, table = count_rows(address, plan), await self._packs.get_table(plan)
        packing = PackedRows(plan, table, self._row_lookup.rows_at(address, plan, table))
        within = await self.catalog.plan(plan.within)
        with self._admission(0, count * fixed_row_bytes(plan)):
            render = partial(self._assemble, kept_bytes=kept_bytes)
            made = await self._packed.build(packing, within, snapshot, address, render)
        if isinstance(address, FrameAddress):
            self._cache.put(address, made)
        return made

    @contextmanager
    def _admission(self, rows: int, size: int) -> Iterator[None]:
        """Account a frame's rows and bytes while it is built. Raises BatchError Busy or TooLarge."""
        if size > MAX_FRAME_BYTES:
            raise BatchError(
                "TooLarge",
                f"the frame would have {size} bytes; at most {MAX_FRAME_BYTES} are assembled",
                help="use a smaller batch, or more ranks",
            )
        who = current_tenant()
        self._check_clients(who)
        with ExitStack() as held:
            for room, units, unit in ((self._rows_room, rows, "rows"), (self._bytes_room, size, "bytes")):
                try:
                    held.enter_context(room.hold(who, units))
                except AdmissionRejectedError as error:
                    raise busy(f"{error.held} {unit} are already being built") from error
            yield

    def _check_clients(self, who: str) -> None:
        """Raises BatchError Busy if too many bytes wait for slow clients, and the caller has its share of
        them.
        """
        memory, cache, room = self._context.memory, self._cache, self._bytes_room
        sending = memory.bytes - cache.bytes - room.held
        if sending <= room.limit:
            return
        own = memory.by_account[who] - cache.by_account[who] - room.held_by(who)
        if sending > 2 * room.limit or own > room.limit // max(1, len(memory.by_account)):
            raise busy(f"{sending} bytes of finished frames wait for slow clients")


def _admitted_rows(plan: Plan, snapshot: Snapshot, count: int) -> int:
    """Return how many rows a frame counts as while it is built: copied rows cost bytes, but no time."""
    copied = block_fields(plan.spec, plan.outputs, mixed=plan.pairs is not None) is not None
    return count // COPIED_ROWS if copied and snapshot.kind != "objects" else count
