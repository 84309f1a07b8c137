"""Snapshots that the SDK prepared: `mesh.open_zarr` computes where the chunks of each window are.

Law: a foreign document is validated completely, and the user who opens it must be allowed to read every
object that it names. It cannot name bytes that are not there: reading checks ETags and lengths.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshwire.dataset.build_snapshot import EmptySnapshotError, Snapshot, SnapshotBuild
from meshwire.dataset.snapshot import PREPARED_NAME
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.dataset.fields import Source

PREPARED: Final = "prepared"
"""The kind of source."""
_BYTES_A_SAMPLE = 20


async def read_prepared(
    listing: Sequence[tuple[str, Record]], source: Source, objects: RemoteObjects, capacity: SnapshotCapacity
) -> SnapshotBuild:
    """Read the document in the folder. Raises EmptySnapshotError; BatchError BadSample, TooLarge."""
    key = f"{source.prefix}{PREPARED_NAME}"
    record = next((record for name, record in listing if name == key), None)
    if record is None:
        raise EmptySnapshotError("source", f"there is no {PREPARED_NAME} in {source}")
    capacity.require_room(record.size // _BYTES_A_SAMPLE, 1, source)
    document = await objects.read_range(source.bucket, key, record.etag, 0, record.size)
    try:
        snapshot = await asyncio.to_thread(_decode_document, document)
    except ColumnError as error:
        url = f"s3://{source.bucket}/{key}"
        raise BatchError(
            "BadSample", f"{url} is not a snapshot: {error}", help="prepare it again", detail={"url": url}
        ) from error
    return SnapshotBuild(snapshot, 0, ())


def _decode_document(document: bytes) -> Snapshot:
    """Return the snapshot of a document, named by the hash of the bytes that nodes store: those of the
    document differ if another program encoded it. Raises ColumnError."""
    found = Snapshot.from_bytes(document)
    return Snapshot.from_parts(
        found.source,
        found.kind,
        found.objects,
        found.shard_starts,
        found.fields,
        found.specs,
        found.names,
    )
