"""Object metadata: ACL, tags and attributes of an object or one of its versions.

ACLs and tags change in place; version, time and ETag stay the same. GetObjectAttributes reads only the
record. In a bucket with BucketOwnerEnforced ownership the bucket's owner owns every object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.auth.acls import BUCKET_OWNER_ENFORCED, check_acl
from meshd.core.api_errors import store_errors
from meshd.store.records import INTERNAL_WRITE
from meshwire.errors import S3Error
from meshwire.s3.bucket_settings import Acl
from meshwire.s3.result_types import (
    ObjectAcl,
    ObjectAclStored,
    ObjectAttributes,
    ObjectTagged,
    ObjectTags,
    Owner,
    PartEntry,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.acls import AclService
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.objects.object_reader import VersionLookup
    from meshd.store.api import StoreWriter
    from meshd.store.records import Record, WriteContext
    from meshwire.s3.operations import (
        DeleteObjectTagging,
        GetObjectAcl,
        GetObjectAttributes,
        GetObjectTagging,
        PutObjectAcl,
        PutObjectTagging,
    )


class ObjectAclService:
    """The use cases of object ACLs. One per process."""

    def __init__(
        self, replicated: StoreWriter, buckets: BucketTable, versions: VersionLookup, acls: AclService
    ) -> None:
        self._replicated, self._buckets, self._versions, self._acls = replicated, buckets, versions, acls

    def get_acl(self, operation: GetObjectAcl) -> ObjectAcl:
        """Return an ACL. Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete marker)."""
        bucket = self._bucket(operation.bucket)
        record = self._versions.find_version(bucket.name, operation.key, operation.version)
        names, owner = self._acls.display_names(), _owner(bucket, record)
        acl = None if bucket.ownership == BUCKET_OWNER_ENFORCED else record.acl
        return ObjectAcl(
            Owner(owner, names.get(owner, "")),
            acl or Acl(),
            Owner(bucket.owner, names.get(bucket.owner, "")),
            self._versions.version_header(bucket.name, record),
            names,
        )

    async def put_acl(
        self, operation: PutObjectAcl, body: bytes, *, context: WriteContext = INTERNAL_WRITE
    ) -> ObjectAclStored:
        """Replace an ACL. Raises S3Error as `get_acl`, `AclService.parse_request` and `check_acl` do."""
        bucket = self._bucket(operation.bucket)
        record = self._versions.find_version(bucket.name, operation.key, operation.version)
        acl = self._acls.parse_request(operation.acl, body, _owner(bucket, record))
        check_acl(acl, bucket)
        with store_errors():
            record = await self._replicated.amend(
                bucket.name, operation.key, operation.version, acl=acl, context=context
            )
        return ObjectAclStored(self._versions.version_header(bucket.name, record))

    def _bucket(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return bucket


def _owner(bucket: Bucket, record: Record) -> str:
    """Return the writer of the object, or the bucket's owner for unsigned writes and where ownership is
    enforced."""
    return bucket.owner if bucket.ownership == BUCKET_OWNER_ENFORCED else record.owner or bucket.owner


class TaggingService:
    """The use cases of object tags. One per process."""

    def __init__(self, replicated: StoreWriter, versions: VersionLookup) -> None:
        self._replicated, self._versions = replicated, versions

    def get_tags(self, operation: GetObjectTagging) -> ObjectTags:
        """Return the tags. Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete marker)."""
        record = self._versions.find_version(operation.bucket, operation.key, operation.version)
        return ObjectTags(record.tags, self._versions.version_header(operation.bucket, record))

    async def put_tags(
        self, operation: PutObjectTagging, tags: Mapping[str, str], *, context: WriteContext = INTERNAL_WRITE
    ) -> ObjectTagged:
        """Replace all tags. Raises S3Error as `get_tags` does."""
        return await self._set(operation, tags, context)

    async def delete_tags(
        self, operation: DeleteObjectTagging, *, context: WriteContext = INTERNAL_WRITE
    ) -> ObjectTagged:
        """Remove all tags. Raises S3Error as `get_tags` does."""
        return await self._set(operation, {}, context)

    async def _set(
        self,
        operation: PutObjectTagging | DeleteObjectTagging,
        tags: Mapping[str, str],
        context: WriteContext,
    ) -> ObjectTagged:
        bucket, key = operation.bucket, operation.key
        self._versions.find_version(bucket, key, operation.version)
        with store_errors():
            record = await self._replicated.amend(
                bucket, key, operation.version, tags=dict(tags), context=context
            )
        return ObjectTagged(self._versions.version_header(bucket, record))


def object_attributes(versions: VersionLookup, operation: GetObjectAttributes) -> ObjectAttributes:
    """Return an object's attributes. Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete
    marker)."""
    record = versions.find_version(operation.bucket, operation.key, operation.version)
    return attributes_from_record(record, operation, versions.version_header(operation.bucket, record))


def attributes_from_record(
    record: Record, operation: GetObjectAttributes, version: str = ""
) -> ObjectAttributes:
    """Return the attributes of a record that another function found."""
    first = operation.part_number_marker
    page = record.parts[first : first + operation.max_parts]
    last = first + len(page)
    return ObjectAttributes(
        record.size,
        record.etag,
        record.modified,
        record.checksums,
        record.checksum_type,
        version,
        len(record.parts),
        tuple(
            PartEntry(number, part.size, part.etag, record.modified, part.checksums)
            for number, part in enumerate(page, first + 1)
        ),
        parts_truncated=last < len(record.parts) and operation.max_parts > 0,
        next_part=last,
    )
