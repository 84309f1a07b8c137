"""ACLs: what may be set, and what is read back. (Whom they admit is decided in `access`.)

Law: every ACL that is to be kept passes here, where the users and the bucket's settings are known.
Invariant: a kept grant names a group or a user who was there; nothing public is kept where that is blocked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwire.s3 import acls
from meshwire.s3 import operations as ops
from meshwire.s3.errors import S3Error
from meshwire.s3.results import Owner
from meshwire.s3.settings import Acl, Grant

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.identities import IdentityTable

ENFORCED = "BucketOwnerEnforced"
AclOperation = (
    ops.CreateBucket
    | ops.PutObject
    | ops.CopyObject
    | ops.CreateMultipartUpload
    | ops.PutObjectAcl
    | ops.PutBucketSetting
)


class AclService:
    """Judges ACLs against users and buckets, and writes them out. One per process."""

    def __init__(self, buckets: BucketTable, identities: IdentityTable) -> None:
        self._buckets, self._identities = buckets, identities

    # --- what may be set ------------------------------------------------------------------------------

    def admitted(self, operation: ops.Operation) -> ops.Operation:
        """The operation with user ids in its ACL, if it carries one. Raises S3Error as `resolved` and
        `check_acl`."""
        if not isinstance(operation, AclOperation) or operation.acl is None:
            return operation
        acl = self.resolved(operation.acl)
        if isinstance(operation, ops.CreateBucket):
            if operation.ownership == ENFORCED and kept_on_bucket(acl) is not None:
                raise S3Error("InvalidBucketAclWithObjectOwnership")
            return replace(operation, acl=acl)
        bucket = self._buckets.get(operation.bucket)
        if bucket is not None:
            check_acl(acl, bucket)
        if isinstance(operation, ops.PutObjectAcl | ops.PutBucketSetting):
            return replace(operation, acl=acl)
        return replace(operation, acl=kept(acl))

    def resolved(self, acl: Acl) -> Acl:
        """With user ids in place of e-mail addresses. Raises S3Error: InvalidArgument,
        UnresolvableGrantByEmailAddress."""
        if not acl.grants:
            return acl
        users = self._identities.list_all()
        ids = {user.user_id for user in users}
        addresses = {user.email.lower(): user.user_id for user in users if user.email}
        return replace(acl, grants=tuple(_resolved(grant, ids, addresses) for grant in acl.grants))

    def requested(self, acl: Acl | None, body: bytes, owner: str) -> Acl:
        """What a PUT of ?acl asks for: from headers, or the document, which must name the present owner.

        Raises S3Error: UnexpectedContent (both), MissingSecurityHeader (neither), MalformedACLError,
        AccessDenied, and as `resolved`.
        """
        if acl is not None:
            if body:
                raise S3Error("UnexpectedContent")
            return acl
        if not body.strip():
            raise S3Error("MissingSecurityHeader", extra={"MissingHeaderName": "x-amz-acl"})
        document = acls.parse_acl(body)
        if document.owner != owner:
            raise S3Error("AccessDenied", "An ACL cannot change who owns its bucket or object.")
        return self.resolved(document.acl)

    # --- what is read back ----------------------------------------------------------------------------

    def owner(self, user_id: str) -> Owner:
        """With the display name; without one for a user who is gone."""
        user = self._identities.by_id(user_id)
        return Owner(user_id, "" if user is None else user.display_name)

    def names(self) -> dict[str, str]:
        """Display names by user id."""
        return {user.user_id: user.display_name for user in self._identities.list_all()}

    def bucket_document(self, bucket: Bucket) -> str:
        """The ACL of a bucket; its owner's alone where ACLs are switched off."""
        names = self.names()
        acl = None if bucket.ownership == ENFORCED else bucket.acl
        owner = Owner(bucket.owner, names.get(bucket.owner, ""))
        return acls.write_acl(owner, acls.grants_of(acl, bucket.owner), names)


def check_acl(acl: Acl, bucket: Bucket) -> None:
    """Raise S3Error unless the bucket's settings allow it: AccessControlListNotSupported, AccessDenied."""
    if bucket.ownership == ENFORCED and not _says_what_holds(acl, bucket.owner):
        raise S3Error("AccessControlListNotSupported")
    blocked = bucket.public_access is not None and bucket.public_access.block_public_acls
    if blocked and acls.is_public(acl):
        raise S3Error("AccessDenied", "Public ACLs are blocked on this bucket (BlockPublicAcls).")


def _says_what_holds(acl: Acl, owner: str) -> bool:
    """Where ACLs are switched off: that the bucket's owner, who has full control, has it."""
    return acl.canned == "bucket-owner-full-control" or acl.grants == (Grant(owner, "FULL_CONTROL"),)


def kept(acl: Acl | None) -> Acl | None:
    """As it is stored: None is what `private` says already."""
    return None if acl == Acl() else acl


def kept_on_bucket(acl: Acl) -> Acl | None:
    """The same for a bucket, of which the canned ACLs about a bucket's owner say nothing."""
    return None if acl.canned.startswith("bucket-owner-") else kept(acl)


def _resolved(grant: Grant, ids: set[str], addresses: dict[str, str]) -> Grant:
    name = grant.grantee
    if name.startswith(acls.MAILTO):
        found = addresses.get(name.removeprefix(acls.MAILTO).lower())
        if found is None:
            raise S3Error("UnresolvableGrantByEmailAddress")
        return replace(grant, grantee=found)
    if name not in acls.GROUPS and name not in ids:
        argument = {"ArgumentName": "CanonicalUser/ID", "ArgumentValue": name[:256]}
        raise S3Error("InvalidArgument", "Invalid id", extra=argument)
    return grant
