"""What the ops of a plan drew for one row of a batch, for people: this crop of that file.

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
from meshwire.formats.image_headers import read_image_header
from meshwire.plan.epoch_order import snapshot_order

if TYPE_CHECKING:
    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import FrameAddress
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshwire.dataset.build_snapshot import Snapshot

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
