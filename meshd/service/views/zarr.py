"""Zarr views, read: metadata and labels made here, chunks and shards put together of kept blocks.

Law: every size and ETag follows from the layout, so that listings and HEAD render nothing. A chunk is the
rows of one block and, behind the last sample, zeros; a shard is chunks and their index.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.assembly.errors import BatchError
from meshd.service.translation import store_errors
from meshd.service.views.failing import refusal
from meshd.service.views.kinds import Made
from meshd.service.views.paging import page_of
from meshd.service.views.scanning import Scans
from meshd.service.views.zarrblocks import BlockKeeper, place_in_block
from meshd.service.views.zarrlayouts import lay_out_zarr
from meshd.store.errors import ExtentGoneError
from meshd.store.records import Record, Span
from meshwire.documents import PlanError
from meshwire.fields import parse_source
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing
from meshwire.snapshots import EmptySnapshotError
from meshwire.zarrarrays import METADATA

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.assembly.addressing import FrameSource
    from meshd.kit.clock import Clock
    from meshd.service.access import Caller
    from meshd.service.batches import BatchService
    from meshd.service.datasets import DatasetService
    from meshd.service.views.uses import Uses
    from meshd.service.views.zarrlayouts import ZarrLayout
    from meshd.store.interface import ObjectStore
    from meshwire.s3.operations import ListObjects
    from meshwire.zarrarrays import ZarrArray
    from meshwire.zarrviews import ZarrView

_PIECE: Final = 4 << 20
_ZEROS: Final = 1 << 20
_CHUNKS = "/c/"


class ZarrReader:
    """One a worker."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        datasets: DatasetService,
        batches: BatchService,
        frames: FrameSource,
        uses: Uses,
    ) -> None:
        self._store, self._datasets, self._batches = store, datasets, batches
        self._scans: Scans[ZarrView, ZarrLayout] = Scans(store, clock, self._scan)
        self._blocks = BlockKeeper(store, frames, uses)

    def __repr__(self) -> str:
        return f"<ZarrReader, {self._scans!r}>"

    # --- one object -------------------------------------------------------------------------------------

    async def find(self, view: ZarrView, key: str) -> Made:
        """Raises S3Error NoSuchKey, SlowDown, ViewOutdated."""
        laid = await self._layout(view)
        place = _located(laid, key)
        if place is not None and not await self._intact(view, laid, *place):
            self._scans.forget(view)
            laid = await self._layout(view)
            place = _located(laid, key)
        if place is not None:
            array, number = place
            return Made(
                _record(laid, array, number),
                lambda offset, length: self._groups(laid, array, number, offset, length),
            )
        document = laid.metadata.get(key)
        if document is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        return Made(_metadata_record(laid, document), lambda offset, length: _bytes(document, offset, length))

    async def _intact(self, view: ZarrView, laid: ZarrLayout, array: ZarrArray, number: int) -> bool:
        """Whether all that a stored object is made of is still what was laid out."""
        if self._scans.settled(view):
            return True
        return await asyncio.to_thread(self._unchanged, laid, array, number)

    def _unchanged(self, laid: ZarrLayout, array: ZarrArray, number: int) -> bool:
        objects = laid.snapshot.objects
        with store_errors():
            for item in laid.objects(array, number):
                record = self._store.get(objects.bucket, objects.keys[item])
                if record is None or record.etag != objects.etags[item]:
                    return False
        return True

    # --- its bytes --------------------------------------------------------------------------------------

    async def _groups(
        self, laid: ZarrLayout, array: ZarrArray, number: int, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        end, at = offset + length, 0
        for chunk in array.held(number):
            first, last = max(offset, at), min(end, at + array.chunk_bytes)
            if first < last:
                async for spans in self._chunk(laid, array, chunk, first - at, last - first):
                    yield spans
            at += array.chunk_bytes
        if end > at:
            first = max(offset, at)
            async for spans in _bytes(array.index(number), first - at, end - first):
                yield spans

    async def _chunk(
        self, laid: ZarrLayout, array: ZarrArray, chunk: int, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        rows = array.rows(chunk)
        there = min(length, max(0, len(rows) * array.row_bytes - offset))
        if there and array.name not in laid.works:
            values = laid.label(array.name).values[rows.start : rows.stop].astype("<i8").tobytes()
            async for spans in _bytes(values, offset, there):
                yield spans
        elif there:
            async for spans in self._block(laid, array, chunk, offset, there):
                yield spans
        async for spans in _zeros(length - there):
            yield spans

    async def _block(
        self, laid: ZarrLayout, array: ZarrArray, chunk: int, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        start = place_in_block(laid.works[array.name], array, array.rows(chunk)) + offset
        with ExitStack() as stack:
            record = await self._blocks.record(laid, array, chunk)
            try:
                spans = stack.enter_context(self._store.reading(record, start, length))
            except ExtentGoneError:  # evicted or moved at this moment
                record = await self._blocks.record(laid, array, chunk)
                spans = stack.enter_context(self._store.reading(record, start, length))
            for span in spans:
                for at in range(0, span.length, _PIECE):
                    yield (Span(span.fd, span.offset + at, min(_PIECE, span.length - at)),)

    # --- listings ---------------------------------------------------------------------------------------

    async def listing(self, view: ZarrView, operation: ListObjects) -> ObjectListing:
        """A page of metadata and chunks. Nothing is rendered for it."""
        try:
            laid = await self._layout(view)
        except S3Error as error:
            if error.code == "NoSuchKey":
                return ObjectListing()
            raise
        return await asyncio.to_thread(_listing, laid, operation)

    # --- layouts ----------------------------------------------------------------------------------------

    async def _layout(self, view: ZarrView) -> ZarrLayout:
        """Raises S3Error NoSuchKey when the source has no sample."""
        try:
            return await self._scans.current(view)
        except EmptySnapshotError as error:
            raise S3Error("NoSuchKey", str(error)) from error
        except PlanError as error:
            raise S3Error("UnprocessableSource", str(error)) from error
        except BatchError as error:
            raise refusal(error) from error

    async def _scan(self, view: ZarrView) -> ZarrLayout:
        built, newest = await self._datasets.scanned(parse_source(view.url), view.samples, view.specs)
        plan = await self._batches.compiled(built.snapshot, view.plan)
        return await asyncio.to_thread(lay_out_zarr, view, built.snapshot, plan, newest)


async def complete_zarr(
    datasets: DatasetService, batches: BatchService, caller: Caller, view: ZarrView
) -> ZarrView:
    """With the op builds and assets this node has; checked that what is there now makes arrays. Raises
    PlanError, BatchError."""
    built, newest = await datasets.scanned(parse_source(view.url), view.samples, view.specs)
    plan = await batches.drafted(caller, built.snapshot, view.plan)
    lay_out_zarr(view, built.snapshot, plan, newest)
    return replace(view, ops=plan.spec.ops)


def _located(laid: ZarrLayout, key: str) -> tuple[ZarrArray, int] | None:
    """The array and number of a stored object; None for metadata and for what is not there."""
    array = laid.arrays.get(key.partition(_CHUNKS)[0])
    numbers = None if array is None else array.keys.parse(key)
    return None if array is None or numbers is None else (array, numbers[0])


def _listing(laid: ZarrLayout, operation: ListObjects) -> ObjectListing:
    page = page_of(operation, lambda prefix, after: _walk(laid, prefix, after))
    entries = [ObjectEntry(key, *_told(_entry(laid, place))) for key, place in page.items]
    return ObjectListing(tuple(entries), tuple(page.prefixes), page.truncated, page.last)


_Place = bytes | tuple["ZarrArray", int]


def _walk(laid: ZarrLayout, prefix: str, after: str) -> Iterator[tuple[str, _Place]]:
    """All keys in order: an array's chunks, then its metadata, and between the arrays the group's."""
    for start in sorted([METADATA, *(f"{name}/" for name in laid.arrays)]):
        array = laid.arrays.get(start.removesuffix("/"))
        if array is not None and start.endswith("/"):
            for key, numbers in array.keys.walk(prefix, after):
                yield key, (array, numbers[0])
        key = METADATA if array is None else start + METADATA
        if key > after and key.startswith(prefix):
            yield key, laid.metadata[key]


def _entry(laid: ZarrLayout, place: _Place) -> Record:
    return _metadata_record(laid, place) if isinstance(place, bytes) else _record(laid, *place)


def _told(record: Record) -> tuple[int, str, int]:
    return record.size, record.etag, record.modified


def _record(laid: ZarrLayout, array: ZarrArray, number: int) -> Record:
    headers = {"content-type": "application/octet-stream"}
    size, etag = array.object_bytes(number), laid.etag(array, number)
    return Record(size, etag, 0, laid.modified, (), headers)


def _metadata_record(laid: ZarrLayout, document: bytes) -> Record:
    etag = hashlib.md5(document, usedforsecurity=False).hexdigest()
    return Record(len(document), etag, 0, laid.modified, (), {"content-type": "application/json"})


async def _bytes(data: bytes, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
    """A part of what was made here, in shared memory, so that it is sent like a file's."""
    fd = os.memfd_create("mesh-zarr", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data[offset : offset + length], 0)
        yield (Span(fd, 0, length),)
    finally:
        os.close(fd)


async def _zeros(length: int) -> AsyncGenerator[Sequence[Span], None]:
    """The fill value of rows that are not there."""
    if length <= 0:
        return
    fd = os.memfd_create("mesh-zarr-fill", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, min(length, _ZEROS))
        for at in range(0, length, _ZEROS):
            yield (Span(fd, 0, min(_ZEROS, length - at)),)
    finally:
        os.close(fd)
