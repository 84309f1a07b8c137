"""Authorization of a running job: the principal that started it and the rights that principal has now.

Law: rights are re-evaluated while the job runs. Disabling a key or narrowing its policies stops its
jobs; work that started under outdated rights is cancelled and restarts under the current ones, or not
at all. Invariant: a job never has more rights than the credentials that started it. Temporary
credentials keep their limits but not their expiry.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.auth.identity import Caller, Identity, RequestContext, Session
from meshd.control.jobs import Principal
from meshd.core.api_errors import BatchError
from meshwire.iam import parse_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.policy_evaluator import BulkAccess
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.identities import IdentityTable
    from meshwire.jobs.job_spec import JobSpec


def capture_principal(caller: Caller) -> Principal:
    """Return what is stored about the caller who starts a job."""
    identity, context = caller.identity, caller.context
    session = identity.session
    return Principal(
        identity.user_id,
        identity.access_key,
        session.parent if session else "",
        session.name if session else "",
        session.policies if session else (),
        context.source_ip,
        context.secure,
        context.tls,
        session.issued if session else 0,
        session.rounds if session else (0, 0),
    )


def is_same_credential(identity: Identity, principal: Principal) -> bool:
    """Return whether a caller has the key that started a job, with the same session policies."""
    key = principal.parent or principal.access_key
    policies = identity.session.policies if identity.session else ()
    return (identity.account, policies) == (key, principal.policies)


def resolve_caller(principal: Principal, table: IdentityTable) -> Caller:
    """Return the principal as a caller with its present rights.

    Raises BatchError AccessDenied if the key is gone or the session was revoked.
    """
    signer = table.find_principal(principal.parent or principal.access_key)
    if signer is None or signer.user.user_id != principal.user_id:
        raise BatchError(
            "AccessDenied",
            f"the key {principal.parent or principal.access_key} that started this job is not valid any more",
            help="start the job again with another key",
        )
    identity = Identity.from_signer(signer)
    if principal.parent and (principal.rounds != signer.rounds or principal.issued < signer.sessions_from):
        raise BatchError(
            "AccessDenied",
            "the temporary credentials that started this job were revoked",
            help="start the job again with new credentials",
        )
    if principal.parent:
        session = Session(principal.parent, 0, principal.session, principal.policies)
        bounds = tuple(parse_policy(text, kind="identity") for text in principal.policies)
        identity = identity.with_session(session, principal.access_key, bounds)
    context = RequestContext(source_ip=principal.source_ip, secure=principal.secure, tls=principal.tls)
    return Caller(identity, context)


class BucketGrant(msgspec.Struct, frozen=True):
    """What a job may do with the keys of one bucket."""

    bucket: str
    action: str
    rights: BulkAccess

    @classmethod
    def for_bucket(cls, access: Authorizer, caller: Caller, action: str, bucket: str) -> BucketGrant:
        """Return the caller's present grant. Raises S3Error NoSuchBucket."""
        return cls(bucket, action, access.bulk_access(caller.identity, action, bucket, caller.context))

    def require_access(self, key: str) -> None:
        """Raises BatchError AccessDenied if the grant does not cover the key."""
        if not self.rights.allows_key(key):
            raise BatchError(
                "AccessDenied",
                f"this key may not do {self.action} on s3://{self.bucket}/{key}",
                help="add the permission to the key that starts the job",
            )


_LOOK: Final = 1.0  # seconds between two checks


@dataclass(frozen=True, slots=True)
class AuthorizationSnapshot:
    """Compares equal as long as nothing changes that rights depend on.

    `rights`: those of the job's user. `buckets`: the access settings of source and target; None for a bucket
    that does not exist.
    """

    caller: Caller = field(compare=False)
    rights: tuple[object, ...]
    buckets: tuple[tuple[object, ...] | None, ...]


def snapshot_authorization(
    principal: Principal, spec: JobSpec, identities: IdentityTable, buckets: BucketTable
) -> AuthorizationSnapshot:
    """Return the present snapshot.

    Raises BatchError AccessDenied if the key is gone or the session was revoked.
    """
    caller = resolve_caller(principal, identities)
    names = (spec.source.bucket, spec.target.bucket)
    return AuthorizationSnapshot(
        caller, _rights(principal, identities), tuple(_access_settings(buckets.get(name)) for name in names)
    )


def _rights(principal: Principal, identities: IdentityTable) -> tuple[object, ...]:
    """Return the stored form of the rights, because parsed policies compare equal only to themselves."""
    signer = identities.find_principal(principal.parent or principal.access_key)
    if signer is None:
        return ()
    user, key = signer.user.policies, signer.key.policies
    return (signer.user.root, user, key, *[identities.policies().get(name) for name in (*user, *key)])


def _access_settings(bucket: Bucket | None) -> tuple[object, ...] | None:
    if bucket is None:
        return None
    said = (bucket.policy, bucket.acl, bucket.public_access, bucket.ownership)
    return (bucket.created_ms, bucket.owner, *said)


async def run_while_authorized(
    work: Coroutine[Any, Any, None], look: Callable[[], AuthorizationSnapshot], began: AuthorizationSnapshot
) -> bool:
    """Run the work while the authorization stays as it `began`; cancel it when that changes.

    Returns whether the work finished. Raises as the work and `look` do.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=_LOOK))[0]:
            if look() != began:
                return False
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return True
