"""Batches views, read: the frames of a plan as objects.

Law: the bytes are those of the native frame, from the same assembler and its cache. An ETag follows from the
address alone, and so does a size wherever the plan's shapes are fixed; else it is that of the built frame,
written down under its address.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.assembly.addressing import FrameAddress
from meshd.assembly.assembler import count_rows, metadata_of
from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import BatchError
from meshd.assembly.sizing import planned_size
from meshd.service.views.failing import pinned_refusal
from meshd.service.views.frames import frame_groups, frame_of
from meshd.service.views.kinds import Made
from meshd.service.views.making import RESULTS
from meshd.service.views.paging import page_of
from meshd.store.records import Record
from meshwire.documents import PlanError
from meshwire.frames import CONTENT_TYPE, FRAME_VERSION
from meshwire.plans import steps
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.assembly.addressing import FrameSource
    from meshd.assembly.catalog import Catalog
    from meshd.assembly.plans import Plan
    from meshd.service.authorization.access import Caller
    from meshd.service.batches.service import BatchService
    from meshd.service.documents.uses import Uses
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshwire.batchviews import BatchesView
    from meshwire.numbered import Numbered
    from meshwire.s3.operations import ListObjects

_SIZES = 4096  # remembered a worker
_BUILT_A_PAGE = 8  # frames, of hundreds of samples each


class BatchReader:
    """One a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        batches: BatchService,
        frames: FrameSource,
        uses: Uses,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._catalog, self._batches = store, catalog, batches
        self._objects = objects
        self._frames, self._uses = frames, uses
        self._planned: dict[tuple[str, int, int], int | None] = {}

    def __repr__(self) -> str:
        return f"<BatchReader, {len(self._planned)} sizes known>"

    async def find(self, view: BatchesView, key: str) -> Made:
        """Raises S3Error NoSuchKey, ViewOutdated; what must be built for its size also UnprocessableSource,
        SourceChanged, SlowDown."""
        plan = await self._plan(view)
        numbers = _keys(view, plan).parse(key)
        if numbers is None:
            raise S3Error("NoSuchKey", extra={"Key": key})
        address = _address(view, numbers)
        size = await self._size(plan, address)
        record = Record(size, _etag(address), 0, self._modified(plan), (), {"content-type": CONTENT_TYPE})
        frames = self._source(plan)
        return Made(record, lambda offset, length: frame_groups(frames, address, size, offset, length))

    def _source(self, plan: Plan) -> FrameSource:
        return self._objects.frames_of((plan.bucket, *plan.others), self._frames)

    async def listing(self, view: BatchesView, operation: ListObjects) -> ObjectListing:
        """A page; one that has to build many frames to know their sizes ends early, and says that there is
        more."""
        plan = await self._plan(view)
        keys, built = _keys(view, plan), 0

        def walk(prefix: str, after: str) -> Iterator[tuple[str, tuple[int, ...]]]:
            return keys.walk(prefix, after)

        page, modified = page_of(operation, walk), self._modified(plan)
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
        frame = await frame_of(self._source(plan), address)
        try:
            await self._catalog.write(_place(address), str(frame.size).encode(), once=True)
            return frame.size
        finally:
            frame.close()

    async def _planned_size(self, plan: Plan, address: FrameAddress) -> int | None:
        """The same for all frames of as many rows whose numbers have as many digits."""
        metadata = metadata_of(address)
        name = plan.hash, count_rows(address, plan), sum(map(len, metadata.values()))
        if name not in self._planned:
            if len(self._planned) >= _SIZES:
                self._planned.clear()
            try:
                snapshot = await self._catalog.snapshot(plan.snapshot)
                self._planned[name] = planned_size(plan, snapshot, address)
            except BatchError as error:
                raise pinned_refusal(error) from error
        return self._planned[name]

    async def _known_size(self, plan: Plan, address: FrameAddress) -> int | None:
        """Of a frame that need not be built for it: planned, or written down when it was built."""
        planned = await self._planned_size(plan, address)
        if planned is not None:
            return planned
        place = _place(address)
        text = self._catalog.read(place)
        if text is None:
            return None
        self._uses.note(place)
        return int(text)

    # --- the plan -----------------------------------------------------------------------------------------

    async def _plan(self, view: BatchesView) -> Plan:
        try:
            return await self._batches.shown(view.plan)
        except BatchError as error:
            raise pinned_refusal(error) from error

    def _modified(self, plan: Plan) -> int:
        """When the plan was made: nothing under its addresses changes after that."""
        record = self._store.get(RESERVED_BUCKET, f"plans/{plan.hash}")
        return 0 if record is None else record.modified


async def complete_batches(batches: BatchService, caller: Caller, view: BatchesView) -> BatchesView:
    """Checked that the caller may use the plan, which has such batches. Raises PlanError, BatchError."""
    plan = await batches.plan(caller, view.plan)
    buckets = {plan.bucket, *plan.others}
    if view.source not in buckets:
        raise PlanError(
            "plan",
            f"its samples lie in {plan.bucket!r}: name the view {plan.bucket}--NAME, not of {view.source!r}",
        )
    if not steps(plan.positions, view.batch, 0, plan.spec.tail):
        raise PlanError(
            "batch", f"an epoch of {plan.positions} positions has no whole batch; use a smaller one"
        )
    count_rows(_address(view, (0, 0, view.world - 1)), plan)  # the largest slice is the last
    return replace(view, also=tuple(sorted(buckets - {view.source})))


def _keys(view: BatchesView, plan: Plan) -> Numbered:
    return view.keys(steps(plan.positions, view.batch, 0, plan.spec.tail))


def _address(view: BatchesView, numbers: tuple[int, ...]) -> FrameAddress:
    epoch, step, rank = numbers
    return FrameAddress(view.plan, epoch, step, rank, view.world, view.batch)


def _digest(address: FrameAddress) -> str:
    numbers = f"{address.epoch}/{address.step}/{address.rank}-{address.world}/{address.batch}"
    return hashlib.sha256(f"{FRAME_VERSION}/{address.plan}/{numbers}".encode()).hexdigest()[:32]


def _etag(address: FrameAddress) -> str:
    """Shaped like that of a multipart object, for no MD5 of it is known."""
    return f"{_digest(address)}-1"


def _place(address: FrameAddress) -> str:
    return f"{RESULTS}sizes/{_digest(address)}"


def _cut(last: str, prefixes: list[str], entries: list[ObjectEntry]) -> ObjectListing:
    """A page that ends at the key `last`."""
    shown = tuple(prefix for prefix in prefixes if prefix <= last)
    return ObjectListing(tuple(entries), shown, True, max(last, *shown) if shown else last)
