"""ACLs of objects: read and set, on the current version or a named one.

Law: an ACL changes in place: neither the version, nor its time, nor its ETag. Where the bucket's ownership
switches ACLs off, its owner owns everything in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.service.authorization.acls import ENFORCED, check_acl
from meshd.service.semantics.translation import store_errors
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectAcl, ObjectAclStored, Owner
from meshwire.s3.settings import Acl

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.service.authorization.acls import AclService
    from meshd.service.semantics.versions import Versions
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.s3.operations import GetObjectAcl, PutObjectAcl


class ObjectAclService:
    """The use cases of object ACLs. One per process."""

    def __init__(
        self, store: ObjectStore, buckets: BucketTable, versions: Versions, acls: AclService
    ) -> None:
        self._store, self._buckets, self._versions, self._acls = store, buckets, versions, acls

    def get(self, operation: GetObjectAcl) -> ObjectAcl:
        """Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete marker)."""
        bucket = self._bucket(operation.bucket)
        record = self._versions.find(bucket.name, operation.key, operation.version)
        names, owner = self._acls.names(), _owner(bucket, record)
        acl = None if bucket.ownership == ENFORCED else record.acl
        return ObjectAcl(
            Owner(owner, names.get(owner, "")),
            acl or Acl(),
            Owner(bucket.owner, names.get(bucket.owner, "")),
            self._versions.name(bucket.name, record),
            names,
        )

    async def put(self, operation: PutObjectAcl, body: bytes) -> ObjectAclStored:
        """Raises S3Error as `get`, and as `AclService.requested` and `check_acl`."""
        bucket = self._bucket(operation.bucket)
        record = self._versions.find(bucket.name, operation.key, operation.version)
        acl = self._acls.requested(operation.acl, body, _owner(bucket, record))
        check_acl(acl, bucket)
        with store_errors():
            record = await self._store.amend(bucket.name, operation.key, operation.version, acl=acl)
        return ObjectAclStored(self._versions.name(bucket.name, record))

    def _bucket(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return bucket


def _owner(bucket: Bucket, record: Record) -> str:
    """Whoever wrote it; the bucket's owner for what nobody signed, and where ownership is enforced."""
    return bucket.owner if bucket.ownership == ENFORCED else record.owner or bucket.owner
