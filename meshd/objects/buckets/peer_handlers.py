"""Peer handlers for buckets: changes that another node announces, uploads of deleted buckets.

A change is acknowledged once this process knows at least the revisions that the caller knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.objects.buckets.service import ANNOUNCE_CHANGES, DROP_UPLOADS
from meshd.rpc.peer_rpc import handler

if TYPE_CHECKING:
    from meshd.objects.buckets.service import BucketService, ChangeBroadcast
    from meshd.rpc.peer_rpc import CallContext


class BucketHandlers:
    """Handles calls of other nodes about buckets. One instance per process."""

    def __init__(self, buckets: BucketService, broadcast: ChangeBroadcast) -> None:
        self._buckets, self._broadcast = buckets, broadcast

    @handler(ANNOUNCE_CHANGES)
    async def announce_changes(self, known: dict[str, int], context: CallContext) -> None:
        await self._broadcast.wait_until_known(known)

    @handler(DROP_UPLOADS)
    async def drop_uploads(self, bucket: str, context: CallContext) -> None:
        await self._buckets.drop_uploads(bucket)
