"""Reader of batch views: the frames of a plan as objects, sent from the assembler's shared memory.

Law: an object has the bytes of the native frame, from the same assembler and cache. Its ETag follows
from the frame address, and so does its size when the plan has fixed shapes; otherwise the size of the
built frame is stored under its address. A frame is built when the first bytes are requested, and
released after the last byte or when the client disconnects.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.batches.assembly.frame_buffer import metadata_of, planned_size
from meshd.batches.assembly.frame_rows import count_rows
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.core.frame_address import FrameAddress
from meshd.core.read_source import GeneratedSource
from meshd.store.records import Record, Span
from meshd.views.key_paging import build_page
from meshd.views.transform_results import RESULTS_PREFIX
from meshd.views.view_kind import AssembledObject, pinned_to_s3_error
from meshwire.errors import S3Error
from meshwire.frame.tensor_frame import CONTENT_TYPE, FRAME_VERSION
from meshwire.s3.result_types import ObjectEntry, ObjectListing
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import AnyFrameAddress, Frame, FrameSource
    from meshd.core.plan_record import Plan
    from meshd.documents.inventory import UsageFile
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshwire.s3.operations import ListObjects
    from meshwire.views.batch_view import BatchesView
    from meshwire.views.numbered_keys import NumberedKeys


_GROUP = 4 << 20  # bytes of a copy that are in the memory of this process at a time


async def fetch_frame(frames: FrameSource, address: AnyFrameAddress) -> Frame:
    """Return the frame at an address. Raises S3Error."""
    try:
        return await frames.get_frame(address)
    except BatchError as error:
        raise pinned_to_s3_error(error) from error


async def frame_groups(
    frames: FrameSource, address: AnyFrameAddress, size: int, offset: int, length: int
) -> AsyncGenerator[Sequence[Span], None]:
    """Yield `length` bytes from `offset` of a frame of `size` bytes. Raises S3Error."""
    frame = await fetch_frame(frames, address)
    try:
        if frame.size != size:
            raise S3Error("InternalError", f"a frame has {frame.size} bytes instead of the expected {size}.")
        for at in range(offset, offset + length, _GROUP):
            yield (Span(frame.fd, frame.offset + at, min(_GROUP, offset + length - at)),)
    finally:
        frame.close()


_SIZES = 4096  # planned sizes that a worker caches
_BUILT_A_PAGE = 8  # frames that a listing builds per page; each has hundreds of samples


class BatchReader:
    """Reads batch views, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        batches: BatchService,
        frames: FrameSource,
        uses: UsageFile,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._catalog, self._batches = store, catalog, batches
        self._objects = objects
        self._frames, self._uses = frames, uses
        self._planned: dict[tuple[str, int, int], int | None] = {}

    def __repr__(self) -> str:
        return f"<BatchReader, {len(self._planned)} sizes known>"

    async def find_object(self, view: BatchesView, key: str) -> AssembledObject:
        """Return an object of the view. Raises S3Error NoSuchKey, ViewOutdated.

        If a frame must be built to know its size, also raises UnprocessableSource, SourceChanged, SlowDown.
        """
        plan = await self._plan(view)
        numbers = _keys(view, plan).parse_key(key)
        if numbers is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        address = _address(view, numbers)
        size = await self._size(plan, address)
        record = Record(size, _etag(address), 0, self._created_ms(plan), (), {"content-type": CONTENT_TYPE})
        frames = self._source(plan)
        return AssembledObject(
            record,
            [GeneratedSource(lambda offset, length: frame_groups(frames, address, size, offset, length))],
        )

    def _source(self, plan: Plan) -> FrameSource:
        return self._objects.frame_source_for((plan.bucket, *plan.others), self._frames)

    async def list_page(self, view: BatchesView, operation: ListObjects) -> ObjectListing:
        """Return a page of the listing.

        A page that needs many frames to be built for their sizes ends early and is marked as truncated.
        """
        plan = await self._plan(view)
        keys, built = _keys(view, plan), 0

        def walk(prefix: str, after: str) -> Iterator[tuple[str, tuple[int, ...]]]:
            return keys.iter_keys(prefix, after)

        page, modified = build_page(operation, walk), self._created_ms(plan)
        entries: list[ObjectEntry] = []
        for number, (key, numbers) in enumerate(page.items):
            address = _address(view, numbers)
            size = await self._known_size(plan, address)
            if size is None:
                if built == _BUILT_A_PAGE:
                    return _cut(page.items[number - 1][0], page.prefixes, entries)
                built += 1
                try:
                    size = await self._size(plan, address)
                except S3Error as error:
                    if error.code == "UnprocessableSource":
                        continue
                    raise
            entries.append(ObjectEntry(key, size, _etag(address), modified))
        return ObjectListing(tuple(entries), tuple(page.prefixes), page.truncated, page.last)

    # --- sizes ------------------------------------------------------------------------------------------

    async def _size(self, plan: Plan, address: FrameAddress) -> int:
        known = await self._known_size(plan, address)
        if known is not None:
            return known
        frame = await fetch_frame(self._source(plan), address)
        try:
            await self._catalog.write_document(
                _size_document_name(address), str(frame.size).encode(), once=True
            )
            return frame.size
        finally:
            frame.close()

    async def _planned_size(self, plan: Plan, address: FrameAddress) -> int | None:
        """Return the planned size: one for all frames of as many rows and of metadata of equal length."""
        metadata = metadata_of(address)
        name = plan.hash, count_rows(address, plan), sum(map(len, metadata.values()))
        if name not in self._planned:
            if len(self._planned) >= _SIZES:
                self._planned.clear()
            try:
                snapshot = await self._catalog.snapshot(plan.snapshot)
                self._planned[name] = planned_size(plan, snapshot, address)
            except BatchError as error:
                raise pinned_to_s3_error(error) from error
        return self._planned[name]

    async def _known_size(self, plan: Plan, address: FrameAddress) -> int | None:
        """Return the size of a frame without building it: planned, or stored when it was built; else None."""
        planned = await self._planned_size(plan, address)
        if planned is not None:
            return planned
        place = _size_document_name(address)
        text = self._catalog.read_document(place)
        if text is None:
            return None
        self._uses.note(place)
        return int(text)

    # --- the plan -----------------------------------------------------------------------------------------

    async def _plan(self, view: BatchesView) -> Plan:
        try:
            return await self._batches.view_plan(view.plan)
        except BatchError as error:
            raise pinned_to_s3_error(error) from error

    def _created_ms(self, plan: Plan) -> int:
        """Return when the plan was created; nothing under its addresses changes after that."""
        record = self._store.get(RESERVED_BUCKET, f"plans/{plan.hash}")
        return 0 if record is None else record.modified


async def complete_batches(batches: BatchService, caller: Caller, view: BatchesView) -> BatchesView:
    """Check that the caller may use the plan and that it has such batches; complete the view.

    Raises PlanError, BatchError.
    """
    plan = await batches.plan(caller, view.plan)
    buckets = {plan.bucket, *plan.others}
    if view.source not in buckets:
        raise PlanError(
            "plan",
            f"its samples are in {plan.bucket!r}: create the view as {plan.bucket}--NAME, not of "
            f"{view.source!r}",
        )
    if not plan.step_count(view.batch):
        raise PlanError(
            "batch", f"an epoch of {plan.positions} positions has no whole batch; use a smaller one"
        )
    count_rows(_address(view, (0, 0, view.world - 1)), plan)  # the last slice is the largest
    return replace(view, also=tuple(sorted(buckets - {view.source})))


def _keys(view: BatchesView, plan: Plan) -> NumberedKeys:
    return view.keys(plan.step_count(view.batch))


def _address(view: BatchesView, numbers: tuple[int, ...]) -> FrameAddress:
    epoch, step, rank = numbers
    return FrameAddress(view.plan, epoch, step, rank, view.world, view.batch)


def _digest(address: FrameAddress) -> str:
    numbers = f"{address.epoch}/{address.step}/{address.rank}-{address.world}/{address.batch}"
    return hashlib.sha256(f"{FRAME_VERSION}/{address.plan}/{numbers}".encode()).hexdigest()[:32]


def _etag(address: FrameAddress) -> str:
    """Return an ETag shaped like that of a multipart object, because the MD5 is not known."""
    return f"{_digest(address)}-1"


def _size_document_name(address: FrameAddress) -> str:
    return f"{RESULTS_PREFIX}sizes/{_digest(address)}"


def _cut(last: str, prefixes: list[str], entries: list[ObjectEntry]) -> ObjectListing:
    """Return a page that ends at the key `last`."""
    shown = tuple(prefix for prefix in prefixes if prefix <= last)
    return ObjectListing(tuple(entries), shown, True, max(last, *shown) if shown else last)
