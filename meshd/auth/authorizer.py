"""Authorizer: admits or refuses S3 operations.

Root may do everything, a bucket's owner everything in it, others what policies and ACLs allow. An
explicit deny wins, and a key's bounds limit what its user may do. The authorizer decides from tables
alone, before a byte of the body is read; it looks an object's record up only when nothing else allows
the request or a policy asks for its tags. A request that names another expected bucket owner is refused
first.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-owner-condition.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from meshd.auth import acls
from meshd.auth.identity import NO_CONTEXT
from meshd.auth.policy_evaluator import NOTHING_ALLOWS, PolicyEvaluator, access_denied, is_owner
from meshd.auth.required_actions import (
    RequiredAction,
    copied_tag_actions,
    delete_actions,
    required_actions,
    tag_facts,
)
from meshd.util.async_tasks import CooperativeYield
from meshd.util.clock import SystemClock
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.result_types import DeleteFailure
from meshwire.s3.xml_documents import DeleteKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.auth.identity import Caller, FindRecord, Identity, RequestContext
    from meshd.auth.policy_evaluator import BulkAccess
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.util.clock import Clock
    from meshwire.iam.compiled_policies import Values
    from meshwire.s3.operations import Operation


_EXPECTED_OWNER: Final = "x-amz-expected-bucket-owner"
_EXPECTED_SOURCE_OWNER: Final = "x-amz-source-expected-bucket-owner"
EXPECTED_OWNER_HEADERS: Final = frozenset({_EXPECTED_OWNER, _EXPECTED_SOURCE_OWNER})


def check_expected_owner(buckets: BucketTable, operation: ops.Operation, headers: Mapping[str, str]) -> None:
    """Raise S3Error AccessDenied unless the buckets have the expected owners. Missing buckets are ignored."""
    if _EXPECTED_OWNER in headers and not isinstance(operation, ops.ListBuckets | ops.CreateBucket):
        _check_owner(buckets, operation.bucket, headers[_EXPECTED_OWNER])
    if _EXPECTED_SOURCE_OWNER in headers and isinstance(operation, ops.CopyObject | ops.UploadPartCopy):
        _check_owner(buckets, operation.source.bucket, headers[_EXPECTED_SOURCE_OWNER])


def _check_owner(buckets: BucketTable, name: str, expected: str) -> None:
    bucket = buckets.get(name)
    if bucket is not None and bucket.owner != expected.strip():
        raise S3Error("AccessDenied", "The bucket has another owner than the request expects.")


# Operations on exactly one bucket: its owner and root need no further check.
_ONE_BUCKET: Final = frozenset(
    kind
    for kind in get_args(ops.Operation)
    if kind not in {ops.ListBuckets, ops.CreateBucket, ops.CopyObject, ops.UploadPartCopy}
)
_HIDDEN: Final = frozenset({"NoSuchKey", "NoSuchVersion"})


def _no_records(bucket: str, key: str, version: str | None) -> None:
    return None


class Authorizer:
    """Admits or refuses operations. A check takes about a microsecond where no policy applies.

    `find` returns the record of an object or of a version, or None. Without it, no object has an ACL or tags.
    """

    def __init__(
        self,
        buckets: BucketTable,
        clock: Clock | None = None,
        find: FindRecord = _no_records,
    ) -> None:
        self._buckets, self._find = buckets, find
        self._judge = PolicyEvaluator(clock or SystemClock(), find)

    # --- whole operations -----------------------------------------------------------------------------

    def authorize(
        self,
        identity: Identity,
        operation: Operation,
        context: RequestContext = NO_CONTEXT,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Return if `identity` may run `operation`. Raises S3Error AccessDenied, NoSuchBucket.

        `tags` are those in the body of a PutObjectTagging. Without them, and where a policy asks for them,
        the operation is admitted for now: the code that reads the body must call this again.
        """
        if not EXPECTED_OWNER_HEADERS.isdisjoint(context.headers):
            check_expected_owner(self._buckets, operation, context.headers)
        if type(operation) in _ONE_BUCKET and not identity.bounds:
            bucket = self._existing(operation.bucket)  # type: ignore[union-attr]  # ListBuckets is not of them
            if identity.root:
                return
            if is_owner(identity, bucket) and not bucket.policy and not identity.policies:
                return
        self._authorize(identity, operation, context, tags)

    def _authorize(
        self,
        identity: Identity,
        operation: Operation,
        context: RequestContext,
        tags: Mapping[str, str] | None,
    ) -> None:
        if not isinstance(operation, ops.ListBuckets | ops.CreateBucket):
            self._existing(operation.bucket)
        wanted = required_actions(operation)
        if isinstance(operation, ops.PutObjectTagging):
            if tags is None and self.policies_use_request_tags(identity, operation.bucket):
                return
            wanted = tuple(need._replace(facts=tag_facts(tags)) for need in wanted)
        elif isinstance(operation, ops.CopyObject) and self._copies_tags(operation, context):
            wanted += copied_tag_actions(operation)
        elif isinstance(operation, ops.DeleteObjects):
            self._authorize_deletions(identity, operation)
        for need in wanted:
            self.require_action(identity, need, context, creating=isinstance(operation, ops.CreateBucket))

    def _copies_tags(self, operation: ops.CopyObject, context: RequestContext) -> bool:
        """Whether the copy takes over tags of its source that the request does not name."""
        source = operation.source
        if operation.tags is not None:
            return False
        record = context.find_record(self._find, source.bucket, source.key, source.version)
        return record is not None and bool(record.tags)

    def _authorize_deletions(self, identity: Identity, operation: ops.DeleteObjects) -> None:
        """Refuse a caller with no right to delete at all. Each key is authorized once the body is read."""
        bucket = self._existing(operation.bucket)
        hopeful = identity.root or identity.bounds or identity.policies or bucket.policy
        if hopeful or is_owner(identity, bucket):
            return
        if not acls.bucket_grants(bucket, identity.user_id, "s3:DeleteObject"):
            raise access_denied(identity, RequiredAction("s3:DeleteObject", bucket.name), NOTHING_ALLOWS)

    async def filter_deletions(
        self, identity: Identity, bucket: str, keys: Sequence[DeleteKey], context: RequestContext
    ) -> tuple[tuple[DeleteKey, ...], tuple[DeleteFailure, ...]]:
        """Return (the keys that `identity` may delete, the refusals of the others)."""
        if self.bulk_access(identity, "s3:DeleteObject", bucket, context).allows_all:
            return tuple(keys), ()
        allowed, failures, turn = list[DeleteKey](), list[DeleteFailure](), CooperativeYield()
        for entry in keys:
            try:
                for need in delete_actions(bucket, entry.key, entry.version, compared=entry.etag is not None):
                    self.require_action(identity, need, context)
                allowed.append(entry)
            except S3Error as error:
                if error.code != "AccessDenied":
                    raise
                failures.append(DeleteFailure(entry.key, error.code, error.message, entry.version or ""))
            await turn.yield_if_due()
        return tuple(allowed), tuple(failures)

    def require_action(
        self,
        identity: Identity,
        need: RequiredAction,
        context: RequestContext = NO_CONTEXT,
        *,
        creating: bool = False,
    ) -> None:
        """Return if `identity` may do the action. Raises S3Error AccessDenied, NoSuchBucket (unless
        `creating` it)."""
        bucket = self._existing(need.bucket) if need.bucket and not creating else None
        reason = self._judge.denial_reason(identity, need, bucket, context)
        if reason:
            raise access_denied(identity, need, reason)

    def _existing(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        return bucket

    # --- one action -----------------------------------------------------------------------------------

    def allows(
        self,
        identity: Identity,
        action: str,
        bucket: str,
        key: str = "",
        context: RequestContext = NO_CONTEXT,
        extra: Mapping[str, Values] | None = None,
        version: str | None = None,
    ) -> bool:
        """Whether `identity` may do `action` (`s3:GetObject`) to a bucket or a key in it. False where the
        bucket does not exist. `extra` holds facts by the lower-case name of their condition key."""
        found = self._buckets.get(bucket)
        if found is None:
            return False
        need = RequiredAction(action, bucket, key, version, extra or {})
        return not self._judge.denial_reason(identity, need, found, context)

    def require_prefix(self, caller: Caller, action: str, bucket: str, prefix: str = "") -> None:
        """Return if `caller` may do `action` to every key of the bucket that begins with `prefix`. Raises
        S3Error AccessDenied, NoSuchBucket."""
        need = RequiredAction(action, bucket, prefix)
        reason = self._judge.denial_reason_for_prefix(
            caller.identity, need, self._existing(bucket), caller.context
        )
        if reason:
            raise access_denied(caller.identity, RequiredAction(action, bucket, f"{prefix}*"), reason)

    def is_within_bounds(self, caller: Caller, need: RequiredAction) -> bool:
        """Whether the key's bounds allow an action that concerns no bucket and that any user may do."""
        return self._judge.is_within_bounds(caller.identity, need, caller.context)

    def may_count_tags(
        self, identity: Identity, operation: ops.GetObject, context: RequestContext = NO_CONTEXT
    ) -> bool:
        """Whether `identity` may learn how many tags an object has: it needs the right to read them."""
        action = "s3:GetObjectTagging" if operation.version is None else "s3:GetObjectVersionTagging"
        bucket, key = operation.bucket, operation.key
        return self.allows(identity, action, bucket, key, context, version=operation.version)

    def may_list_key(self, identity: Identity, bucket: str, key: str, context: RequestContext) -> bool:
        """Whether `identity` may learn that the key does not exist: it needs the right to list it."""
        found = self._buckets.get(bucket)
        return found is not None and self._judge.may_list_key(identity, found, key, context)

    def bulk_access(
        self, identity: Identity, action: str, name: str, context: RequestContext = NO_CONTEXT
    ) -> BulkAccess:
        """Return the keys of a bucket to which `identity` may do `action`. Raises S3Error NoSuchBucket."""
        return self._judge.bulk_access(identity, action, self._existing(name), context)

    def mask_missing_key(
        self, identity: Identity, operation: Operation, error: S3Error, context: RequestContext
    ) -> S3Error:
        """Return `error`, or AccessDenied for a caller who may not list and so must not learn that a key is
        missing."""
        if error.code not in _HIDDEN or isinstance(operation, ops.ListBuckets):
            return error
        place = operation.source if isinstance(operation, ops.CopyObject | ops.UploadPartCopy) else operation
        key = getattr(place, "key", "")
        if not key or self.may_list_key(identity, place.bucket, key, context):
            return error
        return access_denied(identity, RequiredAction("s3:ListBucket", place.bucket), NOTHING_ALLOWS)

    def policies_use_request_tags(self, identity: Identity, bucket: str) -> bool:
        """Whether any policy that applies uses the tags in a request."""
        policies = self._judge.applicable_policies(identity, self._buckets.get(bucket))
        return any(policy.uses_key_prefix("s3:requestobjecttag") for policy in policies)
