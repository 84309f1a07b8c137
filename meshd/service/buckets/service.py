"""Buckets: made, found, listed, removed.

Law: the control table says what exists; the store says what is inside.
Invariant: a bucket that is deleted leaves no object and no upload behind, also when writers race with it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.buckets import Bucket, BucketExistsError
from meshd.net.peers import PREFIX, PeerRefusedError, StaleMapError
from meshd.net.wires import PeerUnreachableError
from meshd.service.authorization.acls import kept_on_bucket
from meshd.service.semantics.translation import store_errors
from meshd.store.errors import NoSuchUploadError
from meshwire.s3.cors import find_rule, refused
from meshwire.s3.errors import S3Error
from meshwire.s3.results import (
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
    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import BucketTable
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshd.service.authorization.access import Identity
    from meshd.service.buckets.news import News
    from meshd.service.remote.merged import MergedListings
    from meshd.store.interface import ObjectStore
    from meshwire.s3.documents import NewBucket
    from meshwire.s3.operations import (
        CreateBucket,
        DeleteBucket,
        GetBucketLocation,
        HeadBucket,
        ListBuckets,
        Preflight,
    )
    from meshwire.s3.settings import CorsRule


DROP: Final = f"{PREFIX}uploads/drop"


class Everywhere:
    """What is in a bucket, at all nodes."""

    def __init__(self, mesh: Mesh, peers: Peers, merged: MergedListings, news: News) -> None:
        self._mesh, self._peers, self._merged, self._news = mesh, peers, merged, news

    def __repr__(self) -> str:
        return f"<Everywhere, from {self._mesh.node_id}>"

    async def tell(self) -> None:
        """Every node that answers knows that the bucket is gone: nothing is written to it any more."""
        await self._news.spread()

    async def has_versions(self, bucket: str, *, here: bool) -> bool:
        """Whether any node has any version in it; `here`: whether this one has. Raises S3Error SlowDown."""
        if self._mesh.alone:
            return here
        return bool((await self._merged.versions(bucket, limit=1)).entries)

    async def drop(self, bucket: str) -> None:
        """Have the other nodes drop its uploads; who does not answer has them aborted for their age."""
        if self._mesh.alone:
            return
        me, body = self._mesh.node_id, msgspec.msgpack.encode(bucket)
        for node in self._mesh.map().nodes:
            if node.node_id != me and node.stores and node.state not in ("away", "down"):
                with suppress(PeerUnreachableError, PeerRefusedError, StaleMapError):
                    async with self._peers.call(node, "POST", DROP, body=body):
                        pass


class BucketService:
    """`region` is given to buckets whose creator names none."""

    def __init__(
        self,
        table: BucketTable,
        store: ObjectStore,
        clock: Clock,
        region: str = "us-east-1",
        everywhere: Everywhere | None = None,
    ) -> None:
        self._table, self._store, self._clock, self._region = table, store, clock, region
        self._everywhere = everywhere

    async def create(self, operation: CreateBucket, identity: Identity, new: NewBucket) -> BucketCreated:
        """One's own bucket again is a success, as S3 has it in us-east-1, unless other rights to it are asked
        for. Raises S3Error BucketAlreadyExists."""
        bucket = Bucket(
            operation.bucket,
            identity.user_id,
            self._clock.now_ms(),
            new.location or self._region,
            tags=dict(new.tags) or None,
            acl=None if operation.acl is None else kept_on_bucket(operation.acl),
            ownership=operation.ownership or "",
        )
        try:
            await self._table.create(bucket)
        except BucketExistsError as error:
            if error.bucket is None or not _asks_for(error.bucket, bucket, operation):
                raise S3Error("BucketAlreadyExists", extra={"BucketName": bucket.name}) from error
        return BucketCreated(bucket.name)

    def head(self, operation: HeadBucket) -> BucketFound:
        return BucketFound(self._existing(operation.bucket).region)

    def cors_rules(self, name: str) -> tuple[CorsRule, ...]:
        """The rules that pages' requests to a bucket fall under; none where there is no bucket."""
        bucket = self._table.get(name)
        return () if bucket is None else bucket.cors

    def preflight(self, operation: Preflight) -> PreflightAllowed:
        """Raises S3Error AccessForbidden."""
        rules = self.cors_rules(operation.bucket)
        if not rules:
            raise S3Error("AccessForbidden")
        rule = find_rule(rules, operation.origin, operation.method, operation.headers)
        if rule is None:
            raise refused()
        return PreflightAllowed(operation.origin, rule)

    def location(self, operation: GetBucketLocation) -> BucketLocation:
        return BucketLocation(self._existing(operation.bucket).region)

    def list_all(self, operation: ListBuckets, identity: Identity) -> BucketListing:
        """The caller's buckets; root sees every bucket. `continuation` is the last name already returned."""
        after = operation.continuation or ""
        every = self._table.list_all(None if identity.root else identity.user_id)
        names = [b for b in every if b.name.startswith(operation.prefix) and b.name > after]
        page = names[: operation.max_buckets]
        return BucketListing(
            Owner(identity.user_id, identity.display_name),
            tuple(BucketEntry(bucket.name, bucket.created_ms, bucket.region) for bucket in page),
            page[-1].name if page and len(names) > len(page) else None,
        )

    async def delete(self, operation: DeleteBucket) -> BucketDeleted:
        """Uploads in progress are dropped with it. Raises S3Error BucketNotEmpty, NoSuchBucket.

        The name goes first and the contents are looked at once more: a writer looks for the name after its
        commit, so one of the two sees the other.
        """
        bucket = self._existing(operation.bucket)
        await self._require_empty(bucket.name)
        if not await self._table.delete(bucket.name):
            raise S3Error("NoSuchBucket", extra={"BucketName": bucket.name})
        try:
            if self._everywhere is not None:
                await self._everywhere.tell()
            await self._require_empty(bucket.name)
            await self._drop_uploads(bucket.name)
            if self._everywhere is not None:
                await self._everywhere.drop(bucket.name)
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
        """Those of a bucket that another node has deleted; nothing where there is one of the name again."""
        if self._table.get(name) is None:
            await self._drop_uploads(name)

    async def _require_empty(self, name: str) -> None:
        with store_errors():
            full = bool(self._store.list_versions(name, limit=1).entries)
        if self._everywhere is not None:  # what lies here may be deleted elsewhere already, or the other way
            full = await self._everywhere.has_versions(name, here=full)
        if full:
            raise S3Error("BucketNotEmpty", extra={"BucketName": name})

    async def _drop_uploads(self, name: str) -> None:
        with store_errors():
            while uploads := self._store.list_uploads(name).uploads:
                for upload in uploads:
                    try:
                        await self._store.abort_upload(upload)
                    except NoSuchUploadError:  # completed or aborted meanwhile
                        continue

    async def _restore(self, bucket: Bucket) -> None:
        try:
            await self._table.create(bucket)
        except BucketExistsError:  # someone made it anew in between
            return


def _asks_for(present: Bucket, wanted: Bucket, operation: CreateBucket) -> bool:
    """Whether `present` is what the operation would make, as far as it says."""
    if operation.acl is not None and wanted.acl != present.acl:
        return False
    if operation.ownership is not None and wanted.ownership != present.ownership:
        return False
    return wanted.owner == present.owner
