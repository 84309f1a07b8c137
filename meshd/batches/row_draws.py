"""Rows of a batch, for people: which sample each is, of which bytes of which objects, and what the ops drew
for it: this crop of that file. Slice and order are computed as for the batch itself.

Only the first bytes of the row's sources are read, for the sizes of images.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from meshd.batches.assembly.frame_rows import slice_of
from meshd.core.api_errors import BatchError, busy
from meshd.core.sample_locations import PinnedObjects, bytes_columns
from meshd.transform.draw_descriptions import describe_row
from meshd.transform.source_files import SourceDamagedError, SourceGoneError
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.formats.image_headers import read_image_header
from meshwire.plan.epoch_order import snapshot_order
from meshwire.plan.plan_spec import step_count

if TYPE_CHECKING:
    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import FrameAddress
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshwire.dataset.build_snapshot import Snapshot


MAX_ROWS = 4096
"""Rows of one description."""


class RowSources:
    """Describes the rows of batches. One per worker."""

    def __init__(self, batches: BatchService, catalog: DocumentStore) -> None:
        self._batches, self._catalog = batches, catalog

    def __repr__(self) -> str:
        return "<RowSources>"

    async def describe(self, caller: Caller, address: FrameAddress) -> dict[str, Any]:
        """Return `steps` of the epoch and `rows`: of each, `position` in the epoch, `sample`, its `name`,
        whether it is a `pad` row, `labels` (number and name of the class) and `sources` (bucket, key, offset
        and length) by field.

        Raises BatchError NoSuchPlan, AccessDenied, BadRequest (a packed plan; too many rows), InvalidPlan.
        """
        plan = await self._batches.plan(caller, address.plan)
        if plan.within:
            raise BatchError(
                "BadRequest",
                "a row of a packed plan is not a sample, so that it has no one source",
                detail={"within": plan.within},
            )
        piece = slice_of(plan, address)
        if len(piece) > MAX_ROWS:
            raise BatchError("BadRequest", f"a description has at most {MAX_ROWS} rows, not {len(piece)}")
        snapshot = await self._catalog.snapshot(plan.snapshot)
        samples = snapshot_order(plan.spec, snapshot, address.epoch).samples_at(piece.positions)
        numbers = zip(piece.positions.tolist(), samples.tolist(), piece.pad.tolist(), strict=True)
        return {
            "steps": step_count(plan.positions, address.batch, address.origin, plan.spec.tail),
            "samples": plan.positions,
            "rows": [
                {"position": position, "sample": sample, "pad": pad, **_sources(snapshot, sample)}
                for position, sample, pad in numbers
            ],
        }


def _sources(snapshot: Snapshot, sample: int) -> dict[str, Any]:
    labels: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for name in snapshot.own_fields():
        column = snapshot.fields[name]
        if isinstance(column, LabelColumn):
            number = int(column.values_at(sample))
            classes = column.classes
            known = 0 <= number < len(classes)
            labels[name] = {"value": number, "class": classes[number] if known else ""}
            continue
        place = int(column.objects_at(sample))
        sources[name] = {
            "bucket": snapshot.objects.bucket_of(place),
            "key": snapshot.objects.keys[place],
            "offset": int(column.offsets_at(sample)),
            "length": int(column.lengths_at(sample)),
            "size": int(snapshot.objects.sizes[place]),
        }
    return {"name": snapshot.sample_name(sample), "labels": labels, "sources": sources}


_HEAD: Final = 1 << 20
"""Bytes of a source in which the header of an image is looked for."""


class RowDraws:
    """Describes the draws of rows. One per worker."""

    def __init__(
        self,
        batches: BatchService,
        catalog: DocumentStore,
        store: ObjectStore,
        archives: ArchiveService,
        objects: RemoteObjects,
    ) -> None:
        self._batches, self._catalog = batches, catalog
        self._store, self._archives, self._objects = store, archives, objects

    def __repr__(self) -> str:
        return "<RowDraws>"

    async def describe(self, caller: Caller, address: FrameAddress, row: int) -> dict[str, Any]:
        """Return `sample`, `position`, and `ops` and `images` as `describe_row` does, for a row of a batch.

        Raises BatchError NoSuchPlan, AccessDenied, BadRequest (a packed plan; no such row), InvalidPlan,
        SnapshotChanged, Busy.
        """
        plan = await self._batches.plan(caller, address.plan)
        if plan.within:
            raise BatchError("BadRequest", "a row of a packed plan is made of many samples")
        piece = slice_of(plan, address)
        if not 0 <= row < len(piece):
            raise BatchError("BadRequest", f"row must be a number from 0 to {len(piece) - 1}, not {row}")
        snapshot = await self._catalog.snapshot(plan.snapshot)
        position = int(piece.positions[row])
        sample = int(snapshot_order(plan.spec, snapshot, address.epoch).samples_at(piece.positions)[row])
        sizes = await self._image_sizes(snapshot, sample)
        described = await asyncio.to_thread(describe_row, plan.spec, sizes, address.epoch, position)
        return {"sample": sample, "position": position, **described}

    async def _image_sizes(self, snapshot: Snapshot, sample: int) -> dict[str, tuple[int, int]]:
        """Return (height, width) of each field of the sample that is an image."""
        pinned = PinnedObjects(self._store, snapshot, self._archives, self._objects)
        columns = bytes_columns(snapshot)
        try:
            await pinned.look_up([sample])
            places = {
                name: (
                    int(column.objects_at(sample)),
                    int(column.offsets_at(sample)),
                    min(_HEAD, int(column.lengths_at(sample))),
                )
                for name, column in columns.items()
            }
            await pinned.fetch_ranges(list(places.values()))
            heads = [await asyncio.to_thread(pinned.read_range, *place) for place in places.values()]
        except (SourceGoneError, SourceDamagedError) as error:
            raise busy(str(error)) from error
        finally:
            pinned.close()
        headers = zip(places, map(read_image_header, heads), strict=True)
        return {name: (header.height, header.width) for name, header in headers if header is not None}
