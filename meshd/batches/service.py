"""Registers plans and serves their frames, their samples as bytes, and their bad-sample ledger.

Law: registration and every read require that the caller may read every object of the snapshot. The
service refuses a plan whose op versions this node lacks, and an invalid registration with the path of
the wrong field.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshd.batches.assembly.bad_sample_ledger import merge_ledgers, read_ledger
from meshd.batches.assembly.frame_rows import count_rows, slice_of
from meshd.batches.pack_plans import PackPlanner, inner_spec
from meshd.batches.plan_registration import check_mix, compile_plan, describe_plan, parse_registration
from meshd.batches.sample_responses import sample_blobs, samples_body, tar_body
from meshd.core.api_errors import BatchError, busy
from meshd.core.document_store import unknown_document
from meshd.core.frame_address import PartAddress, RowsAddress
from meshd.core.sample_locations import PinnedObjects, bytes_columns
from meshd.datasets.bucket_incarnations import few_of_origins
from meshd.datasets.service import invalid_plan
from meshd.peer_reads.peer_frames import NearCacheFrameSource, RendezvousFrameSource
from meshd.transform.plan_notes import plan_notes
from meshd.transform.source_files import SourceGoneError
from meshwire.frame.tensor_frame import FRAME_VERSION, Status
from meshwire.plan.epoch_order import bucket_lengths, snapshot_order
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    checked_integer,
    checked_object,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.batches.assembly.stored_sequences import StoredSequences
    from meshd.batches.assets import AssetService
    from meshd.batches.blob_reader import Blob
    from meshd.batches.read_ahead.shuffle_advice import ShuffleAdvisor
    from meshd.batches.sample_responses import StreamBody
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import Address, Frame, FrameAddress, FrameSource
    from meshd.core.plan_record import Plan
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.service import DatasetService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.plan.plan_spec import PlanSpec
    from meshwire.plan.rank_slices import RankSlice


MAX_ROWS_ASKED = 65536
_CHECKED_OBJECTS = 20_000
_COMPILED = 10_000  # plans remembered as checked: this node can run them


class BatchRows(NamedTuple):
    """The rows of a rank in a step. `samples`: the sample of each, int64[n]."""

    plan: Plan
    snapshot: Snapshot
    piece: RankSlice
    samples: npt.NDArray[np.int64]


class BatchService:
    """Registers plans and returns their frames, samples and bad-sample ledgers; one per worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        datasets: DatasetService,
        readers: DatasetAccess,
        frames: FrameSource,
        assets: AssetService,
        archives: ArchiveService,
        objects: RemoteObjects,
        stored: StoredSequences,
        advisor: ShuffleAdvisor,
    ) -> None:
        self._store, self._catalog, self._datasets = store, catalog, datasets
        self._readers, self._frames, self._assets = readers, frames, assets
        self._archives, self._objects, self._advisor = archives, objects, advisor
        self._packs = PackPlanner(catalog, frames, stored)
        self._compiled: set[str] = set()

    def __repr__(self) -> str:
        return f"<BatchService, {len(self._compiled)} plans checked>"

    async def register_plan(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Register a plan and return the answer to `POST /-/plans`. Idempotent.

        Raises BatchError InvalidPlan, UnknownOp, UnknownOpBuild, NoSuchSnapshot, AccessDenied,
        SnapshotChanged.
        """
        request = parse_registration(body)
        snapshot = await self._datasets.snapshot(caller, request.snapshot)
        await self._check_objects(snapshot)
        plan = await self.compile_for(caller, snapshot, request.spec)
        await self._catalog.add_plan(plan)
        self._note_compiled(plan)
        notes = await self._notes(snapshot, plan.spec)
        if plan.spec.mix is None:
            note = await self._advisor.advise(snapshot, plan.spec.shuffle, request.batch)
            notes += [note] if note else []
        return describe_plan(plan, snapshot, request.batch) | ({"notes": notes} if notes else {})

    async def _notes(self, snapshot: Snapshot, spec: PlanSpec) -> list[str]:
        """Return the notes on a compiled plan. Raises BatchError if the first sample cannot be read."""
        pinned = self.pin(snapshot)
        try:
            if any(op.op in ("decode", "tokenize_chat") for op in spec.ops):
                await pinned.prepare([0])
            first = partial(_read_first, snapshot, pinned)
            return list(await asyncio.to_thread(plan_notes, spec, first))
        except SourceGoneError as error:
            raise busy(str(error)) from error
        finally:
            pinned.close()

    async def compile_for(self, caller: Caller, snapshot: Snapshot, spec: PlanSpec) -> Plan:
        """Compile a plan with everything that its hash covers, without registering it.

        Raises BatchError as `register_plan` does.
        """
        try:
            check_mix(snapshot, spec)
            if spec.buckets is not None:
                bucket_lengths(spec, snapshot)
            spec = await self._assets.pin_assets(caller, spec)
        except PlanError as error:
            raise invalid_plan(error) from error
        if spec.pack is None:
            return await self.compile_pinned(snapshot, spec)
        try:
            self._packs.check_spec(snapshot, spec)
            within = await self.compile_pinned(snapshot, inner_spec(spec))
            return await self._packs.plan_packed(within, snapshot, spec)
        except PlanError as error:
            raise invalid_plan(error) from error

    async def compile_pinned(self, snapshot: Snapshot, spec: PlanSpec) -> Plan:
        """Compile a plan whose op versions, arguments and assets are pinned. Raises BatchError."""
        pinned, loop = self.pin(snapshot), asyncio.get_running_loop()

        def first(field: str) -> bytes:
            # Not fetched unless the spec lacks something: of another node, it may wait for reads of a window.
            asyncio.run_coroutine_threadsafe(pinned.prepare([0]), loop).result()
            return _read_first(snapshot, pinned, field)

        try:
            await self._assets.fetch_missing(spec)
            # In a thread: building an op from its asset may take a second.
            return await asyncio.to_thread(
                compile_plan, snapshot, spec, first, self._assets.load_asset_content
            )
        finally:
            pinned.close()

    def pin(self, snapshot: Snapshot) -> PinnedObjects:
        """Return the objects of a snapshot, to be looked up for one request."""
        return PinnedObjects(self._store, snapshot, self._archives, self._objects)

    async def _check_objects(self, snapshot: Snapshot) -> None:
        """Check when a plan is registered, not in the middle of an epoch, that no object is gone or replaced.

        Checks all objects, or an even sample of them for a large snapshot: each frame checks its own again.
        """
        if self._datasets.is_as_listed(snapshot):
            return
        pinned = self.pin(snapshot)
        count = len(snapshot.objects)
        stride = max(1, count // _CHECKED_OBJECTS)
        if not self._objects.single_node:
            await self._check_remote(snapshot, pinned, range(0, count, stride))
            return
        for checked, number in enumerate(range(0, count, stride)):
            pinned.record(number)
            if checked % 1000 == 999:
                await asyncio.sleep(0)

    async def _check_remote(self, snapshot: Snapshot, pinned: PinnedObjects, numbers: Sequence[int]) -> None:
        """Check each object on a node that holds it, with one call per node.

        Raises BatchError SnapshotChanged, Busy.
        """
        objects = snapshot.objects
        numbers = few_of_origins(self._objects, snapshot, numbers)
        names = [(objects.bucket_of(number), objects.keys[number]) for number in numbers]
        for number, record in zip(numbers, await self._objects.find_many(names), strict=True):
            if record is None or record.etag != objects.etags[number]:
                raise pinned.changed(number, "was deleted" if record is None else "was replaced")

    async def _require(self, caller: Caller, plan: Plan) -> None:
        """Require that the caller may use the plan. Raises BatchError AccessDenied, NoSuchBucket, NoSuchPlan.

        A caller who may read the whole buckets is authorized without loading the snapshot.
        """
        if not all(self._readers.reads_whole_bucket(caller, bucket) for bucket in plan.buckets):
            await self._readers.require_snapshot(caller, await self._catalog.snapshot(plan.snapshot))
        await self._datasets.births.require_valid(caller, plan.snapshot, plan.buckets, f"plans/{plan.hash}")

    async def plan(self, caller: Caller, digest: str) -> Plan:
        """Return a plan that its caller may use and that this node can run. Raises BatchError."""
        plan = await self._catalog.plan(digest)
        await self._require(caller, plan)
        await self._require_runnable(plan)
        return plan

    async def view_plan(self, digest: str) -> Plan:
        """Return the plan of a view: this node can run it and its buckets still exist. Raises BatchError.

        A bucket that was deleted and created again counts as another bucket.
        """
        plan = await self._catalog.plan(digest)
        if not await self._datasets.births.is_valid(plan.snapshot, plan.buckets):
            raise unknown_document(f"plans/{digest}")
        await self._require_runnable(plan)
        return plan

    async def _require_runnable(self, plan: Plan) -> None:
        """Require that this node can run a plan: compile it, unless it has. Raises BatchError."""
        try:
            self._assets.require(plan.spec)
        except PlanError as error:
            raise invalid_plan(error) from error
        if plan.hash not in self._compiled:
            snapshot = await self._catalog.snapshot(plan.snapshot)
            await self.compile_pinned(
                snapshot, plan.spec if plan.spec.pack is None else inner_spec(plan.spec)
            )
            self._note_compiled(plan)

    def _note_compiled(self, plan: Plan) -> None:
        if len(self._compiled) >= _COMPILED:
            self._compiled.clear()
        self._compiled.add(plan.hash)

    async def get_frame(
        self, caller: Caller, address: Address, *, shared: bool = False, kept_bytes: int | None = None
    ) -> Frame:
        """Return a frame of tensors; the caller closes the handle. Raises BatchError.

        `kept_bytes`: see `FrameSource`. With `shared`, take the frame from the peer that its address is
        assigned to, so that it is built once whichever node receives the request.
        """
        await self.plan(caller, address.plan)
        return await self._frame_source(shared=shared).get_frame(address, kept_bytes)

    async def get_frames(
        self,
        caller: Caller,
        first: FrameAddress,
        count: int,
        *,
        shared: bool = False,
        kept_bytes: int | None = None,
    ) -> list[Frame]:
        """Return the frames of consecutive steps, as `get_frame` does; see `FrameSource.get_frames`."""
        await self.plan(caller, first.plan)
        return await self._frame_source(shared=shared).get_frames(first, count, kept_bytes)

    def _frame_source(self, *, shared: bool) -> FrameSource:
        if self._objects.near_cache is not None:
            return NearCacheFrameSource(self._objects.frames, self._frames)
        if shared and not self._objects.single_node:
            return RendezvousFrameSource(self._objects.frames, self._frames)
        return self._frames

    async def get_part(
        self, caller: Caller, address: FrameAddress, version: int, kept_bytes: int | None = None
    ) -> Frame:
        """Return the rows of a frame whose bytes this node holds under this version of the cluster map.

        Raises BatchError; NotOwner if this node uses another version.
        """
        await self.plan(caller, address.plan)
        return await self._frames.get_frame(PartAddress(address, version), kept_bytes)

    async def get_rows(self, caller: Caller, digest: str, epoch: int, body: bytes) -> Frame:
        """Return a frame of chosen samples in the requested order. Raises BatchError."""
        try:
            document = checked_object(read_json(body), "", ("samples",))
            samples = _checked_list(required_field(document, "samples", ""))
            chosen = tuple(
                checked_integer(item, f"samples[{i}]", 0, MAX_INTEGER) for i, item in enumerate(samples)
            )
        except PlanError as error:
            raise invalid_plan(error) from error
        return await self.get_frame(caller, RowsAddress(digest, epoch, chosen))

    async def bad_samples(self, caller: Caller, digest: str) -> list[dict[str, Any]]:
        """Return the plan's ledger of bad samples. Raises BatchError NoSuchPlan, AccessDenied."""
        plan = await self._catalog.plan(digest)
        await self._require(caller, plan)
        if self._objects.single_node:
            return read_ledger(self._catalog, digest)
        others = await self._objects.documents.fetch_from_all_nodes(f"bad/{digest}")
        return merge_ledgers(read_ledger(self._catalog, digest), *map(json.loads, others))

    async def samples(self, caller: Caller, address: FrameAddress) -> StreamBody:
        """Stream the source bytes of the rows as a frame of samples: row by row, the fields ordered by name.

        Class labels are decimal text. Raises BatchError.
        """
        rows, blobs = await self._blobs(caller, address)
        metadata = {
            "version": FRAME_VERSION,
            "fields": ",".join(sorted(rows.snapshot.fields)),
            **{name: str(getattr(address, name)) for name in address.__struct_fields__},
        }
        return samples_body(self._store, blobs, metadata, len(rows.piece), remote=self._objects)

    async def tar(self, caller: Caller, address: FrameAddress) -> StreamBody:
        """Stream the source bytes of the rows as a tar with WebDataset names.

        Pad rows are left out, because a tar has no status flags.
        """
        rows, blobs = await self._blobs(caller, address)
        kept = [blob for blob in blobs if blob.status != Status.PAD]
        return tar_body(self._store, kept, int(np.count_nonzero(~rows.piece.pad)), remote=self._objects)

    async def _blobs(self, caller: Caller, address: FrameAddress) -> tuple[BatchRows, list[Blob]]:
        rows = await self.resolve_rows(caller, address)
        pinned = self.pin(rows.snapshot)
        await pinned.look_up(rows.samples.tolist())
        return rows, await sample_blobs(rows.snapshot, pinned, rows.samples, rows.piece.pad)

    async def resolve_rows(self, caller: Caller, address: FrameAddress) -> BatchRows:
        """Return the rows of a batch, of which none is rendered. Raises BatchError, also for packed plans."""
        plan = await self._catalog.plan(address.plan)
        await self._require(caller, plan)
        if plan.within:
            raise BatchError(
                "BadRequest",
                "a row of a packed plan is made of many samples; request tensors, or use the inner plan",
                detail={"within": plan.within},
            )
        count_rows(address, plan)
        snapshot, piece = await self._catalog.snapshot(plan.snapshot), slice_of(plan, address)
        samples = snapshot_order(plan.spec, snapshot, address.epoch).samples_at(piece.positions)
        return BatchRows(plan, snapshot, piece, samples)


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ROWS_ASKED:
        raise PlanError("samples", f"expected a list of 1…{MAX_ROWS_ASKED} sample indices")
    return value


def _read_first(snapshot: Snapshot, pinned: PinnedObjects, field: str) -> bytes:
    """Return the bytes of a field of the first sample (blocking)."""
    column = bytes_columns(snapshot)[field]
    return pinned.read_range(int(column.objects_at(0)), int(column.offsets_at(0)), int(column.lengths_at(0)))
