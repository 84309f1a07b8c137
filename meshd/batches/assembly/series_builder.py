"""SeriesBuilder: builds the frames of consecutive steps together, if all their rows are copied.

A frame of 1,024 small rows has a fixed cost that is greater than that of its rows: the objects, pages and
files of its rows are looked up, and a transform process is sent a message. The frames of a series share that,
and one block of memory, into which transform processes write the fields.

Law: a series is an optimization. Its frames have the bytes that they have alone. If a row of it cannot be
copied, nothing of the series is used: each of its frames is built alone, and reports what is wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from awscrt.checksums import crc32c

from meshd.batches.assembly.column_copies import (
    BLOCK_ROWS,
    SMALL_BYTES,
    ColumnCopies,
    RowPlaces,
    block_fields,
)
from meshd.batches.assembly.frame_buffer import POSITION, STATUS, fixed_specs, metadata_of, ragged_specs
from meshd.core.document_store import asset_places
from meshd.core.memory_frames import make_block
from meshd.telemetry import tracing
from meshd.telemetry.training_metrics import record_rendering
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.frame.tensor_frame import DTYPES, frame_layout
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.column_copies import StoredField
    from meshd.batches.assembly.frame_builder import BuildContext
    from meshd.batches.assembly.frame_rows import Rows
    from meshd.core.frame_address import FrameAddress
    from meshd.core.memory_frames import MemoryAccount, SharedFrame
    from meshd.core.plan_record import Plan
    from meshd.transform.renderer import RenderResult, RowWork
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.tensor_frame import FrameLayout

MOST_ROWS: Final = 1 << 16
MOST_BYTES: Final = 64 << 20
"""Rows of a series, and bytes of its fields of fixed size; a longer one is built frame by frame."""
_FRAMES_A_TURN: Final = 8  # whose tables are written before others take turns


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

    async def build(self) -> list[SharedFrame] | None:
        """Return the finished frames, in one block of memory; None if they have to be built alone. Raises
        BatchError SnapshotChanged."""
        began = self._clock()
        with tracing.stage("assemble"):
            samples = np.concatenate([rows.samples for rows in self._rows])
            positions = np.concatenate([rows.positions for rows in self._rows])
            places = RowPlaces(self._snapshot, self._fields)
            if places.row_bytes(samples) > SMALL_BYTES:
                return None
            context = self._context
            pinned = context.pin(self._snapshot)
            await pinned.look_up_objects(places.object_numbers(samples))
            firsts = frames_of_blocks([len(rows) for rows in self._rows])
            ends = np.cumsum([len(rows) for rows in self._rows])[[end - 1 for end in firsts[1:]]].tolist()
            copies = ColumnCopies(places, pinned, samples, positions, ends)
            if copies.rest or len(copies.work) != len(ends):
                return None
            located = self._clock()
            names = list(self._plan.outputs)
            lengths = {names[number]: each for number, each in places.lengths(samples).items()}
            made = _SeriesFrames(self._plan, self._snapshot, self._steps, self._rows, lengths, context.memory)
            rendered = await self._write_frames(made, copies.work, firsts)
            if rendered is None:
                return None
            record_rendering(self._plan.hash, samples.size, rendered.cpu, rendered.reading)
            reading = rendered.reading if rendered.seconds else 0.0
        fetch, prepare = located - began + reading, self._clock() - located - reading
        for frame in made.frames:
            frame.took = FrameTiming(fetch / len(made), max(0.0, prepare / len(made)))
        return made.frames

    async def _write_frames(
        self, made: _SeriesFrames, work: Sequence[RowWork], firsts: Sequence[int]
    ) -> RenderResult | None:
        """Write the frames; `firsts`: the first frame of each block of rows, and their number. Return how
        their fields were written, None if they could not be."""
        blocks = [
            placed_block(each, made.places(*bounds))
            for each, bounds in zip(work, itertools.pairwise(firsts), strict=True)
        ]
        rendering = asyncio.create_task(self._render_fields(made, blocks))
        try:
            for number in range(len(made)):
                if not number % _FRAMES_A_TURN:  # first of all, the blocks are sent
                    await asyncio.sleep(0)
                made.write_tables(number)
            rendered = await rendering
        finally:
            rendering.cancel()
        try:
            if rendered.failures:
                return None
            with tracing.stage("seal"):
                sums = {
                    row: each
                    for part in rendered.checksums
                    for row, each in zip(part.rows, part.columns, strict=True)
                }
                flat = itertools.chain.from_iterable(sums[each.row] for each in work)
                written = [
                    made.write_header(number, list(itertools.islice(flat, len(self._fields))))
                    for number in range(len(made))
                ]
        finally:
            rendered.close()
        return rendered if all(written) else None

    async def _render_fields(self, made: _SeriesFrames, work: Sequence[RowWork]) -> RenderResult:
        """Have transform processes write the fields into the frames."""
        return await self._context.renderer.render(
            self._plan.hash,
            self._plan.program_text,
            self._steps[0].epoch,
            work,
            frame_fd=made.frames[0].fd,
            frame_bytes=sum(frame.size for frame in made.frames),
            targets=(None,) * len(self._fields),
            assets=asset_places(self._context.store, self._plan.assets),
        )


class _SeriesFrames:
    """The frames in their block of memory. `rows`: those of each step; `lengths`: the bytes of each row of
    all steps, int64[n], by the name of the ragged field.

    `frames`: to be written, all of them, before any is handed out. Transform processes write the fields to
    their `places`, so nothing is copied afterwards; this process meanwhile writes all else.
    """

    def __init__(
        self,
        plan: Plan,
        snapshot: Snapshot,
        steps: Sequence[FrameAddress],
        rows: Sequence[Rows],
        lengths: Mapping[str, npt.NDArray[np.int64]],
        memory: MemoryAccount,
    ) -> None:
        self._plan, self._steps, self._rows = plan, steps, rows
        self._labels = {
            name: column
            for name, column in sorted(snapshot.fields.items())
            if isinstance(column, LabelColumn)
        }
        self._bounds = np.cumsum([0, *map(len, rows)]).tolist()
        self._ends = {name: np.concatenate(([0], np.cumsum(each))) for name, each in lengths.items()}
        self._data = tuple(f"{name}.data" if name in lengths else name for name in plan.outputs)
        self._layouts = self._lay_out()
        self._sums: list[dict[str, int]] = [{} for _ in steps]
        self.frames = make_block([layout.size for layout in self._layouts], memory)

    def __len__(self) -> int:
        return len(self.frames)

    def _lay_out(self) -> list[FrameLayout]:
        """Return the layouts, which differ only in the metadata of their headers if the sizes are equal."""
        known: dict[tuple[int, ...], FrameLayout] = {}
        found = []
        totals = [np.diff(each[self._bounds]).tolist() for each in self._ends.values()]
        for step, count, *sizes in zip(self._steps, map(len, self._rows), *totals, strict=True):
            layout = known.get((count, *sizes))
            if layout is None:
                specs = fixed_specs(self._plan, self._labels, count)
                for name, size in zip(self._ends, sizes, strict=True):
                    specs += ragged_specs(name, self._plan.outputs[name], size, count)
                layout = known[count, *sizes] = frame_layout(specs, metadata_of(step))
            found.append(layout)
        return found

    def places(self, first: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return for the frames from `first` to before `end` their rows, and where the tensor of each field
        begins in the block of memory."""
        return tuple(
            (
                len(self._rows[number]),
                tuple(
                    self.frames[number].offset + self._layouts[number].tensors[name].offset
                    for name in self._data
                ),
            )
            for number in range(first, end)
        )

    def write_tables(self, number: int) -> None:
        """Write what a frame has besides its fields and its header: labels, positions, status, offsets."""
        rows, first, end = self._rows[number], self._bounds[number], self._bounds[number + 1]
        tables: dict[str, npt.NDArray[Any]] = {
            name: column.values_at(rows.samples) for name, column in self._labels.items()
        }
        tables |= {POSITION: rows.positions, STATUS: rows.status}
        for name, ends in self._ends.items():
            item = np.dtype(self._plan.outputs[name].dtype).itemsize
            begins = ends[first : end + 1] - ends[first]
            tables[f"{name}.offsets"] = begins if item == 1 else begins // item
        frame, layout, sums = self.frames[number], self._layouts[number], self._sums[number]
        for name, values in tables.items():
            slot = layout.tensors[name]
            data = np.ascontiguousarray(values, DTYPES[slot.dtype]).view(np.uint8).data
            os.pwrite(frame.fd, data, frame.offset + slot.offset)
            sums[name] = crc32c(data)

    def write_header(self, number: int, sums: Sequence[int]) -> bool:
        """Write the header of a frame, last; `sums`: the crc32c of the tensor of each field. Return False if
        it is longer than those of others."""
        frame, layout = self.frames[number], self._layouts[number]
        known = self._sums[number] | dict(zip(self._data, sums, strict=True))
        header = layout.header_of(metadata_of(self._steps[number]), known)
        if len(header) != len(layout.header):
            return False
        os.pwrite(frame.fd, header, frame.offset)
        frame.rows = len(self._rows[number])
        return True


def frames_of_blocks(counts: Sequence[int]) -> list[int]:
    """Return the first frame of each block of rows, and the number of frames, which have `counts` rows each:
    a block has whole frames, and more than BLOCK_ROWS rows only if one frame has."""
    firsts, rows = [0], 0
    for number, count in enumerate(counts):
        if rows + count > BLOCK_ROWS and number > firsts[-1]:
            firsts.append(number)
            rows = 0
        rows += count
    return [*firsts, len(counts)]


def placed_block(work: RowWork, frames: tuple[tuple[int, tuple[int, ...]], ...]) -> RowWork:
    """Return the work with the places to which the fields are written."""
    assert work.block is not None
    return msgspec.structs.replace(work, block=msgspec.structs.replace(work.block, frames=frames))
