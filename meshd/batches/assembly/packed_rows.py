"""The rows of packed frames: copies pieces of samples into rows as the pack table lists them.

Law: the result depends on the address alone; the pack table is fixed when the plan is registered. Pieces
are read from stored sequences, or cut from samples that are rendered for the frame. A sample that has become
unreadable since leaves its slot empty and flags the row.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from awscrt.checksums import crc32c

from meshd.batches.assembly.frame_buffer import POSITION, STATUS, fixed_specs
from meshd.core.api_errors import BatchError
from meshd.core.memory_frames import MemoryFrame
from meshwire.frame import tensor_frame
from meshwire.frame.tensor_frame import DTYPES, Status, frame_layout
from meshwire.plan.sequence_packing import POSITIONS, SEGMENTS, PackTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.frame_rows import Rows
    from meshd.core.document_store import DocumentStore
    from meshd.core.memory_frames import MemoryAccount, SharedFrame
    from meshd.core.plan_record import Plan
    from meshwire.frame.tensor_frame import FrameLayout
    from meshwire.plan.sequence_packing import Pack

_TABLES = 4


def pack_table_key(digest: str) -> str:
    """Return the document key of a plan's pack table."""
    return f"packs/{digest}"


class PackTables:
    """The pack tables of recently used plans; one per process."""

    def __init__(self, catalog: DocumentStore) -> None:
        self._catalog = catalog
        self._known: OrderedDict[str, PackTable] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PackTables, {len(self._known)} known>"

    async def get_table(self, plan: Plan) -> PackTable:
        """Return the table of a packed plan.

        Raises BatchError NoSuchPlan if the table is lost; registering the plan again restores it.
        """
        known = self._known.get(plan.hash)
        if known is None:
            document = await self._catalog.find_shared(pack_table_key(plan.hash))
            if document is None:
                raise BatchError(
                    "NoSuchPlan",
                    f"this node does not have the row table of the packed plan {plan.hash}",
                    help="register it again with POST /-/plans",
                )
            known = self._known[plan.hash] = PackTable.from_bytes(document)
            if len(self._known) > _TABLES:
                self._known.popitem(last=False)
        self._known.move_to_end(plan.hash)
        return known


class PieceSource(Protocol):
    """Returns elements of samples."""

    def read_piece(self, field: int, sample: int, begin: int, length: int) -> npt.NDArray[Any] | None:
        """Return elements [begin, begin + length) of a sample's field (blocking); None if it has fewer."""
        ...


class RenderedSamples:
    """The samples of a frame of the inner plan."""

    def __init__(self, frame: MemoryFrame, samples: npt.NDArray[np.int64], fields: Sequence[str]) -> None:
        tensors = tensor_frame.tensor_views(_read(frame))
        self._data = [tensors[f"{name}.data"] for name in fields]
        self._offsets = [tensors[f"{name}.offsets"] for name in fields]
        self._masked = tensors[STATUS] == Status.MASKED
        self._places = {sample: place for place, sample in enumerate(samples.tolist())}

    def __repr__(self) -> str:
        return f"<RenderedSamples, {len(self._places)}>"

    def read_piece(self, field: int, sample: int, begin: int, length: int) -> npt.NDArray[Any] | None:
        place = self._places[sample]
        start, end = self._offsets[field][place : place + 2].tolist()
        if self._masked[place] or end - start < begin + length:
            return None
        return self._data[field][start + begin : start + begin + length]


class PackedRows(msgspec.Struct, frozen=True):
    """The input of a packed frame: `rows`, whose samples are rows of the table."""

    plan: Plan
    table: PackTable
    rows: Rows

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces (sample, begin, length) of all rows."""
        for row in self.rows.samples.tolist():
            yield from self.table.pieces(row)

    def build_frame(
        self,
        source_of: Callable[[int], PieceSource],
        metadata: Mapping[str, str],
        memory: MemoryAccount,
    ) -> MemoryFrame:
        """Build the packed frame. Blocking: run it in a thread. `source_of` returns where the pieces of a
        sample are read. Raises what reading raises.
        """
        rows = self.rows
        assert self.plan.spec.pack is not None
        columns = _Columns(self.plan.spec.pack, self.plan, len(rows))
        for number, row in enumerate(rows.samples.tolist()):
            at = 0
            for segment, piece in enumerate(self.table.pieces(row), 1):
                if not columns.copy_piece(source_of(piece[0]), piece, (number, at), segment):
                    rows.status[number] = max(int(rows.status[number]), int(Status.MASKED))
                at += piece[2]
        return self.write_frame(columns.tensors, metadata, memory)

    def write_frame(
        self, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], memory: MemoryAccount
    ) -> MemoryFrame:
        """Return the frame of filled tensors of all rows. Blocking."""
        layout = self.layout(metadata)
        made = MemoryFrame(layout.size, memory)
        self.fill(made, layout, metadata, tensors)
        return made

    def layout(self, metadata: Mapping[str, str]) -> FrameLayout:
        """Return the layout of the frame."""
        return frame_layout(fixed_specs(self.plan, (), len(self.rows)), metadata)

    def fill(
        self,
        made: SharedFrame,
        layout: FrameLayout,
        metadata: Mapping[str, str],
        tensors: Mapping[str, npt.NDArray[Any]],
    ) -> bool:
        """Write the frame, with usually one system call; `layout` may have other metadata. Return False,
        without writing, if the header has another length with these. Blocking."""
        rows = self.rows
        filled = {**tensors, POSITION: rows.positions, STATUS: rows.status}
        pieces: list[bytes | memoryview] = []
        sums, end = {}, len(layout.header)
        for name, slot in layout.tensors.items():
            data = np.ascontiguousarray(filled[name], DTYPES[slot.dtype]).reshape(-1).view(np.uint8).data
            sums[name] = crc32c(data)
            pieces += [bytes(slot.offset - end), data]
            end = slot.offset + slot.nbytes
        header = layout.header_of(metadata, sums)
        if len(header) != len(layout.header):
            return False
        _write_all(made, [header, *pieces])
        made.rows = len(rows)
        return True


def _read(frame: MemoryFrame) -> bytearray:
    data = bytearray(frame.size)
    view, at = memoryview(data), 0
    while at < frame.size:
        at += os.preadv(frame.fd, [view[at:]], at)
    return data


class _Columns:
    """The tensors of a packed frame while they are filled."""

    def __init__(self, pack: Pack, plan: Plan, rows: int) -> None:
        self._fields, self._from_sample = pack.fields, pack.positions == "sample"
        self._segments, self._positions = pack.segments, pack.positions != "none"
        self.tensors: dict[str, npt.NDArray[Any]] = {}
        for name in pack.fields:
            shape, dtype = (rows, pack.length), np.dtype(plan.outputs[name].dtype)
            self.tensors[name] = np.full(shape, pack.value, dtype)
        self.tensors |= {name: np.zeros((rows, pack.length), np.int32) for name in pack.numbers}

    def copy_piece(
        self, source: PieceSource, piece: tuple[int, int, int], place: tuple[int, int], segment: int
    ) -> bool:
        """Copy a piece (sample, begin, length) to its place (row, column). Returns whether the sample is as
        long as the table says.
        """
        (sample, begin, length), (row, at) = piece, place
        for field, name in enumerate(self._fields):
            elements = source.read_piece(field, sample, begin, length)
            if elements is None:
                return False
            self.tensors[name][row, at : at + length] = elements
        if self._segments:
            self.tensors[f"{self._fields[0]}{SEGMENTS}"][row, at : at + length] = segment
        if self._positions:
            first = begin if self._from_sample else 0
            positions = self.tensors[f"{self._fields[0]}{POSITIONS}"]
            positions[row, at : at + length] = np.arange(first, first + length)
        return True


def _write_all(made: SharedFrame, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces one after the other: usually at once, as there are few."""
    left, at = [memoryview(piece) for piece in pieces if len(piece)], made.offset
    while left:
        written = os.pwritev(made.fd, left, at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
