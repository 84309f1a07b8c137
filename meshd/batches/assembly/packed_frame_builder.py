"""PackedFrameBuilder: decides where the pieces of a packed frame are read, and builds it.

Law: stored sequences change how long a frame takes, never its bytes. As for rendered samples, an object
that was deleted or replaced since the snapshot fails the frame, as far as this node can tell. The frames of
a series have the bytes that they have alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.batches.assembly.direct_rows import (
    DirectPieces,
    DirectRows,
    NotCachedError,
    NotDirectError,
    OpenRows,
    direct_dtypes,
)
from meshd.batches.assembly.frame_buffer import metadata_of
from meshd.batches.assembly.packed_reads import DirectReads, SequenceReads
from meshd.batches.assembly.packed_rows import RenderedSamples
from meshd.batches.assembly.stored_sequences import UnreadableChunkError
from meshd.batches.read_ahead.read_hints import PlannedFrame
from meshd.core.frame_address import FrameAddress, RowsAddress
from meshd.core.memory_frames import make_block
from meshd.util.async_tasks import CooperativeYield
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.frame_builder import BuildContext
    from meshd.batches.assembly.packed_rows import PackedRows, PieceSource
    from meshd.batches.assembly.sequence_renderer import SequenceRenderer
    from meshd.batches.assembly.stored_sequence_format import SequenceSet
    from meshd.batches.assembly.stored_sequences import OpenChunk, StoredSequences
    from meshd.batches.read_ahead.read_hints import PackedReads
    from meshd.batches.read_ahead.scheduler import ReadScheduler
    from meshd.core.frame_address import Address
    from meshd.core.memory_frames import MemoryAccount, MemoryFrame, SharedFrame
    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import PinnedObjects
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.tensor_frame import FrameLayout
    from meshwire.plan.sequence_packing import PieceColumns

    RenderSamples = Callable[[RowsAddress], Awaitable[MemoryFrame]]


_AT_ONCE: Final = 1 << 17
"""Elements of a tensor up to which a frame of cached bytes is built on the event loop."""


class PackedFrameBuilder:
    """Builds the frames of packed plans; one per assembler."""

    def __init__(
        self,
        context: BuildContext,
        stored: StoredSequences,
        renderer: SequenceRenderer,
        read_ahead: ReadScheduler | None = None,
    ) -> None:
        self._context, self._stored, self._renderer = context, stored, renderer
        self._read_ahead = read_ahead

    def __repr__(self) -> str:
        return f"<PackedFrameBuilder, {self._stored!r}>"

    async def build(
        self,
        packing: PackedRows,
        within: Plan,
        snapshot: Snapshot,
        address: Address,
        render: RenderSamples,
    ) -> MemoryFrame:
        """Return the frame. `render` returns the frame of samples of the plan `within`.

        Raises BatchError: SnapshotChanged, Busy and what `render` raises.
        """
        pack, metadata = packing.plan.spec.pack, metadata_of(address)
        assert pack is not None
        if isinstance(address, FrameAddress):
            await self._read_rows_ahead(packing, within, snapshot, [address])
        dtypes = direct_dtypes(within, pack.fields)
        if dtypes is not None:
            return await self._direct(packing, snapshot, metadata, dtypes)
        build = _Build(self._context, self._stored, packing, within, snapshot, metadata, render)
        await build.look_up()
        self._stored.store_later(self._renderer, build.sequences, build.missing)
        try:
            return await build.frame()
        except UnreadableChunkError as error:
            await self._stored.forget(build.sequences, error)
            build.found.clear()
            return await build.frame()

    async def _read_rows_ahead(
        self, packing: PackedRows, within: Plan, snapshot: Snapshot, steps: Sequence[FrameAddress]
    ) -> None:
        """Note that these frames are requested, and wait until what is read ahead for them has been read."""
        plan, ahead = packing.plan, self._read_ahead
        if ahead is None:
            return
        assert plan.spec.pack is not None
        fields, pin = plan.spec.pack.fields, self._context.pin
        reads: PackedReads
        dtypes = direct_dtypes(within, fields)
        if dtypes is not None:
            reads = DirectReads(plan, packing.table, snapshot, pin, dtypes)
        else:
            sequences = await self._stored.describe(within, snapshot, fields)
            reads = SequenceReads(plan, packing.table, snapshot, pin, self._stored, sequences)
        for step in steps:
            ahead.frame_requested(PlannedFrame(plan, snapshot, step, packed=reads))
            arrivals = await ahead.arrivals(step)
            await arrivals.until_read()

    async def _direct(
        self,
        packing: PackedRows,
        snapshot: Snapshot,
        metadata: Mapping[str, str],
        dtypes: Sequence[np.dtype[Any]],
    ) -> MemoryFrame:
        """Return the frame of samples that are read as they are stored."""
        context, pack = self._context, packing.plan.spec.pack
        assert pack is not None
        began = asyncio.get_running_loop().time()
        pinned = context.pin(snapshot)
        try:
            columns = packing.table.piece_columns(packing.rows.samples)
            await pinned.look_up(columns[1])
            try:
                made = await self._read_rows(packing, columns, pinned, snapshot, metadata, dtypes)
            except NotDirectError:
                source = DirectPieces(pinned, snapshot, pack.fields, dtypes)
                await source.prepare(np.unique(columns[1]), packing.pieces())
                made = await asyncio.to_thread(
                    packing.build_frame, lambda sample: source, metadata, context.memory
                )
        finally:
            pinned.close()
        made.took = FrameTiming(asyncio.get_running_loop().time() - began)
        return made

    async def _read_rows(
        self,
        packing: PackedRows,
        columns: PieceColumns,
        pinned: PinnedObjects,
        snapshot: Snapshot,
        metadata: Mapping[str, str],
        dtypes: Sequence[np.dtype[Any]],
    ) -> MemoryFrame:
        """Return the frame, all pieces of which are in files of this node. Raises NotDirectError."""
        memory = self._context.memory
        rows = DirectRows(packing.plan, (len(packing.rows),), columns, pinned, snapshot, dtypes)
        with self._context.store.open_spans_many(rows.wanted) as opened:
            if None in opened:
                raise NotDirectError("an object cannot be opened")
            ready = OpenRows(rows, opened)

            def build(*, cached: bool = False) -> MemoryFrame:
                return packing.write_frame(ready.tensors(cached=cached), metadata, memory)

            if ready.elements(0) <= _AT_ONCE:  # a thread would cost more than the copy
                with suppress(NotCachedError):
                    return build(cached=True)
            return await asyncio.to_thread(build)

    async def build_series(
        self,
        packings: Sequence[PackedRows],
        within: Plan,
        snapshot: Snapshot,
        steps: Sequence[FrameAddress],
    ) -> list[SharedFrame] | None:
        """Return the frames of consecutive steps of a plan, in one block of memory; None if each has to be
        built alone. Raises BatchError SnapshotChanged, Busy."""
        context, first, clock = self._context, packings[0], asyncio.get_running_loop().time
        assert first.plan.spec.pack is not None
        dtypes, began = direct_dtypes(within, first.plan.spec.pack.fields), clock()
        if dtypes is None:
            return None
        await self._read_rows_ahead(first, within, snapshot, steps)
        pinned = context.pin(snapshot)
        try:
            columns = first.table.piece_columns(np.concatenate([each.rows.samples for each in packings]))
            await pinned.look_up(columns[1])
            counts = [len(each.rows) for each in packings]
            rows = DirectRows(first.plan, counts, columns, pinned, snapshot, dtypes)
            with context.store.open_spans_many(rows.wanted) as opened:
                if None in opened:
                    return None
                series = _Series(packings, [metadata_of(step) for step in steps], context.memory)
                await series.write_rows(OpenRows(rows, opened))
        except NotDirectError:
            return None
        finally:
            pinned.close()
        for frame in series.frames:
            frame.took = FrameTiming((clock() - began) / len(packings))
        return list(series.frames)


class _Build:
    """One frame being built. `found`: the stored chunks that it reads."""

    sequences: SequenceSet

    def __init__(
        self,
        context: BuildContext,
        stored: StoredSequences,
        packing: PackedRows,
        within: Plan,
        snapshot: Snapshot,
        metadata: Mapping[str, str],
        render: RenderSamples,
    ) -> None:
        self._context, self._stored, self._packing = context, stored, packing
        self._within, self._snapshot, self._metadata, self._render = within, snapshot, metadata, render
        self._samples = packing.table.samples_of(packing.rows.samples)
        self._chunks: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.found: dict[int, OpenChunk] = {}
        self.missing: list[int] = []

    async def look_up(self) -> None:
        """Find the stored chunks of the frame's samples."""
        pack = self._packing.plan.spec.pack
        assert pack is not None
        self.sequences = await self._stored.describe(self._within, self._snapshot, pack.fields)
        self._chunks = self.sequences.chunks_of(self._samples)
        wanted = np.unique(self._chunks).tolist()
        self.found = await self._stored.find(self.sequences, wanted)
        self.missing = [chunk for chunk in wanted if chunk not in self.found]

    async def frame(self) -> MemoryFrame:
        """Return the frame. Raises UnreadableChunkError, BatchError."""
        clock = asyncio.get_running_loop().time
        stored = np.isin(self._chunks, list(self.found))
        self._context.pin(self._snapshot).check_unchanged(self._samples[stored])
        rendered, took = await self._render_samples(self._samples[~stored])
        sources: dict[int, PieceSource] = dict.fromkeys(self._samples.tolist(), rendered) if rendered else {}
        for sample, chunk in zip(self._samples[stored].tolist(), self._chunks[stored].tolist(), strict=True):
            sources[sample] = self.found[chunk]
        began = clock()
        made = await asyncio.to_thread(
            self._packing.build_frame, sources.__getitem__, self._metadata, self._context.memory
        )
        made.took = FrameTiming(took.fetch + clock() - began, took.prepare)
        return made

    async def _render_samples(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[RenderedSamples | None, FrameTiming]:
        if not samples.size:
            return None, FrameTiming()
        frame = await self._render(RowsAddress(self._within.hash, 0, tuple(samples.tolist())))
        try:
            fields = self.sequences.fields
            return await asyncio.to_thread(RenderedSamples, frame, samples, fields), frame.took
        finally:
            frame.close()


class _Series:
    """The packed frames of consecutive steps, written once into one block of shared memory; `metadata`: that
    of each. `frames`: to be written, all of them, before any is handed out.
    """

    def __init__(
        self,
        packings: Sequence[PackedRows],
        metadata: Sequence[Mapping[str, str]],
        memory: MemoryAccount,
    ) -> None:
        self._packings, self._metadata = packings, metadata
        layouts: dict[int, FrameLayout] = {}  # by rows: the layouts of frames differ only in their metadata
        self._layouts = []
        for packing, values in zip(packings, metadata, strict=True):
            rows = len(packing.rows)
            if rows not in layouts:
                layouts[rows] = packing.layout(values)
            self._layouts.append(layouts[rows])
        self.frames = make_block([layout.size for layout in self._layouts], memory)

    async def write_rows(self, rows: OpenRows) -> None:
        """Read the rows of all frames and write them. Raises NotDirectError."""
        turns = CooperativeYield()
        for number in range(len(self.frames)):
            written = rows.elements(number) <= _AT_ONCE
            if written:
                try:
                    self._write(number, rows, cached=True)
                except NotCachedError:
                    written = False
            if not written:
                await asyncio.to_thread(self._write, number, rows, cached=False)
            await turns.yield_if_due()

    def _write(self, number: int, rows: OpenRows, *, cached: bool) -> None:
        """Read and write a frame. Raises NotDirectError, also if its header is longer than that of others."""
        frame, layout, metadata = self.frames[number], self._layouts[number], self._metadata[number]
        if not self._packings[number].fill(frame, layout, metadata, rows.tensors(number, cached=cached)):
            raise NotDirectError("the headers have different lengths")
