"""SeriesFrames: the frames of consecutive steps in one block of shared memory, while they are written.

Law: the frames have the bytes that they have alone. Transform processes write the fields of the samples to
their places, so nothing is copied afterwards; what else a frame has is written meanwhile, by this process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from awscrt.checksums import crc32c

from meshd.batches.assembly.frame_buffer import POSITION, STATUS, fixed_specs, metadata_of, ragged_specs
from meshd.core.memory_frames import make_block
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.frame.tensor_frame import DTYPES, frame_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.frame_rows import Rows
    from meshd.core.frame_address import FrameAddress
    from meshd.core.memory_frames import MemoryAccount
    from meshd.core.plan_record import Plan
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.tensor_frame import FrameLayout

    Numbers = npt.NDArray[np.int64]


class SeriesFrames:
    """The frames of the `steps` of a plan. `rows`: those of each; `lengths`: the bytes of each row of all
    steps, int64[n], by the name of the ragged field.

    `frames`: to be written, all of them, before any is handed out.
    """

    def __init__(
        self,
        plan: Plan,
        snapshot: Snapshot,
        steps: Sequence[FrameAddress],
        rows: Sequence[Rows],
        lengths: Mapping[str, Numbers],
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

    def __repr__(self) -> str:
        return f"<SeriesFrames, {len(self.frames)} frames>"

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
