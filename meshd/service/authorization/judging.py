"""One need of one request, judged: bounds, policies, ownership, ACLs, in this order.

Law: a deny wins; what a key's bounds do not allow, its user cannot do with it; an ACL is asked when nothing
else allows. Invariant: root without bounds is refused nothing, and a bucket's owner can always get at its
policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.service.authorization import granting
from meshd.service.authorization.compiling import CompiledPolicies
from meshd.service.authorization.facts import Facts
from meshd.service.authorization.permissions import Need
from meshd.service.authorization.rights import Narrowed, Rights, depends_on_keys
from meshwire.policies import Question, covers_every, decide, denies_some, is_public
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Identity, RequestContext
    from meshd.service.authorization.facts import Find
    from meshwire.policies import Policy

_RESCUE: Final = frozenset({"s3:GetBucketPolicy", "s3:PutBucketPolicy", "s3:DeleteBucketPolicy"})
NOTHING_ALLOWS: Final = "nothing allows it"
_NODES_OWN: Final = "mesh:"  # actions on the node itself: a policy of the user must allow them


class Judge:
    """One per process; the tables it reads are handed in with each question."""

    def __init__(self, clock: Clock, find: Find) -> None:
        self._clock, self._find = clock, find
        self._policies = CompiledPolicies()

    def __repr__(self) -> str:
        return f"<Judge {self._policies!r}>"

    def policies(self, identity: Identity, bucket: Bucket | None) -> tuple[Policy, ...]:
        """Every policy that counts."""
        own = () if identity.root else identity.policies
        policy = None if bucket is None else self._policy(bucket)
        return (*identity.bounds, *own, *(() if policy is None else (policy,)))

    def reason(self, identity: Identity, need: Need, bucket: Bucket | None, context: RequestContext) -> str:
        """Why not; empty if `identity` may. `bucket` is None for what is about none, or not there yet."""
        question = self._question(identity, need, bucket, context)
        if not _is_within_bounds(identity, question):
            return "the policies of the key it was signed with do not allow it"
        if identity.root:
            return ""
        own = decide(identity.policies, question)
        if own == "deny":
            return "a policy of the user denies it"
        if need.action.startswith(_NODES_OWN):
            return "" if own == "allow" else NOTHING_ALLOWS
        if bucket is None:
            return "" if identity.user_id else "it must be signed"
        policy = self._policy(bucket)
        verdict = "none" if policy is None else decide((policy,), question)
        owner = owns(identity, bucket)
        if verdict == "deny" and not (owner and need.action in _RESCUE):
            return "the bucket's policy denies it"
        if owner or own == "allow":
            return ""
        if verdict == "allow" and policy is not None and not _is_restricted(bucket, policy):
            return ""
        return "" if self._granted(identity, need, bucket, context) else NOTHING_ALLOWS

    def rights(self, identity: Identity, action: str, bucket: Bucket, context: RequestContext) -> Rights:
        """What `identity` may do `action` to, for many keys of one bucket."""
        policy, owner = self._policy(bucket), owns(identity, bucket)
        own = () if identity.root else identity.policies

        def slow(key: str) -> bool:
            return not self.reason(identity, Need(action, bucket.name, key), bucket, context)

        if not identity.bounds and (identity.root or (owner and policy is None and not own)):
            return Rights(slow, everything=True)
        if depends_on_keys(self.policies(identity, bucket)):
            return Rights(slow)
        fast = Narrowed(
            self._question(identity, Need(action, bucket.name), bucket, context),
            identity.bounds,
            own,
            policy,
            owner=owner,
            root=identity.root,
            restricted=policy is not None and _is_restricted(bucket, policy),
        )
        return Rights(slow, fast=fast)

    def is_within_bounds(self, identity: Identity, need: Need, context: RequestContext) -> bool:
        """Whether each bound of the key allows what is about no bucket."""
        return _is_within_bounds(identity, self._question(identity, need, None, context))

    def reason_against_all(
        self, identity: Identity, need: Need, bucket: Bucket, context: RequestContext
    ) -> str:
        """Why `identity` may not do it to every key of the bucket that begins with the need's; empty if it
        may. ACLs of single objects do not count."""
        asked = self._question(identity, need, bucket, context)
        question = replace(asked, resource=f"arn:aws:s3:::{need.bucket}/{need.key}")
        for bound in identity.bounds:
            if not covers_every((bound,), question):
                return "the policies of the key it was signed with do not allow every key"
            if denies_some((bound,), question):
                return "the policies of the key it was signed with deny some keys"
        if identity.root:
            return ""
        if denies_some(identity.policies, question):
            return "a policy of the user denies some keys"
        policy = self._policy(bucket)
        if policy is not None and denies_some((policy,), question):
            return "the bucket's policy denies some keys"
        if owns(identity, bucket) or covers_every(identity.policies, question):
            return ""
        if policy is not None and covers_every((policy,), question) and not _is_restricted(bucket, policy):
            return ""
        return "nothing allows it on every key"

    def may_know(self, identity: Identity, bucket: Bucket, key: str, context: RequestContext) -> bool:
        """Whether `identity` may learn that there is no such key: whoever may list it."""
        need = Need("s3:ListBucket", bucket.name, facts={"s3:prefix": key})
        return not self.reason(identity, need, bucket, context)

    def _question(
        self, identity: Identity, need: Need, bucket: Bucket | None, context: RequestContext
    ) -> Question:
        facts = Facts(identity, need, bucket, context, self._clock.now_ms(), self._find)
        return Question(need.action, need.resource, identity.user_id, facts)

    def _policy(self, bucket: Bucket) -> Policy | None:
        return self._policies.of(bucket) if bucket.policy else None

    def _granted(self, identity: Identity, need: Need, bucket: Bucket, context: RequestContext) -> bool:
        """What ACLs say."""
        writing = "s3:objectcreationoperation" in need.facts
        if granting.bucket_grants(bucket, identity.user_id, need.action, writing=writing):
            return True
        if need.action not in granting.ON_OBJECT:
            return False
        record = self._find(need.bucket, need.key, need.version)
        if record is not None:
            return granting.object_grants(bucket, record, identity.user_id, need.action)
        return need.action in granting.READING and self.may_know(identity, bucket, need.key, context)


def _is_within_bounds(identity: Identity, question: Question) -> bool:
    return all(decide((bound,), question) == "allow" for bound in identity.bounds)


def owns(identity: Identity, bucket: Bucket) -> bool:
    """Whether the bucket is the caller's own. Nobody owns nothing."""
    return identity.user_id == bucket.owner and identity.user_id != ""


def _is_restricted(bucket: Bucket, policy: Policy) -> bool:
    """Whether a public policy counts for the bucket's owner alone (RestrictPublicBuckets)."""
    block = bucket.public_access
    return block is not None and block.restrict_public_buckets and is_public(policy)


def refusal(identity: Identity, need: Need, reason: str) -> S3Error:
    """AccessDenied; who signed is told what is missing."""
    if not identity.user_id:
        return S3Error("AccessDenied")
    what = f"{need.action} on {need.resource}"
    return S3Error("AccessDenied", f"{identity.user_id} may not do {what}: {reason}.")
