"""ACLs: which ones may be set, how they are stored and shown, and which permissions they grant.

Every ACL is checked here against users and bucket settings before it is stored. A stored grant names a
group or an existing user, and nothing public is stored where public ACLs are blocked. An ACL only adds
permissions; a bucket whose owner enforces ownership has none.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/acl-overview.html#permissions
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshwire.errors import S3Error
from meshwire.s3 import acl_xml
from meshwire.s3 import operations as ops
from meshwire.s3.acl_xml import GROUPS, effective_grants
from meshwire.s3.bucket_settings import ALL_USERS, AUTHENTICATED_USERS, Acl, Grant
from meshwire.s3.result_types import Owner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.identities import IdentityTable
    from meshd.store.records import Record
    from meshwire.s3.bucket_settings import Permission


BUCKET_OWNER_ENFORCED = "BucketOwnerEnforced"
AclOperation = (
    ops.CreateBucket
    | ops.PutObject
    | ops.CopyObject
    | ops.CreateMultipartUpload
    | ops.PutObjectAcl
    | ops.PutBucketSetting
)


class AclService:
    """Checks ACLs against users and bucket settings, and renders them as XML. One instance per process."""

    def __init__(self, buckets: BucketTable, identities: IdentityTable) -> None:
        self._buckets, self._identities = buckets, identities

    # --- what may be set ------------------------------------------------------------------------------

    def resolve_operation(self, operation: ops.Operation) -> ops.Operation:
        """Return the operation with user ids in its ACL, if it carries one. Raises S3Error as
        `resolve_grantees` and `check_acl` do."""
        if not isinstance(operation, AclOperation) or operation.acl is None:
            return operation
        acl = self.resolve_grantees(operation.acl)
        if isinstance(operation, ops.CreateBucket):
            if operation.ownership == BUCKET_OWNER_ENFORCED and stored_bucket_acl(acl) is not None:
                raise S3Error("InvalidBucketAclWithObjectOwnership")
            return replace(operation, acl=acl)
        bucket = self._buckets.get(operation.bucket)
        if bucket is not None:
            check_acl(acl, bucket)
        if isinstance(operation, ops.PutObjectAcl | ops.PutBucketSetting):
            return replace(operation, acl=acl)
        return replace(operation, acl=stored_acl(acl))

    def resolve_grantees(self, acl: Acl) -> Acl:
        """Replace e-mail addresses with user ids. Raises S3Error: InvalidArgument,
        UnresolvableGrantByEmailAddress."""
        if not acl.grants:
            return acl
        users = self._identities.list_all()
        ids = {user.user_id for user in users}
        addresses = {user.email.lower(): user.user_id for user in users if user.email}
        return replace(acl, grants=tuple(_resolve_grantee(grant, ids, addresses) for grant in acl.grants))

    def parse_request(self, acl: Acl | None, body: bytes, owner: str) -> Acl:
        """Return the ACL that a PUT of ?acl asks for, from its headers or its document. A document must name
        the present owner.

        Raises S3Error: UnexpectedContent (both), MissingSecurityHeader (neither), MalformedACLError,
        AccessDenied, and as `resolve_grantees` does.
        """
        if acl is not None:
            if body:
                raise S3Error("UnexpectedContent")
            return acl
        if not body.strip():
            raise S3Error("MissingSecurityHeader", extra={"MissingHeaderName": "x-amz-acl"})
        document = acl_xml.parse_acl(body)
        if document.owner != owner:
            raise S3Error("AccessDenied", "An ACL cannot change who owns its bucket or object.")
        return self.resolve_grantees(document.acl)

    # --- what is read back ----------------------------------------------------------------------------

    def owner_of(self, user_id: str) -> Owner:
        """Return the owner with their display name, which is empty for a user who no longer exists."""
        user = self._identities.find_user(user_id)
        return Owner(user_id, "" if user is None else user.display_name)

    def display_names(self) -> dict[str, str]:
        """Return all display names by user id."""
        return {user.user_id: user.display_name for user in self._identities.list_all()}

    def bucket_document(self, bucket: Bucket) -> str:
        """Return the ACL of a bucket as XML; it names only the owner where ACLs are switched off."""
        names = self.display_names()
        acl = None if bucket.ownership == BUCKET_OWNER_ENFORCED else bucket.acl
        owner = Owner(bucket.owner, names.get(bucket.owner, ""))
        return acl_xml.acl_document(owner, acl_xml.effective_grants(acl, bucket.owner), names)


def check_acl(acl: Acl, bucket: Bucket) -> None:
    """Raise S3Error unless the bucket's settings allow it: AccessControlListNotSupported, AccessDenied."""
    if bucket.ownership == BUCKET_OWNER_ENFORCED and not _is_owner_full_control(acl, bucket.owner):
        raise S3Error("AccessControlListNotSupported")
    blocked = bucket.public_access is not None and bucket.public_access.block_public_acls
    if blocked and acl_xml.is_public_acl(acl):
        raise S3Error("AccessDenied", "Public ACLs are blocked on this bucket (BlockPublicAcls).")


def _is_owner_full_control(acl: Acl, owner: str) -> bool:
    """Whether `acl` only gives the bucket's owner full control: the one ACL allowed where ACLs are off."""
    return acl.canned == "bucket-owner-full-control" or acl.grants == (Grant(owner, "FULL_CONTROL"),)


def stored_acl(acl: Acl | None) -> Acl | None:
    """Return the form that is stored: None for the default ACL, which is `private`."""
    return None if acl == Acl() else acl


def stored_bucket_acl(acl: Acl) -> Acl | None:
    """Like `stored_acl`, for a bucket: the canned ACLs about a bucket's owner mean nothing there."""
    return None if acl.canned.startswith("bucket-owner-") else stored_acl(acl)


def _resolve_grantee(grant: Grant, ids: set[str], addresses: dict[str, str]) -> Grant:
    name = grant.grantee
    if name.startswith(acl_xml.MAILTO):
        found = addresses.get(name.removeprefix(acl_xml.MAILTO).lower())
        if found is None:
            raise S3Error("UnresolvableGrantByEmailAddress")
        return replace(grant, grantee=found)
    if name not in acl_xml.GROUPS and name not in ids:
        argument = {"ArgumentName": "CanonicalUser/ID", "ArgumentValue": name[:256]}
        raise S3Error("InvalidArgument", "Invalid id", extra=argument)
    return grant


BUCKET_ACL_PERMISSIONS: Final[Mapping[str, Permission]] = {
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
OBJECT_ACL_PERMISSIONS: Final[Mapping[str, Permission]] = {
    "s3:GetObject": "READ",
    "s3:GetObjectVersion": "READ",
    "s3:GetObjectAcl": "READ_ACP",
    "s3:GetObjectVersionAcl": "READ_ACP",
    "s3:PutObjectAcl": "WRITE_ACP",
    "s3:PutObjectVersionAcl": "WRITE_ACP",
}
_WRITTEN: Final = frozenset({"s3:PutObjectAcl", "s3:PutObjectTagging"})
READ_ACTIONS: Final = frozenset({"s3:GetObject", "s3:GetObjectVersion"})


def bucket_grants(bucket: Bucket, user: str, action: str, *, writing: bool = False) -> bool:
    """Whether the bucket's ACL lets `user` (empty: anonymous) do `action`. `writing`: the action is part of
    writing an object, whose writer may also set its tags and ACL."""
    wanted = BUCKET_ACL_PERMISSIONS.get("s3:PutObject" if writing and action in _WRITTEN else action)
    return wanted is not None and _grants(bucket, bucket.acl, bucket.owner, user, wanted)


def object_grants(bucket: Bucket, record: Record, user: str, action: str) -> bool:
    """Whether the object's ACL lets `user` do `action`. The object's owner has full control of it."""
    wanted = OBJECT_ACL_PERMISSIONS.get(action)
    return wanted is not None and _grants(bucket, record.acl, record.owner, user, wanted)


def _grants(bucket: Bucket, acl: Acl | None, owner: str, user: str, wanted: Permission) -> bool:
    if bucket.ownership == BUCKET_OWNER_ENFORCED:
        return False
    whom = {user, ALL_USERS, AUTHENTICATED_USERS} if user else {ALL_USERS}
    if bucket.public_access is not None and bucket.public_access.ignore_public_acls:
        whom -= GROUPS
    return any(
        grant.grantee in whom and grant.permission in (wanted, "FULL_CONTROL")
        for grant in effective_grants(acl, owner, bucket.owner)
    )
