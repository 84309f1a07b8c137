"""A frame while it is made: tensors laid out, rows rendered in place, ragged data collected, then sealed.

Law: fixed tensors come first, so that their places are known before a ragged byte is; ragged ones are laid
out when all rows are there. Invariant: after `seal` every byte of the frame is determined by its address.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.assembly.memory import MemoryFrame, unmap
from meshwire.frames import DTYPES, dtype_code, layout
from meshwire.snapshots import LabelColumn

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshd.assembly.plans import Output, Plan
    from meshd.assembly.rendering import Rendered
    from meshwire.frames import FrameLayout
    from meshwire.snapshots import Snapshot

POSITION, STATUS = "__pos", "__status"
TensorSpec = tuple[str, str, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of a frame: `positions`, `samples` int64[n] (a stand-in's after substitution), `status`
    uint8[n].
    """

    positions: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    status: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return int(self.positions.size)

    def keep(self, kept: npt.NDArray[np.int64]) -> Rows:
        return Rows(self.positions[kept], self.samples[kept], self.status[kept])


@dataclass(frozen=True, slots=True)
class _RaggedRow:
    """One row of one ragged field: `length` bytes at `offset` of a scratch file."""

    fd: int
    offset: int
    length: int
    shape: tuple[int, ...]


class Draft:
    """One frame in the making. `close` in any case; `seal` gives the frame away."""

    def __init__(self, plan: Plan, snapshot: Snapshot, rows: Rows, metadata: Mapping[str, str]) -> None:
        self.rows = rows
        self._plan, self._metadata = plan, metadata
        self._labels = {
            name: column
            for name, column in sorted(snapshot.fields.items())
            if isinstance(column, LabelColumn)
        }
        self._names = tuple(plan.outputs)
        self._ragged: dict[int, list[_RaggedRow | None]] = {
            number: [None] * len(rows)
            for number, output in enumerate(plan.outputs.values())
            if output.shape is None
        }
        self._rendered: list[Rendered] = []
        self._layout = layout([*self._fixed_specs(len(rows)), *self._ragged_specs()], metadata)
        self.frame = MemoryFrame(self._layout.size)

    @property
    def targets(self) -> tuple[tuple[int, int] | None, ...]:
        """For each bytes field: (offset of its tensor, rows), or None when ragged."""
        return tuple(
            None if output.shape is None else (self._layout.tensors[name].offset, len(self.rows))
            for name, output in self._plan.outputs.items()
        )

    def _fixed_specs(self, count: int) -> list[TensorSpec]:
        fixed = [
            (name, dtype_code(output.dtype), (count, *output.shape))
            for name, output in self._plan.outputs.items()
            if output.shape is not None
        ]
        labels = [(name, "I64", (count,)) for name in self._labels]
        return [*fixed, *labels, (POSITION, "I64", (count,)), (STATUS, "U8", (count,))]

    def _ragged_specs(self) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        for number, rows in self._ragged.items():
            name, output = self._names[number], self._output(number)
            code = dtype_code(output.dtype)
            total = sum(row.length for row in rows if row is not None) // DTYPES[code].itemsize
            specs += [(f"{name}.data", code, (total,)), (f"{name}.offsets", "I64", (len(rows) + 1,))]
            if output.ndim != 1:
                specs.append((f"{name}.shapes", "I64", (len(rows), output.ndim)))
        return specs

    def _output(self, number: int) -> Output:
        return self._plan.outputs[self._names[number]]

    def take(self, rendered: Rendered) -> None:
        """Take over what was rendered; of rows rendered twice the last counts."""
        self._rendered.append(rendered)
        for part in rendered.parts:
            offset = 0
            for column in part.columns:
                for row, length, shape in zip(part.rows, column.lengths, column.shapes, strict=True):
                    self._ragged[column.field][row] = _RaggedRow(part.fd, offset, length, tuple(shape))
                    offset += length

    def blank(self, row: int) -> None:
        """Make a row nothing: what a failed rendering left of it is overwritten with zeros."""
        for number, target in enumerate(self.targets):
            if target is None:
                self._ragged[number][row] = None
                continue
            slot = self._layout.tensors[self._names[number]]
            width = slot.nbytes // len(self.rows)
            os.pwrite(self.frame.fd, bytes(width), slot.offset + row * width)

    def seal(self, kept: Sequence[int] | None = None) -> MemoryFrame:
        """The finished frame, with all rows or only those `kept` (ascending)."""
        if kept is not None and len(kept) < len(self.rows):
            self._compact(np.array(kept, dtype=np.int64))
        elif self._ragged:
            self._place(len(self.rows))
        mapping = self.frame.map()
        try:
            self._fill(mapping)
        finally:
            unmap(mapping)
        self.frame.rows = len(self.rows)
        return self.frame

    def _compact(self, kept: npt.NDArray[np.int64]) -> None:
        """Copy the rows that stay into a frame of their own."""
        self._ragged = {number: [rows[row] for row in kept] for number, rows in self._ragged.items()}
        self.rows = self.rows.keep(kept)
        self._move(layout([*self._fixed_specs(len(kept)), *self._ragged_specs()], self._metadata), kept)

    def _place(self, count: int) -> None:
        """Lay out again, now that the sizes of the ragged fields are known."""
        final = layout([*self._fixed_specs(count), *self._ragged_specs()], self._metadata)
        if all(final.tensors[name].offset == slot.offset for name, slot in self._fixed_slots().items()):
            self.frame.grow(final.size)
            self._layout = final
        else:  # the header grew over a page: every tensor moved
            self._move(final, np.arange(count))

    def _fixed_slots(self) -> dict[str, Any]:
        return {
            name: self._layout.tensors[name]
            for name, output in self._plan.outputs.items()
            if output.shape is not None
        }

    def _move(self, final: FrameLayout, kept: npt.NDArray[np.int64]) -> None:
        moved = MemoryFrame(final.size)
        before, after = self.frame.map(), moved.map()
        try:
            for name, slot in self._fixed_slots().items():
                final.tensors[name].view(memoryview(after))[...] = slot.view(memoryview(before))[kept]
        finally:
            unmap(before)
            unmap(after)
        self.frame.close()
        self.frame, self._layout = moved, final

    def _fill(self, mapping: mmap.mmap) -> None:
        """Everything but the rendered rows: labels, positions, status, ragged data, header and checksums."""
        masked = self.rows.status == 2
        for name, column in self._labels.items():
            self._set(mapping, name, np.where(masked, 0, column.values[self.rows.samples]))
        self._set(mapping, POSITION, self.rows.positions)
        self._set(mapping, STATUS, self.rows.status)
        for number, rows in self._ragged.items():
            self._fill_ragged(mapping, number, rows)
        self._layout.seal(memoryview(mapping))

    def _set(self, mapping: mmap.mmap, name: str, values: npt.NDArray[Any]) -> None:
        self._layout.tensors[name].view(memoryview(mapping))[...] = values

    def _fill_ragged(self, mapping: mmap.mmap, number: int, rows: list[_RaggedRow | None]) -> None:
        name, output = self._names[number], self._output(number)
        slot = self._layout.tensors[f"{name}.data"]
        lengths = [0 if row is None else row.length for row in rows]
        ends = np.cumsum([0, *lengths])
        self._set(mapping, f"{name}.offsets", ends // DTYPES[slot.dtype].itemsize)
        if output.ndim != 1:
            shapes = [(0,) * output.ndim if row is None else row.shape for row in rows]
            self._set(mapping, f"{name}.shapes", np.array(shapes, dtype=np.int64).reshape(-1, output.ndim))
        data = memoryview(mapping)[slot.offset : slot.offset + slot.nbytes]
        for row, start in zip(rows, ends.tolist(), strict=False):
            if row is not None and row.length:
                _read_into(row, data[start : start + row.length])
        data.release()

    def close(self) -> None:
        """Release the scratch files. Idempotent."""
        while self._rendered:
            self._rendered.pop().close()


def _read_into(row: _RaggedRow, target: memoryview) -> None:
    done = 0
    while done < row.length:
        count = os.preadv(row.fd, [target[done:]], row.offset + done)
        if not count:
            raise EOFError("a scratch file is shorter than its transform process said")
        done += count
