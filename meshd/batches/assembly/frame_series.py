"""SeriesBuilder: builds the frames of consecutive steps together, if all their rows are copied.

A frame of 1,024 small rows has a fixed cost that is greater than that of its rows: the objects, pages and
files of its rows are looked up, and a transform process is sent a message. The frames of a series share that.

Law: a series is an optimization. Its frames have the bytes that they have alone. If a row of it cannot be
copied, nothing of the series is used: each of its frames is built alone, and reports what is wrong.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.batches.assembly.column_copies import SMALL_BYTES, ColumnCopies, RowPlaces, block_fields
from meshd.batches.assembly.frame_buffer import FrameBuffer, metadata_of
from meshd.batches.assembly.ragged_rows import RaggedRows, set_copied
from meshd.core.document_store import asset_places
from meshd.core.sample_locations import PinnedObjects
from meshd.telemetry import tracing
from meshd.telemetry.plan_metrics import record_rendering
from meshd.util.async_tasks import CooperativeYield
from meshd.util.tenant_limits import current_tenant
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.batches.assembly.column_copies import StoredField
    from meshd.batches.assembly.frame_builder import BuildContext
    from meshd.batches.assembly.frame_rows import Rows
    from meshd.core.frame_address import FrameAddress
    from meshd.core.memory_frames import MemoryFrame
    from meshd.core.plan_record import Plan
    from meshd.transform.render_calls import RenderResult
    from meshwire.dataset.build_snapshot import Snapshot

MOST_ROWS: Final = 1 << 16
MOST_BYTES: Final = 64 << 20
"""Rows of a series, and bytes of its fields of fixed size; a longer one is built frame by frame."""


def series_fields(plan: Plan, snapshot: Snapshot) -> tuple[StoredField, ...] | None:
    """Return how the fields of a plan are stored if its frames can be built together, else None: all of them
    are copied, and in files of many samples."""
    if plan.within or snapshot.kind == "objects":
        return None
    return block_fields(plan.spec, plan.outputs, mixed=plan.pairs is not None)


class SeriesBuilder:
    """Builds the frames of some steps, once; `rows`: those of each."""

    def __init__(
        self,
        context: BuildContext,
        plan: Plan,
        snapshot: Snapshot,
        fields: tuple[StoredField, ...],
        steps: Sequence[FrameAddress],
        rows: Sequence[Rows],
    ) -> None:
        self._context, self._plan, self._snapshot, self._fields = context, plan, snapshot, fields
        self._steps, self._rows = steps, rows
        self._clock = asyncio.get_running_loop().time

    def __repr__(self) -> str:
        return f"<SeriesBuilder {self._plan.hash[:12]}, {len(self._steps)} steps>"

    async def build(self) -> list[MemoryFrame] | None:
        """Return the finished frames, None if they have to be built alone. Raises BatchError
        SnapshotChanged."""
        began = self._clock()
        with tracing.stage("assemble"):
            samples = np.concatenate([rows.samples for rows in self._rows])
            positions = np.concatenate([rows.positions for rows in self._rows])
            places = RowPlaces(self._snapshot, self._fields)
            if places.row_bytes(samples) > SMALL_BYTES:
                return None
            context = self._context
            pinned = PinnedObjects(context.store, self._snapshot, context.archives, context.remote)
            await pinned.look_up_rows(samples)
            copies = ColumnCopies(places, pinned, samples, positions, 0)
            if copies.rest:
                return None
            located = self._clock()
            rendered = await self._copied(copies)
            try:
                if rendered.failures:
                    return None
                record_rendering(self._plan.hash, samples.size, rendered.cpu, rendered.reading)
                reading = rendered.reading if rendered.seconds else 0.0
                fetch = located - began + reading
                frames = await self._frames(_columns(rendered, list(self._plan.outputs), samples.size))
            finally:
                rendered.close()
        prepare = self._clock() - located - reading
        for frame in frames:
            frame.took = FrameTiming(fetch / len(frames), max(0.0, prepare / len(frames)))
        return frames

    async def _copied(self, copies: ColumnCopies) -> RenderResult:
        """Have the rows copied into scratch files."""
        no_frame = os.memfd_create("mesh-no-frame", os.MFD_CLOEXEC)
        try:
            return await self._context.renderer.render(
                self._plan.hash,
                self._plan.program_text,
                self._steps[0].epoch,
                copies.work,
                frame_fd=no_frame,
                frame_bytes=0,
                targets=(None,) * len(self._fields),
                assets=asset_places(self._context.store, self._plan.assets),
                account=current_tenant(),
            )
        finally:
            os.close(no_frame)

    async def _frames(self, columns: dict[str, RaggedRows]) -> list[MemoryFrame]:
        """Return the frames, of their parts of the columns of all rows."""
        frames: list[MemoryFrame] = []
        turns, first = CooperativeYield(), 0
        try:
            with tracing.stage("seal"):
                for step, rows in zip(self._steps, self._rows, strict=True):
                    end = first + len(rows)
                    made = {name: column.part(first, end) for name, column in columns.items()}
                    buffer = FrameBuffer(
                        self._plan, self._snapshot, rows, metadata_of(step), self._context.memory, made
                    )
                    frames.append(buffer.frame)
                    frames[-1] = buffer.seal()
                    first = end
                    await turns.yield_if_due()
        except BaseException:
            for frame in frames:
                frame.close()
            raise
        return frames


def _columns(rendered: RenderResult, names: Sequence[str], count: int) -> dict[str, RaggedRows]:
    """Return the fields of `count` rows that were copied into scratch files."""
    columns = {name: RaggedRows(count) for name in names}
    for part in rendered.parts:
        set_copied([columns[name] for name in names], part)
    return columns
