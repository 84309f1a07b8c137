"""What ACLs grant: the last word on a request that nothing else allows.

Law: an ACL only ever adds; a bucket whose owner enforces ownership has none, and public grants count for
nothing where they are ignored.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/acl-overview.html#permissions
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.service.authorization.acls import ENFORCED
from meshwire.s3.acls import GROUPS, grants_of
from meshwire.s3.settings import ALL_USERS, AUTHENTICATED_USERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import Bucket
    from meshd.store.records import Record
    from meshwire.s3.settings import Acl, Permission

ON_BUCKET: Final[Mapping[str, Permission]] = {
    "s3:ListBucket": "READ",
    "s3:ListBucketVersions": "READ",
    "s3:ListBucketMultipartUploads": "READ",
    "s3:PutObject": "WRITE",
    "s3:DeleteObject": "WRITE",
    "s3:AbortMultipartUpload": "WRITE",
    "s3:ListMultipartUploadParts": "WRITE",
    "s3:GetBucketAcl": "READ_ACP",
    "s3:PutBucketAcl": "WRITE_ACP",
}
ON_OBJECT: Final[Mapping[str, Permission]] = {
    "s3:GetObject": "READ",
    "s3:GetObjectVersion": "READ",
    "s3:GetObjectAcl": "READ_ACP",
    "s3:GetObjectVersionAcl": "READ_ACP",
    "s3:PutObjectAcl": "WRITE_ACP",
    "s3:PutObjectVersionAcl": "WRITE_ACP",
}
_WRITTEN: Final = frozenset({"s3:PutObjectAcl", "s3:PutObjectTagging"})
READING: Final = frozenset({"s3:GetObject", "s3:GetObjectVersion"})


def bucket_grants(bucket: Bucket, user: str, action: str, *, writing: bool = False) -> bool:
    """Whether the bucket's ACL lets `user` (empty: nobody) do `action`. `writing`: as a part of writing an
    object, whose tags and ACL are its writer's to set."""
    wanted = ON_BUCKET.get("s3:PutObject" if writing and action in _WRITTEN else action)
    return wanted is not None and _grants(bucket, bucket.acl, bucket.owner, user, wanted)


def object_grants(bucket: Bucket, record: Record, user: str, action: str) -> bool:
    """Whether the object's ACL does. Who wrote it has full control of it."""
    wanted = ON_OBJECT.get(action)
    return wanted is not None and _grants(bucket, record.acl, record.owner, user, wanted)


def _grants(bucket: Bucket, acl: Acl | None, owner: str, user: str, wanted: Permission) -> bool:
    if bucket.ownership == ENFORCED:
        return False
    whom = {user, ALL_USERS, AUTHENTICATED_USERS} if user else {ALL_USERS}
    if bucket.public_access is not None and bucket.public_access.ignore_public_acls:
        whom -= GROUPS
    return any(
        grant.grantee in whom and grant.permission in (wanted, "FULL_CONTROL")
        for grant in grants_of(acl, owner, bucket.owner)
    )
