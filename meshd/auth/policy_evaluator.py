"""Policy evaluation: bounds, user policies, bucket policy, ownership and ACLs, in this order.

A deny wins, and an ACL counts only when nothing else allows the action. Root without bounds is never
refused, and a bucket's owner can always read and replace its policy. A compiled policy belongs to one
value of a bucket, so a policy change takes effect at once; a policy that cannot be parsed denies
everything. BulkAccess evaluates what does not depend on the key once and agrees with the authorizer on
every key.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.auth import acls
from meshd.auth.request_facts import RequestFacts
from meshd.auth.required_actions import RequiredAction
from meshwire.errors import S3Error
from meshwire.iam import (
    AccessRequest,
    PolicyError,
    allows_whole_prefix,
    evaluate,
    evaluate_statements,
    is_public_policy,
    matching_statements,
    may_deny_in_prefix,
    parse_policy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from meshd.auth.identity import FindRecord, Identity, RequestContext
    from meshd.control.buckets import Bucket
    from meshd.util.clock import Clock
    from meshwire.iam import Policy


_log = logging.getLogger("meshd.auth")
_MOST: Final = 4096
_CLOSED: Final = parse_policy(
    '{"Version": "2012-10-17", "Statement":'
    ' {"Effect": "Deny", "Principal": "*", "Action": "*", "NotResource": "arn:aws:s3:::-"}}',
    kind="bucket",
    bucket="-",
)


class PolicyCache:
    """Caches the compiled policy of each bucket. One instance per process."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Bucket, Policy]] = {}

    def __repr__(self) -> str:
        return f"<PolicyCache of {len(self._known)} buckets>"

    def compiled_policy(self, bucket: Bucket) -> Policy:
        """Return the compiled policy of a bucket that has one."""
        known = self._known.get(bucket.name)
        if known is not None and known[0] is bucket:
            return known[1]
        if len(self._known) >= _MOST:
            self._known.clear()
        policy = (
            known[1]
            if known is not None and known[0].policy == bucket.policy
            else _parse_bucket_policy(bucket)
        )
        self._known[bucket.name] = (bucket, policy)
        return policy


def _parse_bucket_policy(bucket: Bucket) -> Policy:
    try:
        return parse_policy(bucket.policy, kind="bucket", bucket=bucket.name)
    except PolicyError as error:
        _log.error("the policy of bucket %s cannot be parsed; it denies everything: %s", bucket.name, error)
        return _CLOSED


_PER_KEY: Final = "s3:existingobjecttag/"
# Variables that have the same value in every request of a user, or that no resource pattern uses.
_STEADY: Final = frozenset({"aws:username", "aws:userid", "aws:principalarn"})


class BulkAccess:
    """Answers for many keys of one bucket whether an action is allowed. With `everything` every key is, and
    no key needs a check. `policies_only` is False once an answer depends on more than policies."""

    def __init__(
        self,
        slow: Callable[[str], bool],
        *,
        everything: bool = False,
        fast: NarrowedPolicies | None = None,
    ) -> None:
        self._slow, self._fast = slow, fast
        self.allows_all = everything
        self.policies_only = fast is not None

    def __repr__(self) -> str:
        return f"<BulkAccess everything={self.allows_all} settled={self.policies_only}>"

    @property
    def cache_key(self) -> Hashable | None:
        """A key under which the answers may be cached; None if they hold for this request only."""
        return None if self._fast is None or not self.policies_only else self._fast.cache_key

    def allows_key(self, key: str) -> bool:
        if self.allows_all:
            return True
        verdict = None if self._fast is None else self._fast.allows_key(key)
        if verdict is None:
            self.policies_only = False
            return self._slow(key)
        return verdict


class NarrowedPolicies:
    """The policy statements that remain once action, principal and conditions are evaluated."""

    def __init__(
        self,
        question: AccessRequest,
        bounds: tuple[Policy, ...],
        own: tuple[Policy, ...],
        policy: Policy | None,
        *,
        owner: bool,
        root: bool,
        restricted: bool,
    ) -> None:
        self._question = question
        self._prefix = question.resource + "/"
        self._bounds = tuple(matching_statements((bound,), question) for bound in bounds)
        self._own = matching_statements(own, question)
        self._policy = () if policy is None else matching_statements((policy,), question)
        self._owner, self._root, self._restricted = owner, root, restricted

    @property
    def cache_key(self) -> Hashable | None:
        """A value that is equal for equal answers; None if a resource has a variable that may change."""
        statements = [*self._own, *self._policy, *(each for bound in self._bounds for each in bound)]
        if any(glob.variables - _STEADY for each in statements for glob in each.resources.globs):
            return None
        return (
            (self._question.principal, self._owner, self._root, self._restricted),
            self._bounds,
            self._own,
            self._policy,
        )

    def allows_key(self, key: str) -> bool | None:
        """Whether a key is allowed; None if no policy decides and an ACL might."""
        asked = self._question
        question = AccessRequest(asked.action, self._prefix + key, asked.principal, asked.context)
        if any(evaluate_statements(bound, question) != "allow" for bound in self._bounds):
            return False
        if self._root:
            return True
        own, policy = evaluate_statements(self._own, question), evaluate_statements(self._policy, question)
        if "deny" in (own, policy):
            return False
        allowed = self._owner or own == "allow" or (policy == "allow" and not self._restricted)
        return True if allowed else None


def depends_on_keys(policies: tuple[Policy, ...]) -> bool:
    """Whether a policy depends on something that differs from key to key, other than the key's name."""
    return any(policy.uses_key_prefix(_PER_KEY) for policy in policies)


_RESCUE: Final = frozenset({"s3:GetBucketPolicy", "s3:PutBucketPolicy", "s3:DeleteBucketPolicy"})
NOTHING_ALLOWS: Final = "nothing allows it"
_NODE_ACTION_PREFIX: Final = "mesh:"  # actions on the node itself: the user's policies must allow them


class PolicyEvaluator:
    """Evaluates one action. One instance per process; each call brings the tables that it reads."""

    def __init__(self, clock: Clock, find: FindRecord) -> None:
        self._clock, self._find = clock, find
        self._policies = PolicyCache()

    def __repr__(self) -> str:
        return f"<PolicyEvaluator {self._policies!r}>"

    def applicable_policies(self, identity: Identity, bucket: Bucket | None) -> tuple[Policy, ...]:
        """Return every policy that applies."""
        own = () if identity.root else identity.policies
        policy = None if bucket is None else self._policy(bucket)
        return (*identity.bounds, *own, *(() if policy is None else (policy,)))

    def denial_reason(
        self, identity: Identity, need: RequiredAction, bucket: Bucket | None, context: RequestContext
    ) -> str:
        """Return why the action is denied; empty if it is allowed. `bucket` is None where the action concerns
        no bucket, or one that does not exist yet."""
        question = self._question(identity, need, bucket, context)
        if not _is_within_bounds(identity, question):
            return "the policies of the signing key do not allow it"
        if identity.root:
            return ""
        own = evaluate(identity.policies, question)
        if own == "deny":
            return "a policy of the user denies it"
        if need.action.startswith(_NODE_ACTION_PREFIX):
            return "" if own == "allow" else NOTHING_ALLOWS
        if bucket is None:
            return "" if identity.user_id else "the request must be signed"
        policy = self._policy(bucket)
        verdict = "none" if policy is None else evaluate((policy,), question)
        owner = is_owner(identity, bucket)
        if verdict == "deny" and not (owner and need.action in _RESCUE):
            return "the bucket's policy denies it"
        if owner or own == "allow":
            return ""
        if verdict == "allow" and policy is not None and not _is_restricted(bucket, policy):
            return ""
        return "" if self._acl_grants(identity, need, bucket, context) else NOTHING_ALLOWS

    def bulk_access(
        self, identity: Identity, action: str, bucket: Bucket, context: RequestContext
    ) -> BulkAccess:
        """Return the keys of a bucket to which `identity` may do `action`."""
        policy, owner = self._policy(bucket), is_owner(identity, bucket)
        own = () if identity.root else identity.policies

        def slow(key: str) -> bool:
            return not self.denial_reason(identity, RequiredAction(action, bucket.name, key), bucket, context)

        if not identity.bounds and (identity.root or (owner and policy is None and not own)):
            return BulkAccess(slow, everything=True)
        if depends_on_keys(self.applicable_policies(identity, bucket)):
            return BulkAccess(slow)
        fast = NarrowedPolicies(
            self._question(identity, RequiredAction(action, bucket.name), bucket, context),
            identity.bounds,
            own,
            policy,
            owner=owner,
            root=identity.root,
            restricted=policy is not None and _is_restricted(bucket, policy),
        )
        return BulkAccess(slow, fast=fast)

    def is_within_bounds(self, identity: Identity, need: RequiredAction, context: RequestContext) -> bool:
        """Whether each bound of the key allows an action that concerns no bucket."""
        return _is_within_bounds(identity, self._question(identity, need, None, context))

    def denial_reason_for_prefix(
        self, identity: Identity, need: RequiredAction, bucket: Bucket, context: RequestContext
    ) -> str:
        """Return why `identity` may not do the action to every key that begins with `need.key`; empty if it
        may. ACLs of single objects do not count."""
        asked = self._question(identity, need, bucket, context)
        question = replace(asked, resource=f"arn:aws:s3:::{need.bucket}/{need.key}")
        for bound in identity.bounds:
            if not allows_whole_prefix((bound,), question):
                return "the policies of the signing key do not allow every key"
            if may_deny_in_prefix((bound,), question):
                return "the policies of the signing key deny some keys"
        if identity.root:
            return ""
        if may_deny_in_prefix(identity.policies, question):
            return "a policy of the user denies some keys"
        policy = self._policy(bucket)
        if policy is not None and may_deny_in_prefix((policy,), question):
            return "the bucket's policy denies some keys"
        if is_owner(identity, bucket) or allows_whole_prefix(identity.policies, question):
            return ""
        if (
            policy is not None
            and allows_whole_prefix((policy,), question)
            and not _is_restricted(bucket, policy)
        ):
            return ""
        return "nothing allows it on every key"

    def may_list_key(self, identity: Identity, bucket: Bucket, key: str, context: RequestContext) -> bool:
        """Whether `identity` may learn that the key does not exist: it needs the right to list it."""
        need = RequiredAction("s3:ListBucket", bucket.name, facts={"s3:prefix": key})
        return not self.denial_reason(identity, need, bucket, context)

    def _question(
        self, identity: Identity, need: RequiredAction, bucket: Bucket | None, context: RequestContext
    ) -> AccessRequest:
        facts = RequestFacts(identity, need, bucket, context, self._clock.now_ms(), self._find)
        return AccessRequest(need.action, need.resource, identity.user_id, facts)

    def _policy(self, bucket: Bucket) -> Policy | None:
        return self._policies.compiled_policy(bucket) if bucket.policy else None

    def _acl_grants(
        self, identity: Identity, need: RequiredAction, bucket: Bucket, context: RequestContext
    ) -> bool:
        """Whether the ACLs of the bucket or the object grant the action."""
        writing = "s3:objectcreationoperation" in need.facts
        if acls.bucket_grants(bucket, identity.user_id, need.action, writing=writing):
            return True
        if need.action not in acls.OBJECT_ACL_PERMISSIONS:
            return False
        record = context.find_record(self._find, need.bucket, need.key, need.version)
        if record is not None:
            return acls.object_grants(bucket, record, identity.user_id, need.action)
        return need.action in acls.READ_ACTIONS and self.may_list_key(identity, bucket, need.key, context)


def _is_within_bounds(identity: Identity, question: AccessRequest) -> bool:
    return all(evaluate((bound,), question) == "allow" for bound in identity.bounds)


def is_owner(identity: Identity, bucket: Bucket) -> bool:
    """Whether the bucket belongs to the caller. An anonymous caller owns nothing."""
    return identity.user_id == bucket.owner and identity.user_id != ""


def _is_restricted(bucket: Bucket, policy: Policy) -> bool:
    """Whether a public policy counts for the bucket's owner only (RestrictPublicBuckets)."""
    block = bucket.public_access
    return block is not None and block.restrict_public_buckets and is_public_policy(policy)


def access_denied(identity: Identity, need: RequiredAction, reason: str) -> S3Error:
    """Return AccessDenied; it names the missing permission if the request was signed."""
    if not identity.user_id:
        return S3Error("AccessDenied")
    what = f"{need.action} on {need.resource}"
    return S3Error("AccessDenied", f"{identity.user_id} may not do {what}: {reason}.")
