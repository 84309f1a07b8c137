"""Handover of a name by its former primary, which the new primary asks for before its first write to it.

Law: the former primary first stops committing under older maps (`WriteContext`), then sends what it has of
the name: its newest version, what was removed, and which of its uploads were begun or have ended. The other
side is in `primary_writes`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.unconfirmed_writes import (
    PARALLEL_CHANGES,
    completed_version,
    unsettled_ends,
    unsettled_removals,
)
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import IN_QUERY, PREFIX, BodyFramingError, PeerCall, handler
from meshd.store.errors import NotReplicatedError
from meshd.store.replica.changes import UploadBegun, UploadEnded, VersionGone, upload_without_local_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.replicator import Replicator
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock
    from meshwire.cluster import Node


class HandedName(msgspec.Struct, frozen=True):
    """A name that the caller decides about from its map version on."""

    bucket: str
    key: str


HAND_OVER: Final = PeerCall(
    f"{PREFIX}replica/handover",
    request=HandedName,
    response=NoneType,
    target=IN_QUERY,
    max_bytes=0,
    timeout=4.0,
    map_wait=1.0,
)


class HandoverHandler:
    """Hands names over to their new primaries. One per process. `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, replicator: Replicator, clock: Clock) -> None:
        self._store, self._mesh, self._replicator, self._clock = store, mesh, replicator, clock

    @handler(HAND_OVER)
    async def hand_over(self, name: HandedName, context: CallContext) -> None:
        cluster = self._mesh.current_map()
        node = cluster.node(context.node_id)
        if context.map_version != cluster.version or node is None:
            raise StaleMapError(cluster.version)
        await self.send_name(name.bucket, name.key, context.map_version, node)

    async def send_name(self, bucket: str, key: str, version: int, to: Node) -> None:
        """Hands a name over to node `to`, its primary under map `version`: fences off writes of this node
        under earlier maps, then sends `to` what this node has of the name. Raises StaleMapError if `to` uses
        a newer map; NotReplicatedError."""
        await self._store.raise_fence(version)
        newest, tombstone = self._store.newest_version(bucket, key), self._store.tombstone_stamp(bucket, key)
        removals = unsettled_removals(self._store, self._clock, bucket, key)
        if tombstone:
            removals.append(VersionGone(bucket, key, "", tombstone))
        ends = unsettled_ends(self._store, self._clock, bucket, key)
        sends: list[Callable[[], Awaitable[object]]] = [
            *[partial(self._replicator.send_change, to, gone) for gone in removals],
            *[
                partial(self._replicator.send_change, to, begun)
                for begun in self._uploads_in_progress(bucket, key)
            ],
            *[partial(self._send_end, to, bucket, key, *end) for end in ends],
        ]
        try:
            if newest is not None:
                await self._replicator.ensure_version(to, bucket, key, newest)
            for start in range(0, len(sends), PARALLEL_CHANGES):
                await asyncio.gather(*[send() for send in sends[start : start + PARALLEL_CHANGES]])
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise NotReplicatedError(
                f"node {to.node_id} does not accept the handover of a name: {error}"
            ) from error

    def _uploads_in_progress(self, bucket: str, key: str) -> Sequence[UploadBegun]:
        """Returns the latest uploads in progress of a name: a listing of this node may have shown one that no
        other node has."""
        page = self._store.list_uploads(bucket, prefix=key)
        uploads = [upload for upload in page.uploads if upload.key == key][-PARALLEL_CHANGES:]
        return [UploadBegun(upload_without_local_fields(upload)) for upload in uploads]

    async def _send_end(self, to: Node, bucket: str, key: str, upload_id: str, stamp: int) -> None:
        """Sends the end of an upload, after the version that it became: the end drops the parts."""
        record = completed_version(self._store, bucket, key, stamp)
        if record is not None:
            await self._replicator.ensure_version(to, bucket, key, record)
        await self._replicator.send_change(to, UploadEnded(bucket, key, upload_id, stamp))
