"""BackedBucketService: the S3 operations that buckets with origins support, and their implementation.

One table lists what an origin can store. An unsupported operation is refused with a reason; it is never
carried out in part.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from meshd.core.api_errors import store_errors
from meshd.core.read_source import GeneratedSource
from meshd.origins.cache.cache_store import record_from_facts
from meshd.origins.client.obstore_origin import check_key
from meshd.origins.client.origin_api import ObjectFacts, OriginError
from meshd.origins.read_sources import s3_error_for
from meshd.store.errors import ConditionFailedError, ConditionMissingError, StoreError
from meshd.store.records import INTERNAL_WRITE, NULL
from meshd.util.async_tasks import BackgroundTasks
from meshd.views.copy_out import assembled_part, assembled_upload
from meshd.views.view_kind import AssembledObject
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.core.object_io import LookupResult
    from meshd.core.read_source import FailoverRead
    from meshd.origins.cache.cache_manager import CacheManagerClient
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.listing import BackedListings
    from meshd.origins.read_through import BackedReader
    from meshd.origins.worker_shards import WorkerShards
    from meshd.origins.write_back_routing import WriteBackRouter
    from meshd.store.api import StoreWriter
    from meshd.store.records import Record, Span, WriteContext
    from meshd.store.store import Store
    from meshd.views.copy_out import AssembledBody
    from meshd.views.dispatch import AssembledRead
    from meshwire.s3.result_types import ObjectListing

_log = logging.getLogger("meshd.origins")
_READS = (
    ops.GetObject,
    ops.GetObjectAttributes,
    ops.ListObjects,
    ops.ListMembers,
    ops.HeadBucket,
    ops.DeleteBucket,
    ops.GetBucketLocation,
    ops.GetBucketSetting,
    ops.PutBucketSetting,
    ops.DeleteBucketSetting,
    ops.Preflight,
    ops.GetObjectAcl,
)
_WRITES = (
    ops.PutObject,
    ops.PostObject,
    ops.CopyObject,
    ops.DeleteObject,
    ops.DeleteObjects,
    ops.CreateMultipartUpload,
    ops.UploadPart,
    ops.UploadPartCopy,
    ops.CompleteMultipartUpload,
)
_UPLOADS = (ops.AbortMultipartUpload, ops.ListParts, ops.ListMultipartUploads)
_SETTINGS_REFUSED = frozenset({"versioning", "lifecycle", "object-lock", "replication"})


class BackedBucketService:
    """Carries out S3 operations on buckets with origins. One instance per process."""

    def __init__(
        self,
        store: Store,
        shared: StoreWriter,
        cache_store: CacheStore,
        shards: WorkerShards,
        router: WriteBackRouter,
        reader: BackedReader,
        listings: BackedListings,
        mesh: ClusterView,
    ) -> None:
        self._store, self._shared, self._cache_store, self._shards = store, shared, cache_store, shards
        self._mesh, self.write_back_router = mesh, router
        self.reader, self.listings = reader, listings
        self._tasks = BackgroundTasks("write-back")

    def __repr__(self) -> str:
        return f"<BackedBucketService {self.reader!r}>"

    @property
    def cache_store(self) -> CacheStore:
        return self._cache_store

    @property
    def cache_manager(self) -> CacheManagerClient:
        return self.reader.cache_manager

    def is_backed(self, bucket: str) -> bool:
        """Whether a bucket has an origin."""
        return self._cache_store.backed_bucket(bucket) is not None

    def writes_through(self, bucket: str) -> bool:
        """Whether a bucket's origin has a write before it is acknowledged."""
        backed = self._cache_store.backed_bucket(bucket)
        return backed is not None and backed.origin is not None and backed.origin.write == "through"

    def check(self, operation: ops.Operation) -> None:
        """Raise S3Error for an operation that a backed bucket does not support."""
        if isinstance(operation, ops.ListBuckets | ops.CreateBucket):
            return
        bucket = self._cache_store.backed_bucket(operation.bucket)
        if bucket is None:
            return
        if isinstance(operation, ops.PutBucketSetting) and operation.setting in _SETTINGS_REFUSED:
            raise refused(bucket, f"does not support the setting {operation.setting}")
        if isinstance(operation, _READS + _UPLOADS):
            return
        if not isinstance(operation, _WRITES):
            raise refused(bucket, f"does not support {ops.operation_name(operation)}")
        assert bucket.origin is not None
        if bucket.origin.write == "off":
            raise S3Error("AccessDenied", f"{bucket.name} is backed by an origin and is read-only.")
        self._check_write(bucket, operation)

    def _check_write(self, bucket: Bucket, operation: ops.Operation) -> None:
        key = getattr(operation, "key", None)
        if key is not None:
            try:
                check_key(key)
            except OriginError as error:
                raise s3_error_for(error, key) from error
        if getattr(operation, "conditions", None) is not None:
            raise refused(bucket, "supports no conditional writes: send them to the origin")
        if getattr(operation, "tags", None):
            raise refused(bucket, "stores no tags")
        acl = getattr(operation, "acl", None)
        if acl is not None and acl.canned not in {"private", "bucket-owner-full-control"}:
            raise refused(bucket, "stores no object ACLs: use a bucket policy")
        if getattr(operation, "version", None) not in {None, NULL}:
            raise refused(bucket, "has no versions")

    # --- reading

    def hit_recorder(self, operation: ops.GetObject) -> Callable[[], None] | None:
        """See `BackedReader.hit_recorder`."""
        return self.reader.hit_recorder(operation.bucket, operation.key)

    async def open_object(self, operation: ops.GetObject) -> AssembledRead | None:
        """See `BackedReader.open_object`."""
        return await self.reader.open_object(operation)

    def resume_from_origin(
        self, bucket: str, key: str, found: LookupResult, sent: int
    ) -> FailoverRead | None:
        """Returns the read, from the origin, of what is missing of a response from the cache after `sent`
        bytes; None if the response was not from the cache."""
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None or self._store.get_stored(bucket, key) is not None:
            return None
        record = found.record
        facts = ObjectFacts(record.size, record.etag, record.modified, record.headers, record.metadata)
        offset = found.base + found.offset + sent
        return self.reader.open_range(backed, key, facts, offset, found.length - sent, resumed=True)

    async def list_objects(self, operation: ops.ListObjects) -> ObjectListing | None:
        """See `BackedListings.list_objects`."""
        return await self.listings.list_objects(operation)

    async def head_record(self, bucket: str, key: str) -> Record | None:
        """Return the record of an object without its bytes; None if the store has the object. Raises
        S3Error."""
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None or self._store.get_stored(bucket, key) is not None:
            return None
        try:
            return record_from_facts(backed, await self.reader.current_facts(backed, key))
        except OriginError as error:
            raise s3_error_for(error, key) from error

    def is_dirty(self, bucket: Bucket, key: str) -> bool:
        """Whether this node has an object that the origin does not have yet."""
        return self._store.get_stored(bucket.name, key) is not None

    async def origin_facts(self, bucket: Bucket, key: str) -> ObjectFacts:
        """Return the facts of an object, stored here or at the origin. Raises OriginError, S3Error
        NoSuchKey."""
        own = self._store.get_stored(bucket.name, key)
        if own is not None:
            return ObjectFacts(own.size, own.etag, own.modified)
        check_key(key)
        return await self.reader.current_facts(bucket, key)

    async def as_copy_source(self, bucket: str, key: str) -> AssembledObject | None:
        """Return an object of a backed bucket with a reader of its bytes; None if the store has the
        object."""
        record = await self.head_record(bucket, key)
        if record is None:
            return None
        backed = self._cache_store.backed_bucket(bucket)
        assert backed is not None
        facts = ObjectFacts(record.size, record.etag, record.modified, record.headers, record.metadata)

        def groups(offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
            return self.reader.open_range(backed, key, facts, offset, length).groups()

        return AssembledObject(record, [GeneratedSource(groups)])

    async def copy_as_upload(self, operation: ops.CopyObject) -> tuple[ops.PutObject, AssembledBody] | None:
        """Turn a copy from a backed bucket into an upload; None for other copies. Raises S3Error."""
        made = await self.as_copy_source(operation.source.bucket, operation.source.key)
        return None if made is None else assembled_upload(operation, made)

    async def copy_as_part(
        self, operation: ops.UploadPartCopy
    ) -> tuple[ops.UploadPart, AssembledBody] | None:
        """Turn a part copy from a backed bucket into a part upload; None for other copies. Raises S3Error."""
        made = await self.as_copy_source(operation.source.bucket, operation.source.key)
        return None if made is None else assembled_part(operation, made)

    # --- writing

    async def object_committed(
        self, bucket: str, key: str, record: Record, *, context: WriteContext = INTERNAL_WRITE
    ) -> bool:
        """Write an object that was committed to the durable store to its origin; False if it has none.

        Write-through waits, and removes the object again if the origin does not store it. In a bucket that
        is written `back`, the object stays and is tried again: it may have replaced one that was
        acknowledged. Raises S3Error.
        """
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None:
            return False
        assert backed.origin is not None
        if backed.origin.write == "back" and not record.through and self._survives(bucket, key):
            await self._shards.worker_for(bucket, key).forget_object(backed, key)
            self._tasks.spawn(self._behind(backed, key), "push")
            return True
        with store_errors():
            try:
                await self.write_back_router.write_back(backed, key)
            except OriginError as error:
                if record.through:
                    same = Conditions(if_match=(record.etag,))
                    with suppress(ConditionFailedError, ConditionMissingError):  # replaced or removed
                        await self._shared.delete_version(
                            bucket, key, NULL, conditions=same, stamp=record.stamp, context=context
                        )
                raise s3_error_for(error, key) from error
        return True

    def _survives(self, bucket: str, key: str) -> bool:
        """Whether several nodes store the write; otherwise it is written through, since one failure would
        lose it."""
        return self._mesh.single_node or len(self._mesh.route_for(bucket, key).write_set) > 1

    async def write_back(self, bucket: Bucket, key: str) -> None:
        """See `WriteBackRouter.write_back`."""
        await self.write_back_router.write_back(bucket, key)

    async def _behind(self, bucket: Bucket, key: str) -> None:
        try:
            await self.write_back_router.write_back(bucket, key)
        except (OriginError, StoreError) as error:  # the coordinator retries
            _log.warning(
                "an object could not be written to its origin yet",
                extra={"bucket": bucket.name, "why": str(error)},
            )

    async def delete_at_origin(
        self, bucket: str, key: str, *, context: WriteContext = INTERNAL_WRITE
    ) -> bool:
        """Delete an object at its origin; False for a bucket without an origin. Raises S3Error."""
        backed = self._cache_store.backed_bucket(bucket)
        if backed is None:
            return False
        try:
            check_key(key)
            with store_errors():
                await self.write_back_router.delete_at_origin(backed, key, context)
        except OriginError as error:
            raise s3_error_for(error, key) from error
        return True

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self.write_back_router.aclose()


def refused(bucket: Bucket, what: str) -> S3Error:
    """Return the error for an operation that a backed bucket does not support."""
    return S3Error("NotImplemented", f"{bucket.name} is backed by an origin, and {what}.")
