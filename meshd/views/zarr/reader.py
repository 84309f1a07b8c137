"""Reader of Zarr views: generated metadata and labels, chunks and shards assembled from stored blocks.

Law: sizes and ETags follow from the layout, so listings and HEAD render nothing. A chunk is the rows of
one block, followed by zeros after the last sample; a shard is its chunks and their index. A block is named by
its content, and kept as a frame in the reserved bucket. The coordinator renders it once for all concurrent
requests, and the worker that was asked stores it. One that is evicted between two reads, or damaged, is
rebuilt.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

from awscrt.checksums import combine_crc32c, crc32c

from meshd.batches.assembly.frame_buffer import STATUS, block_metadata, fixed_specs
from meshd.core.api_errors import BatchError, store_errors
from meshd.core.document_store import RESERVED_BUCKET, find_intact, unless_intact
from meshd.core.read_source import GeneratedSource, ReadSource
from meshd.store.errors import ConditionFailedError, CorruptExtentError, DiskFailedError, ExtentGoneError
from meshd.store.records import Meta, Record, Span
from meshd.telemetry import metrics
from meshd.telemetry.metric_registry import bounded_label
from meshd.util.async_tasks import SingleFlight
from meshd.views import view_kind
from meshd.views.key_paging import build_page
from meshd.views.transform_results import RESULTS_PREFIX
from meshd.views.view_kind import AssembledObject, to_s3_error
from meshd.views.zarr.layout import BLOCK_NAME
from meshwire.errors import S3Error
from meshwire.frame.tensor_frame import frame_layout
from meshwire.s3.result_types import ObjectEntry, ObjectListing
from meshwire.views.zarr_view import METADATA

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.core.frame_address import BlockAddress, Frame, FrameSource
    from meshd.documents.inventory import UsageFile
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.views.zarr.layout import FieldPlan, ZarrLayout
    from meshd.views.zarr.layout_cache import ZarrLayoutCache
    from meshwire.s3.operations import ListObjects
    from meshwire.views.zarr_view import ZarrArray, ZarrView

_PIECE: Final = 4 << 20
_ZEROS: Final = 1 << 20
_AT_ONCE: Final = 1024  # samples that are hashed for an ETag without a thread
_CHUNKS = "/c/"


class ZarrReader:
    """Reads Zarr views, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        layouts: ZarrLayoutCache,
        frames: FrameSource,
        uses: UsageFile,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._layouts = store, layouts
        self._blocks = BlockStore(store, frames, uses, objects)

    def __repr__(self) -> str:
        return f"<ZarrReader, {self._layouts!r}>"

    # --- one object -------------------------------------------------------------------------------------

    async def find_object(self, view: ZarrView, key: str) -> AssembledObject:
        """Return an object of the view.

        Raises S3Error NoSuchKey, SourceChanged, ViewOutdated, UnprocessableSource, SlowDown.
        """
        laid = await self._layouts.get_layout(view)
        if laid is not None and key in laid.metadata:
            document = laid.metadata[key]
            record = _metadata_record(laid, document)
            source = GeneratedSource(lambda offset, length: _bytes(document, offset, length))
            return AssembledObject(record, [source])
        laid, array, number = await self._locate(view, laid, key)
        record = await _record_of(laid, array, number)
        stored = StoredBlocksSource(self._store, self._blocks, laid, array, number)
        return AssembledObject(record, [stored, RebuiltBlockSource(stored)])

    async def _locate(
        self, view: ZarrView, laid: ZarrLayout | None, key: str
    ) -> tuple[ZarrLayout, ZarrArray, int]:
        """Return the array and number of a chunk or shard, in a layout that matches its sources."""
        place = _parse_key(laid, key)
        if laid is not None and place is not None:
            changed = await self._layouts.find_changed_object(laid, *place)
            if not changed:
                return laid, *place
            if not view.follow:
                message = f"{changed} was replaced or deleted since the view was created."
                raise S3Error("SourceChanged", message)
        if _CHUNKS not in key:
            raise S3Error("NoSuchKey", extra={"Key": key})
        laid = await self._layouts.rescan(view)
        place = _parse_key(laid, key)
        if laid is not None and place is not None:
            return laid, *place
        if view.follow:  # NoSuchKey would read as zeros, the fill value of a missing chunk
            raise S3Error("SourceChanged", "The source has fewer samples now; reopen the array.")
        raise S3Error("NoSuchKey", extra={"Key": key})

    # --- listings ---------------------------------------------------------------------------------------

    async def list_page(self, view: ZarrView, operation: ListObjects) -> ObjectListing:
        """Return a page of metadata and chunks. Renders nothing."""
        laid = await self._layouts.get_layout(view)
        return ObjectListing() if laid is None else await asyncio.to_thread(_listing, laid, operation)


class StoredBlocksSource(ReadSource):
    """A chunk, or a shard of chunks, of an array: rows of stored blocks, labels, zeros and an index."""

    failures = (CorruptExtentError, DiskFailedError)

    def __init__(
        self, store: ObjectStore, blocks: BlockStore, laid: ZarrLayout, array: ZarrArray, number: int
    ) -> None:
        self._store, self._blocks = store, blocks
        self.laid, self.array, self.number = laid, array, number
        self._records: dict[int, Record] = {}

    def __repr__(self) -> str:
        return f"<StoredBlocksSource of {self.array.name} {self.number}>"

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        end, at = offset + length, 0
        for chunk in self.array.held(self.number):
            first, last = max(offset, at), min(end, at + self.array.chunk_bytes)
            if first < last:
                async for spans in self._chunk(chunk, first - at, last - first):
                    yield spans
            at += self.array.chunk_bytes
        if end > at:
            first = max(offset, at)
            async for spans in _bytes(self.array.index(self.number), first - at, end - first):
                yield spans

    async def _chunk(self, chunk: int, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        rows = self.array.rows(chunk)
        there = self._stored_bytes(chunk, offset, length)
        if there and self.array.name not in self.laid.works:
            values = self.laid.label(self.array.name).values[rows.start : rows.stop].astype("<i8").tobytes()
            async for spans in _bytes(values, offset, there):
                yield spans
        elif there:
            async for spans in self._block(chunk, offset, there):
                yield spans
        async for spans in _zeros(length - there):
            yield spans

    def _stored_bytes(self, chunk: int, offset: int, length: int) -> int:
        """The bytes of a chunk's range that are rows; the others are zeros."""
        return min(length, max(0, len(self.array.rows(chunk)) * self.array.row_bytes - offset))

    async def _block(self, chunk: int, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        start = self._offset_in_block(chunk) + offset
        with ExitStack() as stack:
            record = await self._ensure_block(chunk)
            try:
                spans = stack.enter_context(self._store.open_spans(record, start, length))
            except ExtentGoneError:  # evicted or moved at this moment
                record = await self._ensure_block(chunk)
                spans = stack.enter_context(self._store.open_spans(record, start, length))
            for piece in _pieces(spans):
                yield (piece,)

    def _offset_in_block(self, chunk: int) -> int:
        return offset_in_block(self.laid.works[self.array.name], self.array, self.array.rows(chunk))

    async def _ensure_block(self, chunk: int) -> Record:
        record = await self._blocks.ensure_block(self.laid, self.array, chunk)
        self._records[chunk] = record
        return record

    async def rebuild_block(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        """Yields the rest of the rows of the chunk at `offset`, of a block that is made again and not stored.
        Raises S3Error."""
        place, offset = divmod(offset, self.array.chunk_bytes)
        chunks = self.array.held(self.number)
        if place >= len(chunks) or chunks[place] not in self._records:
            return  # what was made here is never damaged
        chunk = chunks[place]
        there = self._stored_bytes(chunk, offset, min(length, self.array.chunk_bytes - offset))
        start, record = self._offset_in_block(chunk) + offset, self._records[chunk]
        async for spans in self._blocks.rebuild_block(self.laid, self.array, chunk, record, start, there):
            yield spans


class RebuiltBlockSource(ReadSource):
    """The rest of one block that is stored here and cannot be read."""

    label = "made"

    def __init__(self, stored: StoredBlocksSource) -> None:
        self._stored = stored

    def __repr__(self) -> str:
        return f"<RebuiltBlockSource behind {self._stored!r}>"

    def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        return self._stored.rebuild_block(offset, length)


def _pieces(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        for at in range(0, span.length, _PIECE):
            yield span.sub_span(at, min(_PIECE, span.length - at))


def _parse_key(laid: ZarrLayout | None, key: str) -> tuple[ZarrArray, int] | None:
    """Return the array and number of a chunk or shard; None for metadata and unknown keys."""
    array = None if laid is None else laid.arrays.get(key.partition(_CHUNKS)[0])
    numbers = None if array is None else array.keys.parse_key(key)
    return None if array is None or numbers is None else (array, numbers[0])


def _listing(laid: ZarrLayout, operation: ListObjects) -> ObjectListing:
    page = build_page(operation, lambda prefix, after: _walk(laid, prefix, after))
    records = [(key, _entry(laid, place)) for key, place in page.items]
    entries = [ObjectEntry(key, record.size, record.etag, record.modified) for key, record in records]
    return ObjectListing(tuple(entries), tuple(page.prefixes), page.truncated, page.last)


_Entry = bytes | tuple["ZarrArray", int]


def _walk(laid: ZarrLayout, prefix: str, after: str) -> Iterator[tuple[str, _Entry]]:
    """Yield all keys in order: an array's chunks, then its metadata, and between the arrays the group's."""
    for start in sorted([METADATA, *(f"{name}/" for name in laid.arrays)]):
        array = laid.arrays.get(start.removesuffix("/"))
        if array is not None and start.endswith("/"):
            for key, numbers in array.keys.iter_keys(prefix, after):
                yield key, (array, numbers[0])
        key = METADATA if array is None else start + METADATA
        if key > after and key.startswith(prefix):
            yield key, laid.metadata[key]


def _entry(laid: ZarrLayout, place: _Entry) -> Record:
    return _metadata_record(laid, place) if isinstance(place, bytes) else _record(laid, *place)


async def _record_of(laid: ZarrLayout, array: ZarrArray, number: int) -> Record:
    """Return the record of a chunk or shard; in a thread if its ETag covers many samples."""
    if len(array.held(number)) * array.chunk <= _AT_ONCE:
        return _record(laid, array, number)
    return await asyncio.to_thread(_record, laid, array, number)


def _record(laid: ZarrLayout, array: ZarrArray, number: int) -> Record:
    headers = {"content-type": "application/octet-stream"}
    size, etag = array.object_bytes(number), laid.etag(array, number)
    return Record(size, etag, 0, laid.modified, (), headers)


def _metadata_record(laid: ZarrLayout, document: bytes) -> Record:
    etag = hashlib.md5(document, usedforsecurity=False).hexdigest()
    return Record(len(document), etag, 0, laid.modified, (), {"content-type": "application/json"})


async def _bytes(data: bytes, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
    """Yield a part of generated bytes in shared memory, so that they are sent like those of a file."""
    fd = os.memfd_create("mesh-zarr", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data[offset : offset + length], 0)
        yield (Span(fd, 0, length),)
    finally:
        os.close(fd)


async def _zeros(length: int) -> AsyncGenerator[Sequence[Span], None]:
    """Yield zeros, the fill value of rows that do not exist."""
    if length <= 0:
        return
    fd = os.memfd_create("mesh-zarr-fill", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, min(length, _ZEROS))
        for at in range(0, length, _ZEROS):
            yield (Span(fd, 0, min(_ZEROS, length - at)),)
    finally:
        os.close(fd)


_COPY_PIECE: Final = 1 << 20


class BlockStore:
    """Stores and rebuilds blocks, for a worker."""

    def __init__(
        self, store: ObjectStore, frames: FrameSource, uses: UsageFile, objects: RemoteObjects
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
                metrics.op_cache_hits.labels(bounded_label("op", op.op)).inc(len(rows))
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
            for at in range(offset, offset + length, _COPY_PIECE):
                yield (Span(frame.fd, at, min(_COPY_PIECE, offset + length - at)),)
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
                for at in range(0, frame.size, _COPY_PIECE):
                    piece = await asyncio.to_thread(os.pread, frame.fd, min(_COPY_PIECE, frame.size - at), at)
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
    for at in range(0, frame.size, _COPY_PIECE):
        crc = crc32c(os.pread(frame.fd, min(_COPY_PIECE, frame.size - at), at), crc)
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
