"""Object service: PUT and CopyObject; `object_reader` has GET and HEAD.

A write becomes visible when it is durable and all its digests match. Memory per request does not grow with
the object's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from meshd.core.api_errors import store_errors
from meshd.core.object_io import check_put_size
from meshd.objects.copy_object import add_checksum, check_copy_source, copy_meta, retry_if_moved
from meshd.store.records import INTERNAL_WRITE, NULL, Meta
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3.result_types import CopyResult, ObjectStored

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable

    from meshd.auth.identity import Identity
    from meshd.core.object_io import Body, StoredCallback
    from meshd.objects.delete import OriginWriteBack
    from meshd.objects.object_reader import VersionLookup
    from meshd.store.api import StoreReader, StoreWriter
    from meshd.store.records import Record, WriteContext
    from meshd.store.writer_api import ObjectWriter
    from meshwire.checksums.body_checksums import BodyDigest
    from meshwire.s3.bucket_settings import Versioning
    from meshwire.s3.operations import CopyObject, PutObject


class SmallObjectStore(Protocol):
    """A store that commits an object of which all bytes are in memory; see `Store`."""

    @property
    def small_object_bytes(self) -> int: ...

    def commit_small(
        self,
        bucket: str,
        key: str,
        data: bytes,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> asyncio.Future[Record]: ...


class ObjectService:
    """Writes whole objects. One per process."""

    def __init__(
        self,
        store: StoreReader,
        replicated: StoreWriter,
        versions: VersionLookup,
        stored: StoredCallback,
        backed: OriginWriteBack | None = None,
        small: SmallObjectStore | None = None,
    ) -> None:
        """`small`: the store if it alone stores every object; None in a cluster."""
        self._store, self._replicated, self._versions = store, replicated, versions
        self._stored, self._backed, self._small = stored, backed, small

    async def put_object(
        self, operation: PutObject, identity: Identity, body: Body, *, context: WriteContext = INTERNAL_WRITE
    ) -> ObjectStored:
        """Store the body. Raises S3Error EntityTooLarge, PreconditionFailed, NoSuchBucket (also when another
        bucket has the name once the body has arrived) and whatever the body raises."""
        check_put_size(body.size)
        born = self._versions.bucket_created(operation.bucket)
        await self._precheck(operation.bucket, operation.key, operation.conditions, context)
        with store_errors():
            writer = self._replicated.writer(operation.bucket, operation.key, size=body.size)
            try:
                await write_body(writer, body, operation)
                owner, versioning = self._versions.write_settings(
                    operation.bucket, born, identity.user_id, operation.acl
                )
                meta = self._meta(operation, owner, body.digest())
                record = await writer.commit(
                    meta, conditions=operation.conditions, versioning=versioning, context=context
                )
            except BaseException:
                await writer.abort()
                raise
        await self.finish_write(operation.bucket, operation.key, record, context=context)
        return self.stored(operation, record)

    def _meta(self, operation: PutObject, owner: str, digest: BodyDigest) -> Meta:
        return Meta(
            etag=digest.md5_hex,
            headers=dict(operation.headers.system),
            metadata=dict(operation.headers.metadata),
            checksums=dict(digest.checksums),
            checksum_type="FULL_OBJECT",
            owner=owner,
            tags=dict(operation.tags),
            acl=operation.acl,
            through=self.writes_through(operation.bucket),
        )

    def stored(self, operation: PutObject, record: Record) -> ObjectStored:
        """Return the result of a finished write."""
        extra = self._versions.expiration_headers(operation.bucket, operation.key, record)
        return ObjectStored(record.etag, record.checksums, record.checksum_type, record.version, extra)

    @property
    def small_bytes(self) -> int:
        """Up to this size, `commit_small` stores an object; negative if it cannot."""
        return -1 if self._small is None else self._small.small_object_bytes

    def commit_small(
        self,
        operation: PutObject,
        identity: Identity,
        data: bytes,
        digest: BodyDigest,
        born: int,
        context: WriteContext,
    ) -> asyncio.Future[Record]:
        """Begin what `put_object` does, for a small body that is here and verified. Once the future is done,
        `remaining_steps` finishes the write. `born`: see `VersionLookup.bucket_created`. Raises S3Error
        NoSuchBucket, StoreError."""
        assert self._small is not None
        owner, versioning = self._versions.write_settings(
            operation.bucket, born, identity.user_id, operation.acl
        )
        return self._small.commit_small(
            operation.bucket,
            operation.key,
            data,
            self._meta(operation, owner, digest),
            conditions=operation.conditions,
            versioning=versioning,
            context=context,
        )

    async def _precheck(
        self, bucket: str, key: str, conditions: Conditions | None, context: WriteContext
    ) -> None:
        """Refuse early what the commit would refuse anyway, so that the client need not send the body."""
        if conditions is None:
            return
        try:
            with store_errors():
                await self._replicated.check_conditions(bucket, key, conditions, context=context)
        except S3Error as error:
            if error.code == "NoSuchKey":
                raise S3Error("NoSuchKey", extra={"Key": key}) from error
            raise

    def writes_through(self, bucket: str) -> bool:
        """See `OriginWriteBack`."""
        return self._backed is not None and self._backed.writes_through(bucket)

    async def finish_write(
        self, bucket: str, key: str, record: Record, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        """Finish a committed write: remove it again if the bucket was deleted while the body arrived,
        otherwise write it to the origin or report it as stored. Raises S3Error NoSuchBucket."""
        steps = self.remaining_steps(bucket, key, record, context=context)
        if steps is not None:
            await steps

    def remaining_steps(
        self, bucket: str, key: str, record: Record, *, context: WriteContext = INTERNAL_WRITE
    ) -> Awaitable[None] | None:
        """Return what `finish_write` has to await; None if nothing is left to do."""
        if not self._versions.has_bucket(bucket):
            return self._remove_again(bucket, key, record, context)
        if self._backed is not None and self._backed.is_backed(bucket):
            return self._write_back(self._backed, bucket, key, record, context)
        return self._stored(bucket, key, record)

    async def _remove_again(self, bucket: str, key: str, record: Record, context: WriteContext) -> None:
        same = Conditions(if_match=(record.etag,))
        with store_errors():
            await self._replicated.delete_version(
                bucket, key, record.version or NULL, conditions=same, context=context
            )
        raise S3Error("NoSuchBucket", extra={"BucketName": bucket})

    async def _write_back(
        self, backed: OriginWriteBack, bucket: str, key: str, record: Record, context: WriteContext
    ) -> None:
        if not await backed.object_committed(bucket, key, record, context=context):
            steps = self._stored(bucket, key, record)
            if steps is not None:
                await steps

    async def copy_object(
        self, operation: CopyObject, identity: Identity, *, context: WriteContext = INTERNAL_WRITE
    ) -> CopyResult:
        """Create a copy that shares the source's extents. Raises S3Error NoSuchKey, NoSuchVersion,
        InvalidRequest, PreconditionFailed, NoSuchBucket (as `put_object` does)."""
        born = self._versions.bucket_created(operation.bucket)
        source, record = await retry_if_moved(
            lambda: self._link(operation, identity, born, context), operation.source
        )
        await self.finish_write(operation.bucket, operation.key, record, context=context)
        return CopyResult(
            record.etag,
            record.modified,
            record.checksums,
            record.checksum_type,
            record.version,
            self._versions.version_header(operation.source.bucket, source),
            self._versions.expiration_headers(operation.bucket, operation.key, record),
        )

    async def _link(
        self, operation: CopyObject, identity: Identity, born: int, context: WriteContext
    ) -> tuple[Record, Record]:
        bucket, key = operation.bucket, operation.key
        source = self._versions.find_copy_source(operation.source)
        versioned = bool(self._versions.versioning_of(bucket))
        check_copy_source(source, operation, versioned=versioned)
        rehashed = await add_checksum(self._store, source, operation.checksum_algorithm)
        self._versions.require_same_bucket(bucket, born)
        owner = self._versions.owner_for_write(bucket, identity.user_id, operation.acl)
        meta = copy_meta(rehashed, operation, owner, through=self.writes_through(bucket))
        setting = self._versions.versioning_of(bucket)
        record = await self._replicated.link(
            bucket, key, rehashed, meta, operation.conditions, versioning=setting, context=context
        )
        return source, record


async def write_body(writer: ObjectWriter, body: Body, operation: PutObject) -> None:
    """Pass the body on, chunk by chunk. The size limit also holds for bodies of undeclared length."""
    total = 0
    async for piece in body.pieces(operation.digests):
        total += len(piece)
        check_put_size(total)
        await writer.write(piece)
