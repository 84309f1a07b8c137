"""Delete: one object, one version, or many objects in one request.

In a bucket with versioning a delete without version id adds a delete marker; deleting a missing object
succeeds. A bucket that is deleted at the same time keeps no marker.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from meshd.core.api_errors import store_errors, to_s3_error
from meshd.objects.object_reader import check_version_id
from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.errors import StoreError
from meshd.store.records import INTERNAL_WRITE, NULL
from meshwire.errors import S3Error
from meshwire.http_values.conditional_requests import Conditions
from meshwire.names import KeyNameError, check_key
from meshwire.s3.result_types import DeletedKey, DeleteFailure, DeleteResult, ObjectDeleted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.objects.object_reader import VersionLookup
    from meshd.store.api import StoreWriter
    from meshd.store.records import Record, Removed, WriteContext
    from meshwire.s3.operations import DeleteObject, DeleteObjects
    from meshwire.s3.xml_documents import DeleteKey, DeleteRequest

_AT_ONCE = 64  # concurrent deletions of single versions for one request


class OriginWriteBack(Protocol):
    """What this package needs of the origins that some buckets have."""

    def is_backed(self, bucket: str) -> bool:
        """Whether a bucket has an origin."""
        ...

    def writes_through(self, bucket: str) -> bool:
        """Whether a bucket's origin has a write before it is acknowledged."""
        ...

    async def object_committed(
        self, bucket: str, key: str, record: Record, *, context: WriteContext = INTERNAL_WRITE
    ) -> bool:
        """Write a committed object to the bucket's origin; False where there is none. Raises S3Error."""
        ...

    async def delete_at_origin(
        self, bucket: str, key: str, *, context: WriteContext = INTERNAL_WRITE
    ) -> bool:
        """Delete an object at the bucket's origin; False where there is none. Raises S3Error."""
        ...


class DeleteService:
    """The use cases of deletion. One per process."""

    def __init__(
        self, replicated: StoreWriter, versions: VersionLookup, backed: OriginWriteBack | None = None
    ) -> None:
        self._replicated, self._versions, self._backed = replicated, versions, backed

    async def delete_object(
        self, operation: DeleteObject, *, context: WriteContext = INTERNAL_WRITE
    ) -> ObjectDeleted:
        """Delete an object or a version. Raises S3Error NoSuchKey (If-Match on a missing key),
        PreconditionFailed, InvalidArgument."""
        bucket, key = operation.bucket, operation.key
        backed = self._backed
        if backed is not None and await backed.delete_at_origin(bucket, key, context=context):
            return ObjectDeleted()
        if operation.version is not None:
            check_version_id(operation.version)
        with store_errors():
            removed = await self._remove(bucket, key, operation.version, operation.conditions, context)
        await self._settle(bucket, [(key, removed)], context)
        if operation.version is not None:
            gone = removed.record
            return ObjectDeleted(operation.version, marker=gone is not None and gone.marker)
        if removed.marker is None:
            return ObjectDeleted()
        return ObjectDeleted(removed.marker.version or NULL, marker=True)

    async def delete_objects(
        self, operation: DeleteObjects, request: DeleteRequest, *, context: WriteContext = INTERNAL_WRITE
    ) -> DeleteResult:
        """Delete many keys, each with its own result, in the order of the request; missing keys succeed."""
        bucket = operation.bucket
        if self._backed is not None and self._backed.is_backed(bucket):
            return await self._delete_backed(self._backed, bucket, request, context)
        answers: dict[int, DeletedKey | DeleteFailure] = {}
        plain, single = [], []
        for number, entry in enumerate(request.keys):
            refusal = _refuse(entry)
            if refusal is not None:
                answers[number] = refusal
            elif entry.version is None and entry.etag is None:
                plain.append((number, entry.key))
            else:
                single.append((number, entry))
        with store_errors():
            setting = self._versions.versioning_of(bucket)
            keys = [key for _, key in plain]
            removed = await self._replicated.delete_many(bucket, keys, versioning=setting, context=context)
        for number, key in plain:
            answers[number] = _deleted_key(key, None, removed[key])
        await self._settle(bucket, list(removed.items()), context)
        for chunk in range(0, len(single), _AT_ONCE):
            part = single[chunk : chunk + _AT_ONCE]
            done = await asyncio.gather(*[self._delete_one(bucket, entry, context) for _, entry in part])
            answers.update(zip([number for number, _ in part], done, strict=True))
        every = [answers[number] for number in range(len(request.keys))]
        deleted = () if request.quiet else tuple(a for a in every if isinstance(a, DeletedKey))
        return DeleteResult(deleted, tuple(a for a in every if isinstance(a, DeleteFailure)))

    async def _delete_backed(
        self, backed: OriginWriteBack, bucket: str, request: DeleteRequest, context: WriteContext
    ) -> DeleteResult:
        """Delete each key at the origin, some concurrently."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(entry: DeleteKey) -> DeletedKey | DeleteFailure:
            refusal = _refuse(entry)
            if refusal is not None:
                return refusal
            if entry.version not in {None, NULL} or entry.etag is not None:
                said = "A bucket with an origin supports neither versions nor ETag conditions."
                return DeleteFailure(entry.key, "NotImplemented", said, entry.version or "")
            async with slots:
                try:
                    await backed.delete_at_origin(bucket, entry.key, context=context)
                except S3Error as error:
                    return DeleteFailure(entry.key, error.code, error.message, "")
            return DeletedKey(entry.key, "", "")

        every = await asyncio.gather(*[one(entry) for entry in request.keys])
        deleted = () if request.quiet else tuple(a for a in every if isinstance(a, DeletedKey))
        return DeleteResult(deleted, tuple(a for a in every if isinstance(a, DeleteFailure)))

    async def _delete_one(
        self, bucket: str, entry: DeleteKey, context: WriteContext
    ) -> DeletedKey | DeleteFailure:
        conditions = None if entry.etag is None else Conditions(if_match=(entry.etag,))
        try:
            removed = await self._remove(bucket, entry.key, entry.version, conditions, context)
        except StoreError as error:
            refusal = to_s3_error(error)
            return DeleteFailure(entry.key, refusal.code, refusal.message, entry.version or "")
        await self._settle(bucket, [(entry.key, removed)], context)
        return _deleted_key(entry.key, entry.version, removed)

    async def _remove(
        self,
        bucket: str,
        key: str,
        version: str | None,
        conditions: Conditions | None,
        context: WriteContext,
    ) -> Removed:
        if version is not None:
            return await self._replicated.delete_version(
                bucket, key, version, conditions=conditions, context=context
            )
        setting = self._versions.versioning_of(bucket)
        return await self._replicated.delete(
            bucket, key, conditions=conditions, versioning=setting, context=context
        )

    async def _settle(
        self, bucket: str, removed: Sequence[tuple[str, Removed]], context: WriteContext
    ) -> None:
        """Remove the new delete markers again if the bucket was deleted meanwhile."""
        if self._versions.has_bucket(bucket):
            return
        with store_errors():
            for key, one in removed:
                if one.marker is not None:
                    version = one.marker.version or NULL
                    await self._replicated.delete_version(bucket, key, version, context=context)
        raise S3Error("NoSuchBucket", extra={"BucketName": bucket})


def _refuse(entry: DeleteKey) -> DeleteFailure | None:
    try:
        check_key(entry.key)
    except KeyNameError as error:
        return DeleteFailure(entry.key, "InvalidArgument", str(error), entry.version or "")
    if entry.version is not None and entry.version != NULL and stamp_of_version_id(entry.version) is None:
        missing = "The specified version does not exist."
        return DeleteFailure(entry.key, "NoSuchVersion", missing, entry.version)
    return None


def _deleted_key(key: str, version: str | None, removed: Removed) -> DeletedKey:
    if version is None:
        marker = removed.marker
        return DeletedKey(key, "", "" if marker is None else marker.version or NULL)
    gone = removed.record
    return DeletedKey(key, version, version if gone is not None and gone.marker else "")
