"""Reads of packed rows: which bytes of which files the rows of a packed plan are made of, for the read-ahead.

Law: pieces of samples whose elements are read as they are stored lie in the samples' objects; of others, in
the stored sequences, or where a chunk of these is missing, in the samples that are rendered for it. The
ranges of an object that a disk reads through anyway are one piece.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.batches.assembly.frame_rows import pack_row_bounds
from meshd.batches.read_ahead.extents import GAP_BYTES, merge_ranges
from meshd.core.api_errors import BatchError
from meshd.core.sample_locations import bytes_columns, slice_locations
from meshd.store.errors import StoreError
from meshd.util.async_tasks import CooperativeYield
from meshwire.plan.epoch_order import epoch_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.stored_sequence_format import SequenceSet
    from meshd.batches.assembly.stored_sequences import OpenChunk, StoredSequences
    from meshd.batches.read_ahead.own_samples import OwnSamples
    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import PinnedObjects
    from meshd.transform.source_files import Piece
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.frame.columns import Integers
    from meshwire.plan.sequence_packing import PackTable, PieceColumns
    from meshwire.plan.shuffle import SampleOrder

    Ranges = list[tuple[int, int, int]]
    """(object, offset, length) each."""


class _PieceReads:
    """What the reads of both kinds of rows share. `pin`: returns the objects of the snapshot, to be looked
    up; `width`: bytes of an element in all packed fields."""

    def __init__(
        self,
        plan: Plan,
        table: PackTable,
        snapshot: Snapshot,
        pin: Callable[[Snapshot], PinnedObjects],
        width: int,
    ) -> None:
        self._plan, self._table, self._snapshot, self._pin = plan, table, snapshot, pin
        self._width = width

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._table.rows} rows>"

    @property
    def mean_bytes(self) -> float:
        """See `PackedReads`."""
        return float(self._table.lengths.sum()) / max(1, self._table.rows) * self._width

    def order(self, epoch: int) -> SampleOrder:
        """See `PackedReads`."""
        spec = self._plan.spec
        return epoch_order(spec, self._table.shard_starts, epoch, pack_row_bounds(self._table, spec))


class DirectReads(_PieceReads):
    """The reads of rows whose elements are read as they are stored. `dtypes`: of the packed fields, in their
    order."""

    in_objects = True

    def __init__(
        self,
        plan: Plan,
        table: PackTable,
        snapshot: Snapshot,
        pin: Callable[[Snapshot], PinnedObjects],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        assert plan.spec.pack is not None
        self._widths = {
            name: dtype.itemsize for name, dtype in zip(plan.spec.pack.fields, dtypes, strict=True)
        }
        super().__init__(plan, table, snapshot, pin, sum(self._widths.values()))

    def bytes_of(self, rows: Integers, own: OwnSamples | None) -> Integers:
        """See `PackedReads`."""
        columns = self._table.piece_columns(rows)
        sizes = columns[3] * self._width
        if own is not None:
            sizes *= own.includes(columns[1])
        return _sums(sizes, columns[0])

    async def pieces_of(self, rows: Integers, *, gap: int = GAP_BYTES) -> list[Piece]:
        """See `PackedReads`."""
        columns = await asyncio.to_thread(self._table.piece_columns, rows)
        with closing(self._pin(self._snapshot)) as pinned:
            try:
                await pinned.look_up_rows(columns[1])
                ranges = await asyncio.to_thread(self._ranges, columns, gap)
                return await _pieces_at(pinned, ranges)
            except BatchError:  # changed since the snapshot, or busy: the builder reports it
                return []

    def _ranges(self, columns: PieceColumns, gap: int) -> Ranges:
        _, samples, begins, lengths = columns
        found: Ranges = []
        for name, width in self._widths.items():
            column = bytes_columns(self._snapshot)[name]
            offsets = column.offsets_at(samples) + begins * width
            found += merge_ranges(column.objects_at(samples), offsets, lengths * width, gap=gap)
        return found


class SequenceReads(_PieceReads):
    """The reads of rows whose pieces are cut from stored sequences, or from samples rendered for the rows."""

    in_objects = False

    def __init__(
        self,
        plan: Plan,
        table: PackTable,
        snapshot: Snapshot,
        pin: Callable[[Snapshot], PinnedObjects],
        stored: StoredSequences,
        sequences: SequenceSet,
    ) -> None:
        self._stored, self._sequences = stored, sequences
        outputs = sequences.plan.outputs
        width = sum(np.dtype(outputs[name].dtype).itemsize for name in sequences.fields)
        super().__init__(plan, table, snapshot, pin, width)

    def bytes_of(self, rows: Integers, own: OwnSamples | None) -> Integers:
        """See `PackedReads`; what this node has stored is its own. Of chunks that are not stored, the samples
        are read."""
        counts, samples, _, lengths = self._table.piece_columns(rows)
        sizes, share = lengths * self._width, self._sequences.share
        if share < 1:
            whole = np.zeros(samples.size, np.int64)
            for column in bytes_columns(self._snapshot).values():
                whole += column.lengths_at(samples)
            sizes = (sizes * share + whole * (1 - share)).astype(np.int64)
        return _sums(sizes, counts)

    async def pieces_of(self, rows: Integers, *, gap: int = GAP_BYTES) -> list[Piece]:
        """See `PackedReads`."""
        columns = await asyncio.to_thread(self._table.piece_columns, rows)
        chunks = self._sequences.chunks_of(columns[1])
        opened = await self._stored.find(self._sequences, np.unique(chunks).tolist())
        found: list[Piece] = []
        for number, chunk in opened.items():
            chosen = chunks == number
            found += await asyncio.to_thread(self._stored_pieces, chunk, columns, chosen, gap)
        rendered = np.unique(columns[1][~np.isin(chunks, list(opened))])
        with closing(self._pin(self._snapshot)) as pinned:
            return found + await pinned.find_local_pieces(rendered)

    def _stored_pieces(
        self, chunk: OpenChunk, columns: PieceColumns, chosen: npt.NDArray[np.bool_], gap: int
    ) -> list[Piece]:
        _, samples, begins, lengths = columns
        places = samples[chosen] - chunk.first
        found: list[Piece] = []
        try:
            locations = chunk.store.locate(chunk.record)
        except StoreError:  # the builder reports it
            return found
        for field in range(len(self._sequences.fields)):
            offsets, sizes = chunk.index.block_ranges(field, places, begins[chosen], lengths[chosen])
            for _, offset, size in merge_ranges(np.zeros(offsets.size, np.int64), offsets, sizes, gap=gap):
                found += slice_locations(locations, offset, size)
        return found


async def _pieces_at(pinned: PinnedObjects, ranges: Iterable[tuple[int, int, int]]) -> list[Piece]:
    """Return the pieces of those ranges that this node holds. Raises BatchError SnapshotChanged,
    CorruptData."""
    found: list[Piece] = []
    turns = CooperativeYield()
    for place in ranges:
        if not pinned.is_remote(place[0]):
            found += pinned.pieces_at(*place)
        await turns.yield_if_due()
    return found


def _sums(sizes: Integers, counts: Integers) -> Integers:
    """Return the sum for each row of the sizes of its pieces: int64[rows]. `counts`: how many each has."""
    before = np.append(0, np.cumsum(sizes))
    ends = np.cumsum(counts)
    found: Integers = before[ends] - before[ends - counts]
    return found
