"""Cache of Zarr view layouts: of a pinned snapshot, or of the current source.

Law: a pinned layout never changes; if its sources are gone, its chunks report that. A following layout
is rebuilt as soon as a difference is found, so no chunk mixes two states of the source.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError, store_errors
from meshd.core.document_store import RESERVED_BUCKET, unknown_document
from meshd.views.source_scan_cache import SourceScanCache
from meshd.views.view_kind import pinned_to_s3_error, translate_peer_errors
from meshd.views.zarr.layout import build_zarr_layout
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.dataset.fields import parse_source
from meshwire.errors import S3Error
from meshwire.strict_json import PlanError
from meshwire.views.view_kinds import source_buckets

if TYPE_CHECKING:
    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.document_store import DocumentStore
    from meshd.datasets.service import DatasetService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock
    from meshd.views.zarr.layout import ZarrLayout
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.views.zarr_view import ZarrArray, ZarrView

_PINNED: Final = 8


class ZarrLayoutCache:
    """Caches layouts of Zarr views, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        catalog: DocumentStore,
        datasets: DatasetService,
        batches: BatchService,
        objects: RemoteObjects,
    ) -> None:
        self._store, self._catalog, self._datasets, self._batches = store, catalog, datasets, batches
        self._objects = objects
        self._scans: SourceScanCache[ZarrView, ZarrLayout] = SourceScanCache(
            lambda view: objects.revision(source_buckets(view)),
            clock,
            self._scan,
            lambda view: objects.bucket_creation_times(source_buckets(view)),
        )
        self._pinned: OrderedDict[ZarrView, ZarrLayout] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ZarrLayoutCache, {len(self._pinned)} pinned, {self._scans!r}>"

    async def get_layout(self, view: ZarrView) -> ZarrLayout | None:
        """Return the view's layout; None if its source has no samples.

        Raises S3Error ViewOutdated, UnprocessableSource, SlowDown.
        """
        try:
            return await (self._scans.get_scan(view) if view.follow else self._of_snapshot(view))
        except EmptySnapshotError:
            return None
        except PlanError as error:
            raise S3Error("UnprocessableSource", str(error)) from error
        except BatchError as error:
            raise pinned_to_s3_error(error) from error

    async def rescan(self, view: ZarrView) -> ZarrLayout | None:
        """Return a layout that is not older than the last write to the store. Raises as `get_layout` does."""
        if view.follow:
            self._scans.invalidate_scan(view)
        return await self.get_layout(view)

    async def find_changed_object(self, laid: ZarrLayout, array: ZarrArray, number: int) -> str:
        """Return the URL of the first source object of a chunk that has changed since the layout, or ""."""
        revision, name = self._objects.revision(laid.snapshot.objects.buckets), (array.name, number)
        if laid.verified.get(name) == revision:
            return ""
        found = await self._first_changed(laid, array, number)
        if not found:
            laid.verified[name] = revision
        return found

    async def _first_changed(self, laid: ZarrLayout, array: ZarrArray, number: int) -> str:
        objects, items = laid.snapshot.objects, list(laid.source_objects(array, number))
        names = [(objects.bucket_of(item), objects.keys[item]) for item in items]
        with store_errors(), translate_peer_errors():
            if self._objects.single_node:
                records = await asyncio.to_thread(self._objects.find_local, names)
            else:
                records = await self._objects.find_many(names)
        for item, (bucket, key), record in zip(items, names, records, strict=True):
            if record is None or record.etag != objects.etags[item]:
                return f"s3://{bucket}/{key}"
        return ""

    async def _of_snapshot(self, view: ZarrView) -> ZarrLayout:
        if not await self._datasets.births.is_valid(view.snapshot, source_buckets(view)):
            raise unknown_document(f"snapshots/{view.snapshot}")
        laid = self._pinned.get(view)
        if laid is None:
            snapshot = await self._catalog.snapshot(view.snapshot)
            record = self._store.get(RESERVED_BUCKET, f"snapshots/{view.snapshot}")
            laid = await self._laid(view, snapshot, 0 if record is None else record.modified)
            self._pinned[view] = laid
            if len(self._pinned) > _PINNED:
                self._pinned.popitem(last=False)
        self._pinned.move_to_end(view)
        return laid

    async def _scan(self, view: ZarrView) -> ZarrLayout:
        built, newest = await self._datasets.scan_source(parse_source(view.url), view.samples, view.specs)
        return await self._laid(view, built.snapshot, newest)

    async def _laid(self, view: ZarrView, snapshot: Snapshot, modified: int) -> ZarrLayout:
        plan = await self._batches.compile_pinned(snapshot, view.plan)
        return await asyncio.to_thread(build_zarr_layout, view, snapshot, plan, modified)


class ZarrViewCompleter:
    """Completes Zarr views: pins their samples and op builds. One per worker."""

    def __init__(self, datasets: DatasetService, batches: BatchService) -> None:
        self._datasets, self._batches = datasets, batches

    async def __call__(self, caller: Caller, view: ZarrView) -> ZarrView:
        """Check that the source can be laid out as arrays, and pin it. Raises PlanError, BatchError."""
        births = self._datasets.births.freeze_incarnations()
        if view.snapshot:
            snapshot = await self._datasets.snapshot(caller, view.snapshot)
            if view.source not in snapshot.objects.buckets:
                raise PlanError("snapshot", f"its samples are in {', '.join(snapshot.objects.buckets)}")
        else:
            built, _ = await self._datasets.scan_source(parse_source(view.url), view.samples, view.specs)
            snapshot = built.snapshot
        plan = await self._batches.compile_for(caller, snapshot, view.plan)
        build_zarr_layout(view, snapshot, plan, 0)
        if not view.follow:
            await self._datasets.add_snapshot(snapshot, births(snapshot.objects.buckets))
            also = tuple(sorted({*snapshot.objects.buckets} - {view.source}))
            view = replace(view, snapshot=snapshot.hash, also=also)
        return replace(view, ops=plan.spec.ops)
