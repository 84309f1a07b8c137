"""Bucket settings: versioning, tags, lifecycle, CORS, policy, public access, ownership and ACL.

A document is parsed completely before anything changes; the bucket table resolves concurrent updates. A
setting that cannot be applied is refused, never stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshd.auth.acls import BUCKET_OWNER_ENFORCED, check_acl, stored_bucket_acl
from meshwire.errors import S3Error
from meshwire.iam import PolicyError, is_public_policy, parse_policy
from meshwire.iam.parse import MAX_POLICY_BYTES
from meshwire.s3 import lifecycle_xml, listings, settings_xml
from meshwire.s3 import settings_xml as docs
from meshwire.s3.acl_xml import effective_grants, is_public_acl
from meshwire.s3.bucket_settings import PublicAccessBlock
from meshwire.s3.result_types import SettingDocument, SettingStored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.auth.acls import AclService
    from meshd.control.buckets import Bucket, BucketTable
    from meshwire.iam import Policy
    from meshwire.s3.bucket_settings import BucketSetting
    from meshwire.s3.operations import DeleteBucketSetting, GetBucketSetting, PutBucketSetting

    Change = Callable[[Bucket], Bucket]


class SettingService:
    """The use cases of bucket settings. One per process."""

    def __init__(self, table: BucketTable, acls: AclService) -> None:
        self._table, self._acls = table, acls

    def get_setting(self, operation: GetBucketSetting) -> SettingDocument:
        """Return a setting's document. Raises S3Error: S3's own code for a setting that was never made."""
        bucket = self._existing(operation.bucket)
        if operation.setting == "acl":
            return SettingDocument(self._acls.bucket_document(bucket).encode())
        reader = _READERS.get(operation.setting)
        return (
            SettingDocument(docs.unset_setting_document(operation.setting))
            if reader is None
            else reader(bucket)
        )

    async def put_setting(self, operation: PutBucketSetting, body: bytes) -> SettingStored:
        """Store a setting; it is durable on return. Raises S3Error."""
        if operation.setting == "acl":
            change = self._put_acl(operation, body)
        else:
            change = _WRITERS[operation.setting](body)
        await self._change(operation.bucket, change)
        return SettingStored()

    async def delete_setting(self, operation: DeleteBucketSetting) -> SettingStored:
        """Remove a setting; succeeds if it was never set."""
        change = _REMOVERS.get(operation.setting, _leave_unchanged)
        await self._change(operation.bucket, change)
        return SettingStored()

    def _put_acl(self, operation: PutBucketSetting, body: bytes) -> Change:
        acl = self._acls.parse_request(operation.acl, body, self._existing(operation.bucket).owner)

        def change(bucket: Bucket) -> Bucket:
            check_acl(acl, bucket)
            return replace(bucket, acl=stored_bucket_acl(acl))

        return change

    def _existing(self, name: str) -> Bucket:
        bucket = self._table.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return bucket

    async def _change(self, name: str, change: Change) -> None:
        if await self._table.update(name, change) is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})


def _leave_unchanged(bucket: Bucket) -> Bucket:
    return bucket


# --- versioning -----------------------------------------------------------------------------------------


def _get_versioning(bucket: Bucket) -> SettingDocument:
    return SettingDocument(docs.versioning_document(bucket.versioning))


def _put_versioning(body: bytes) -> Change:
    status = docs.parse_versioning(body)
    return lambda bucket: replace(bucket, versioning=status)


# --- tags -------------------------------------------------------------------------------------------------


def _get_tagging(bucket: Bucket) -> SettingDocument:
    if not bucket.tags:
        raise S3Error("NoSuchTagSet", extra={"BucketName": bucket.name})
    return SettingDocument(listings.root_element("Tagging", settings_xml.tag_elements(bucket.tags)).encode())


def _put_tagging(body: bytes) -> Change:
    if not body.strip():
        raise S3Error("MissingRequestBodyError")
    tags = settings_xml.parse_tagging(body, settings_xml.BUCKET_TAGS)
    return lambda bucket: replace(bucket, tags=tags or None)


# --- lifecycle --------------------------------------------------------------------------------------------


def _get_lifecycle(bucket: Bucket) -> SettingDocument:
    if not bucket.lifecycle:
        raise S3Error("NoSuchLifecycleConfiguration", extra={"BucketName": bucket.name})
    return SettingDocument(lifecycle_xml.lifecycle_document(bucket.lifecycle))


def _put_lifecycle(body: bytes) -> Change:
    rules = lifecycle_xml.parse_lifecycle(body)
    return lambda bucket: replace(bucket, lifecycle=rules)


# --- CORS -------------------------------------------------------------------------------------------------


def _get_cors(bucket: Bucket) -> SettingDocument:
    if not bucket.cors:
        raise S3Error("NoSuchCORSConfiguration", extra={"BucketName": bucket.name})
    return SettingDocument(docs.cors_document(bucket.cors))


def _put_cors(body: bytes) -> Change:
    rules = docs.parse_cors(body)
    return lambda bucket: replace(bucket, cors=rules)


# --- policies -----------------------------------------------------------------------------------------------


def _get_policy(bucket: Bucket) -> SettingDocument:
    if not bucket.policy:
        raise S3Error("NoSuchBucketPolicy", extra={"BucketName": bucket.name})
    return SettingDocument(bucket.policy.encode(), "application/json")


def _put_policy(body: bytes) -> Change:
    """Store a policy exactly as it was sent: clients compare it with what they read back."""
    if not body.strip():
        raise S3Error("MissingRequestBodyError")
    if len(body) > MAX_POLICY_BYTES:
        raise S3Error("PolicyTooLarge")

    def change(bucket: Bucket) -> Bucket:
        policy = _read_policy(body, bucket.name)
        blocked = bucket.public_access is not None and bucket.public_access.block_public_policy
        if blocked and is_public_policy(policy):
            raise S3Error("AccessDenied", "Public policies are blocked on this bucket (BlockPublicPolicy).")
        return replace(bucket, policy=body.decode())

    return change


def _read_policy(text: str | bytes, bucket: str) -> Policy:
    try:
        return parse_policy(text, kind="bucket", bucket=bucket)
    except PolicyError as error:
        raise S3Error("MalformedPolicy" if error.supported else "NotImplemented", str(error)) from None


def _get_policy_status(bucket: Bucket) -> SettingDocument:
    """Report whether anything makes the bucket public: its policy, or an ACL in force."""
    block = bucket.public_access or PublicAccessBlock()
    by_acl = (
        is_public_acl(bucket.acl)
        and bucket.ownership != BUCKET_OWNER_ENFORCED
        and not block.ignore_public_acls
    )
    by_policy = bool(bucket.policy) and is_public_policy(_read_policy(bucket.policy, bucket.name))
    return SettingDocument(docs.policy_status_document(public=by_acl or by_policy))


# --- access -----------------------------------------------------------------------------------------------


def _get_public_access(bucket: Bucket) -> SettingDocument:
    if bucket.public_access is None:
        raise S3Error("NoSuchPublicAccessBlockConfiguration", extra={"BucketName": bucket.name})
    return SettingDocument(docs.public_access_document(bucket.public_access))


def _put_public_access(body: bytes) -> Change:
    block = docs.parse_public_access(body)
    return lambda bucket: replace(bucket, public_access=block)


def _get_ownership(bucket: Bucket) -> SettingDocument:
    if not bucket.ownership:
        raise S3Error("OwnershipControlsNotFoundError", extra={"BucketName": bucket.name})
    return SettingDocument(docs.ownership_document(bucket.ownership))


def _put_ownership(body: bytes) -> Change:
    value = docs.parse_ownership(body)

    def change(bucket: Bucket) -> Bucket:
        """Refuse to switch ACLs off while one grants rights to others, who would lose them silently."""
        others = [g for g in effective_grants(bucket.acl, bucket.owner) if g.grantee != bucket.owner]
        if value == BUCKET_OWNER_ENFORCED and others:
            raise S3Error("InvalidBucketAclWithObjectOwnership")
        return replace(bucket, ownership=value)

    return change


_READERS: Mapping[BucketSetting, Callable[[Bucket], SettingDocument]] = {
    "cors": _get_cors,
    "lifecycle": _get_lifecycle,
    "ownershipControls": _get_ownership,
    "policy": _get_policy,
    "policyStatus": _get_policy_status,
    "publicAccessBlock": _get_public_access,
    "tagging": _get_tagging,
    "versioning": _get_versioning,
}
_WRITERS: Mapping[BucketSetting, Callable[[bytes], Change]] = {
    "cors": _put_cors,
    "lifecycle": _put_lifecycle,
    "ownershipControls": _put_ownership,
    "policy": _put_policy,
    "publicAccessBlock": _put_public_access,
    "tagging": _put_tagging,
    "versioning": _put_versioning,
}
_REMOVERS: Mapping[BucketSetting, Change] = {
    "cors": lambda bucket: replace(bucket, cors=()),
    "lifecycle": lambda bucket: replace(bucket, lifecycle=()),
    "ownershipControls": lambda bucket: replace(bucket, ownership=""),
    "policy": lambda bucket: replace(bucket, policy=""),
    "publicAccessBlock": lambda bucket: replace(bucket, public_access=None),
    "tagging": lambda bucket: replace(bucket, tags=None),
}
