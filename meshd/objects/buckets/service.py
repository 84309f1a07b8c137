"""Bucket service: create, list and delete buckets, and broadcast the change to all nodes.

The control store says which buckets exist, the object store what they contain. A deleted bucket leaves
no object and no upload behind, even when writers race with the deletion. A change is in force on every
node that answers before the client gets its response; a node that does not answer in time learns of it
from the control store and delays nobody.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import NoneType
from typing import TYPE_CHECKING, Final

from meshd.auth.acls import stored_bucket_acl
from meshd.control.buckets import Bucket, BucketExistsError
from meshd.control.deleted_documents import TOPIC as DELETED_DOCUMENTS
from meshd.core.api_errors import store_errors
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import PeerRefusedError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, BodyFramingError, PeerCall, handler
from meshd.store.errors import NoSuchUploadError
from meshd.store.records import INTERNAL_WRITE
from meshwire.errors import S3Error
from meshwire.s3.cors import cors_forbidden, find_cors_rule
from meshwire.s3.result_types import (
    BucketCreated,
    BucketDeleted,
    BucketEntry,
    BucketFound,
    BucketListing,
    BucketLocation,
    Owner,
    PreflightAllowed,
)

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.control.control_api import ControlStore
    from meshd.peer_reads.listing import MergedListings
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.store.records import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.s3.operations import (
        CreateBucket,
        DeleteBucket,
        GetBucketLocation,
        HeadBucket,
        ListBuckets,
        Preflight,
    )
    from meshwire.s3.xml_documents import CreateBucketConfiguration


BROADCAST_TIMEOUT_S: Final = 2.0
"""Seconds after which a node that has not answered is no longer waited for."""
ANNOUNCE_CHANGES: Final = PeerCall(
    f"{PREFIX}heard",
    request=dict[str, int],
    response=NoneType,
    max_bytes=4 << 10,
    timeout=BROADCAST_TIMEOUT_S,
    malformed_code="BadRequest",
)
"""Sends the revision of each control-store topic that the caller knows; the node answers once it has reached
them."""
DROP_UPLOADS: Final = PeerCall(
    f"{PREFIX}uploads/drop", request=str, response=NoneType, max_bytes=4 << 10, malformed_code="BadRequest"
)
"""Sends the name of a deleted bucket; the node drops its uploads."""
_POLL_S: Final = 0.002
_TOPICS: Final = ("buckets", "access", "roles", DELETED_DOCUMENTS)


class ChangeBroadcast:
    """Tells the other nodes about changes of buckets, and about deleted documents. One instance per
    process. `workers`: the processes of a node that answer requests, each with its own copy of the table."""

    def __init__(self, control: ControlStore, mesh: ClusterView, peers: PeerClient, workers: int) -> None:
        self._control, self._mesh, self._peers, self._workers = control, mesh, peers, workers

    def __repr__(self) -> str:
        return f"<ChangeBroadcast of {self._mesh.node_id}>"

    async def broadcast(self) -> None:
        """Return when every node that answers has reached this node's revisions of buckets, roles, access
        keys and deleted documents."""
        if self._mesh.single_node:
            return
        known = {topic: self._control.revision(topic) for topic in _TOPICS}
        me = self._mesh.node_id
        others = [
            n for n in self._mesh.current_map().nodes if n.node_id != me and n.state not in ("away", "down")
        ]
        await asyncio.gather(*(self._notify_node(node, known) for node in others))
        # the other workers of this node learn it from the same watch at the same moment
        if self._workers > 1:
            await asyncio.sleep(_POLL_S * 10)

    async def wait_until_known(self, known: dict[str, int]) -> None:
        """Return when this process has reached the given revisions, or after BROADCAST_TIMEOUT_S."""
        deadline = asyncio.get_running_loop().time() + BROADCAST_TIMEOUT_S
        while any(self._control.complete_revision(topic) < known.get(topic, 0) for topic in _TOPICS):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_POLL_S)

    async def _notify_node(self, node: Node, known: dict[str, int]) -> None:
        with suppress(PeerUnreachableError, PeerRefusedError, StaleMapError, BodyFramingError):
            await self._peers.call_typed(node, ANNOUNCE_CHANGES, known)


class PeerBuckets:
    """The contents of a bucket on all nodes."""

    def __init__(
        self, mesh: ClusterView, peers: PeerClient, merged: MergedListings, news: ChangeBroadcast
    ) -> None:
        self._mesh, self._peers, self._merged, self._news = mesh, peers, merged, news

    def __repr__(self) -> str:
        return f"<PeerBuckets, from {self._mesh.node_id}>"

    async def broadcast_deletion(self) -> None:
        """Return when every node that answers knows of the deletion, so that nothing more is written to
        it."""
        await self._news.broadcast()

    async def has_versions(self, bucket: str, *, here: bool) -> bool:
        """Whether any node stores a version in the bucket; `here`: whether this node does. Raises S3Error
        SlowDown."""
        if self._mesh.single_node:
            return here
        return bool((await self._merged.list_versions(bucket, limit=1)).entries)

    async def drop_peer_uploads(self, bucket: str) -> None:
        """Have the other nodes drop a bucket's uploads. On a node that does not answer, the lifecycle runner
        removes them later."""
        if self._mesh.single_node:
            return
        for node in self._mesh.current_map().nodes:
            other = node.node_id != self._mesh.node_id
            if other and node.stores and node.state not in ("away", "down"):
                with suppress(PeerUnreachableError, PeerRefusedError, StaleMapError, BodyFramingError):
                    await self._peers.call_typed(node, DROP_UPLOADS, bucket)


class BucketService:
    """The use cases of buckets. One per process. `region` is for buckets whose creator names none."""

    def __init__(
        self,
        table: BucketTable,
        store: ObjectStore,
        clock: Clock,
        region: str = "us-east-1",
        everywhere: PeerBuckets | None = None,
    ) -> None:
        self._table, self._store, self._clock, self._region = table, store, clock, region
        self._everywhere = everywhere

    async def create_bucket(
        self, operation: CreateBucket, identity: Identity, new: CreateBucketConfiguration
    ) -> BucketCreated:
        """Create a bucket. For the bucket's owner, creating it again succeeds, as in S3's us-east-1, unless
        the request asks for another ACL or ownership. Raises S3Error BucketAlreadyExists."""
        bucket = Bucket(
            operation.bucket,
            identity.user_id,
            self._clock.now_ms(),
            new.location or self._region,
            tags=dict(new.tags) or None,
            acl=None if operation.acl is None else stored_bucket_acl(operation.acl),
            ownership=operation.ownership or "",
        )
        try:
            await self._table.create(bucket)
        except BucketExistsError as error:
            if error.bucket is None or not _asks_for(error.bucket, bucket, operation):
                raise S3Error("BucketAlreadyExists", extra={"BucketName": bucket.name}) from error
        return BucketCreated(bucket.name)

    def head_bucket(self, operation: HeadBucket) -> BucketFound:
        return BucketFound(self._existing(operation.bucket).region)

    def preflight(self, operation: Preflight) -> PreflightAllowed:
        """Answer a CORS preflight. Raises S3Error AccessForbidden."""
        bucket = self._table.get(operation.bucket)
        rules = () if bucket is None else bucket.cors
        if not rules:
            raise S3Error("AccessForbidden")
        rule = find_cors_rule(rules, operation.origin, operation.method, operation.headers)
        if rule is None:
            raise cors_forbidden()
        return PreflightAllowed(operation.origin, rule)

    def get_location(self, operation: GetBucketLocation) -> BucketLocation:
        return BucketLocation(self._existing(operation.bucket).region)

    def list_buckets(self, operation: ListBuckets, identity: Identity) -> BucketListing:
        """Return the caller's buckets; root sees every bucket. `continuation` is the last name already
        returned."""
        after = operation.continuation or ""
        every = self._table.list_all(None if identity.root else identity.user_id)
        names = [
            b
            for b in every
            if b.name.startswith(operation.prefix) and b.name > after and operation.region in {None, b.region}
        ]
        page = names[: operation.max_buckets]
        return BucketListing(
            Owner(identity.user_id, identity.display_name),
            tuple(BucketEntry(bucket.name, bucket.created_ms, bucket.region) for bucket in page),
            page[-1].name if page and len(names) > len(page) else None,
        )

    async def delete_bucket(
        self, operation: DeleteBucket, *, context: WriteContext = INTERNAL_WRITE
    ) -> BucketDeleted:
        """Delete a bucket and its uploads in progress. Raises S3Error BucketNotEmpty, NoSuchBucket.

        The name is deleted first and the contents are checked once more. A writer checks the name after its
        commit, so one of the two sees the other.
        """
        await self._require_empty(self._existing(operation.bucket).name)
        bucket = await self._table.delete(operation.bucket)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": operation.bucket})
        try:
            if self._everywhere is not None:
                await self._everywhere.broadcast_deletion()
            await self._require_empty(bucket.name)
            await self._drop_uploads(bucket.name, context)
            if self._everywhere is not None:
                await self._everywhere.drop_peer_uploads(bucket.name)
        except BaseException:
            await self._restore(bucket)
            raise
        return BucketDeleted()

    def _existing(self, name: str) -> Bucket:
        bucket = self._table.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return bucket

    async def drop_uploads(self, name: str) -> None:
        """Drop the uploads of a bucket that another node deleted; does nothing if the name exists again, of
        which this process may not know yet. Raises ControlError."""
        if await self._table.get_latest(name) is None:
            await self._drop_uploads(name, INTERNAL_WRITE)

    async def _require_empty(self, name: str) -> None:
        with store_errors():
            full = bool(self._store.list_versions(name, limit=1).entries)
        if self._everywhere is not None:  # entries here may be deleted on other nodes, or the reverse
            full = await self._everywhere.has_versions(name, here=full)
        if full:
            raise S3Error("BucketNotEmpty", extra={"BucketName": name})

    async def _drop_uploads(self, name: str, context: WriteContext) -> None:
        with store_errors():
            while uploads := self._store.list_uploads(name).uploads:
                for upload in uploads:
                    try:
                        await self._store.abort_upload(upload, context=context)
                    except NoSuchUploadError:  # completed or aborted meanwhile
                        continue

    async def _restore(self, bucket: Bucket) -> None:
        try:
            await self._table.create(bucket)
        except BucketExistsError:  # another client created it in between
            return


def _asks_for(present: Bucket, wanted: Bucket, operation: CreateBucket) -> bool:
    """Whether `present` matches what the operation asks for."""
    if operation.acl is not None and wanted.acl != present.acl:
        return False
    if operation.ownership is not None and wanted.ownership != present.ownership:
        return False
    return wanted.owner == present.owner


class BucketHandlers:
    """Handles calls of other nodes about buckets. One instance per process."""

    def __init__(self, buckets: BucketService, broadcast: ChangeBroadcast) -> None:
        self._buckets, self._broadcast = buckets, broadcast

    @handler(ANNOUNCE_CHANGES)
    async def announce_changes(self, known: dict[str, int], context: CallContext) -> None:
        """Answer once this process knows at least the revisions that the caller knows."""
        await self._broadcast.wait_until_known(known)

    @handler(DROP_UPLOADS)
    async def drop_uploads(self, bucket: str, context: CallContext) -> None:
        await self._buckets.drop_uploads(bucket)
