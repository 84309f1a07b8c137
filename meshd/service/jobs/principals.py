"""Whose rights a job has, hours after the request that started it.

Law: rights are looked up when they are used: a key that was disabled, or may do less, stops its jobs.
Invariant: a job never has more than the credentials that started it; temporary ones keep their bounds, but
not their end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshd.control.jobs import Principal
from meshd.service.authorization.access import Caller, Identity, RequestContext, Session
from meshwire.policies import parse_policy

if TYPE_CHECKING:
    from meshd.control.identities import IdentityTable
    from meshd.service.authorization.access import Access
    from meshd.service.authorization.rights import Rights


def principal_of(caller: Caller) -> Principal:
    """What is kept of who asks."""
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
    """Whether a caller has the key that started a job, within the same policies of a session."""
    key = principal.parent or principal.access_key
    policies = identity.session.policies if identity.session else ()
    return (identity.account, policies) == (key, principal.policies)


def caller_of(principal: Principal, table: IdentityTable) -> Caller:
    """Who that is now. Raises BatchError AccessDenied when the key is gone, or the session was revoked."""
    signer = table.find(principal.parent or principal.access_key)
    if signer is None or signer.user.user_id != principal.user_id:
        raise BatchError(
            "AccessDenied",
            f"the key {principal.parent or principal.access_key} that started this job is not valid any more",
            help="start the job again with another key",
        )
    identity = Identity.of(signer)
    if principal.parent and (principal.rounds != signer.rounds or principal.issued < signer.sessions_from):
        raise BatchError(
            "AccessDenied",
            "the temporary credentials that started this job were revoked",
            help="start the job again with others",
        )
    if principal.parent:
        session = Session(principal.parent, 0, principal.session, principal.policies)
        bounds = tuple(parse_policy(text, kind="identity") for text in principal.policies)
        identity = identity.during(session, principal.access_key, bounds)
    context = RequestContext(source_ip=principal.source_ip, secure=principal.secure, tls=principal.tls)
    return Caller(identity, context)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a job may do to one bucket's keys."""

    bucket: str
    action: str
    rights: Rights

    @classmethod
    def of(cls, access: Access, caller: Caller, action: str, bucket: str) -> Grant:
        """Raises S3Error NoSuchBucket."""
        return cls(bucket, action, access.rights(caller.identity, action, bucket, caller.context))

    def require(self, key: str) -> None:
        """Raises BatchError AccessDenied."""
        if not self.rights.allows(key):
            raise BatchError(
                "AccessDenied",
                f"this key may not do {self.action} on s3://{self.bucket}/{key}",
                help="have the permission added to the key that starts the job",
            )
