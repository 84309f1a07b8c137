"""Stored blocks of Zarr views: rendered once, kept as frames in the reserved bucket, read by range.

Law: a block is named by its content. The coordinator process renders it once for all concurrent
requests, and the requesting worker stores it. A block that is evicted between two reads, or damaged, is
rebuilt.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from awscrt.checksums import combine_crc32c, crc32c

from meshd.batches.assembly.frame_buffer import STATUS, fixed_specs
from meshd.batches.assembly.frame_metadata import block_metadata
from meshd.core.api_errors import BatchError, store_errors
from meshd.core.document_store import RESERVED_BUCKET, find_intact, unless_intact
from meshd.store.errors import ConditionFailedError
from meshd.store.records import Meta, Span
from meshd.telemetry import metrics
from meshd.util.async_tasks import SingleFlight
from meshd.views import view_kind
from meshd.views.transform_results import RESULTS_PREFIX
from meshd.views.view_kind import to_s3_error
from meshd.views.zarr.layout import BLOCK_NAME
from meshwire.errors import S3Error
from meshwire.frame.tensor_frame import frame_layout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.core.frame_address import BlockAddress, Frame, FrameSource
    from meshd.documents.inventory import UsageRecorder
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.views.zarr.layout import FieldPlan, ZarrLayout
    from meshwire.views.zarr_view import ZarrArray

_PIECE = 1 << 20


class BlockStore:
    """Stores and rebuilds blocks, for a worker."""

    def __init__(
        self, store: ObjectStore, frames: FrameSource, uses: UsageRecorder, objects: RemoteObjects
    ) -> None:
        self._store, self._frames, self._uses, self._objects = store, frames, uses, objects
        self._making: SingleFlight[str, Record] = SingleFlight()

    def __repr__(self) -> str:
        return f"<BlockStore, {len(self._making)} blocks in progress>"

    async def ensure_block(self, laid: ZarrLayout, array: ZarrArray, chunk: int) -> Record:
        """Return the stored frame of the block behind a chunk, rendering it if needed.

        Raises S3Error UnprocessableSource, SlowDown.
        """
        work, rows = laid.works[array.name], array.rows(chunk)
        place = f"{RESULTS_PREFIX}blocks/{work.block_name(laid.snapshot, rows)}"
        with store_errors():
            record = find_intact(self._store, place)
        view_kind.count_result(kept=record is not None)
        if record is None:
            record, _ = await self._making.run(place, lambda: self._make(laid, array, chunk, place))
        else:
            for op in work.plan.spec.ops:
                metrics.op_cache_hits.labels(metrics.op_label(op.op)).inc(len(rows))
        self._uses.note(place)
        return record

    async def rebuild_block(
        self, laid: ZarrLayout, array: ZarrArray, chunk: int, record: Record, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Yield bytes of a block whose stored frame cannot be read, from a rebuilt frame that is not stored.

        Raises S3Error.
        """
        address = await _address(laid, array, chunk)
        frame = await self._frame(laid, address)
        try:
            same = frame.size == record.size and await asyncio.to_thread(_crc, frame) == _stored_crc(record)
            if not same:
                raise S3Error("InternalError", f"Block {address.block} was rebuilt with other bytes.")
            for at in range(offset, offset + length, _PIECE):
                yield (Span(frame.fd, at, min(_PIECE, offset + length - at)),)
        finally:
            frame.close()

    async def _make(self, laid: ZarrLayout, array: ZarrArray, chunk: int, place: str) -> Record:
        address = await _address(laid, array, chunk)
        frame = await self._frame(laid, address)
        try:
            return await self._store_block(frame, place, address)
        finally:
            frame.close()

    async def _frame(self, laid: ZarrLayout, address: BlockAddress) -> Frame:
        try:
            frames = self._objects.frame_source_for(laid.snapshot.objects.buckets, self._frames)
            return await frames.get_frame(address)
        except BatchError as error:
            raise to_s3_error(error) from error

    async def _store_block(self, frame: Frame, place: str, address: BlockAddress) -> Record:
        """Store the block. If another worker stored it first, that one is used: it has the same bytes."""
        with store_errors():
            writer = self._store.writer(RESERVED_BUCKET, place, size=frame.size)
            try:
                for at in range(0, frame.size, _PIECE):
                    piece = await asyncio.to_thread(os.pread, frame.fd, min(_PIECE, frame.size - at), at)
                    await writer.write(piece)
                with suppress(ConditionFailedError):
                    meta = Meta(address.block)  # the name identifies the content
                    return await writer.commit(meta, conditions=unless_intact(self._store, place))
            finally:
                await writer.abort()
            found = self._store.get(RESERVED_BUCKET, place)
        if found is None:
            raise to_s3_error(BatchError("Busy", "a block was evicted while it was stored", retry_after=1))
        return found


async def _address(laid: ZarrLayout, array: ZarrArray, chunk: int) -> BlockAddress:
    return await asyncio.to_thread(laid.works[array.name].block_address, laid.snapshot, array.rows(chunk))


def _crc(frame: Frame) -> int:
    """Return the checksum of a whole frame (blocking)."""
    crc = 0
    for at in range(0, frame.size, _PIECE):
        crc = crc32c(os.pread(frame.fd, min(_PIECE, frame.size - at), at), crc)
    return crc


def _stored_crc(record: Record) -> int:
    """Return the same checksum for a stored frame, from the checksums of its extents."""
    crc = 0
    for extent in record.extents:
        crc = combine_crc32c(crc, extent.crc32c, extent.length)
    return crc


def offset_in_block(work: FieldPlan, array: ZarrArray, rows: range) -> int:
    """Return the offset in bytes of an array's rows in the frame of a block."""
    tensor = work.name if array.name == work.name else STATUS
    metadata = block_metadata("0" * BLOCK_NAME)
    return frame_layout(fixed_specs(work.plan, (), len(rows)), metadata).tensors[tensor].offset
