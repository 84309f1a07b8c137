"""Identity: who sent a request, and what policies may ask about the request besides its operation.

Values that the authorizer, the policy evaluator and the facts of a request decide on. They carry no secret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from meshd.control.roles import ROLE_PREFIX
from meshwire.iam import parse_policy
from meshwire.iam.parse import user_arn
from meshwire.sts_query import assumed_role_arn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.identities import Signer
    from meshd.store.records import Record
    from meshwire.iam import Policy

FindRecord = Callable[[str, str, str | None], "Record | None"]
"""Returns the record of an object (bucket, key, None), or of one of its versions."""


class Session(msgspec.Struct, frozen=True):
    """What makes an identity temporary: the access key that created it (or `role/NAME`), when it expires and
    was issued (seconds since 1970), its name, its policies as text, and the revocation `rounds` of its user
    and key at that time; a later revocation ends it. `subject`: of a role's session, that of its token."""

    parent: str
    expires: int
    name: str = ""
    policies: tuple[str, ...] = ()
    issued: int = 0
    rounds: tuple[int, int] = (0, 0)
    subject: str = ""

    @property
    def role(self) -> str:
        """The name of the role that this is a session of; "" for a session made with a key."""
        return self.parent.removeprefix(ROLE_PREFIX) if self.parent.startswith(ROLE_PREFIX) else ""

    def is_current(self, rounds: tuple[int, int], sessions_from: int) -> bool:
        """Whether it was not revoked: `rounds` of its user and key, and the time before which those issued
        are revoked, as they are now."""
        return self.rounds == rounds and self.issued >= sessions_from


ALLOW_ALL_POLICY: Final = parse_policy(
    '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}',
    kind="identity",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The signer of a request. Carries no secret.

    `user_id` is what owns buckets: a user, or `role/NAME`. `policies` are the user's: they add rights to
    those of ownership, and may deny. `bounds` are those of the key and of the temporary credential: each of
    them must allow an action.
    """

    user_id: str
    display_name: str
    access_key: str
    root: bool = False
    policies: tuple[Policy, ...] = ()
    bounds: tuple[Policy, ...] = ()
    session: Session | None = None

    @property
    def account(self) -> str:
        """The permanent key that work is charged to, so that temporary credentials gain no extra share."""
        return self.access_key if self.session is None else self.session.parent

    @property
    def principal(self) -> str:
        """The name in logs and for people: the user's id, or `assumed-role/ROLE/SESSION`."""
        if self.session is None or not self.session.role:
            return self.user_id
        return f"assumed-role/{self.session.role}/{self.session.name}"

    @property
    def arn(self) -> str:
        """The ARN of the user, or of the role's session."""
        if self.session is None or not self.session.role:
            return user_arn(self.user_id)
        return assumed_role_arn(self.session.role, self.session.name)

    @classmethod
    def from_signer(cls, signer: Signer) -> Identity:
        """Return the identity of a permanent key."""
        user, key = signer.user, signer.key
        full = cls(user.user_id, user.display_name, key.access_key, user.root, signer.policies)
        return full.with_bounds(signer.bounds)

    def with_bounds(self, bounds: tuple[Policy, ...]) -> Identity:
        """Return this identity with further bounds. A bounded root is no longer root, but may do all that the
        bounds allow."""
        if not bounds:
            return self
        policies = (*self.policies, ALLOW_ALL_POLICY) if self.root else self.policies
        return replace(self, root=False, policies=policies, bounds=self.bounds + bounds)

    def with_session(self, session: Session, access_key: str, bounds: tuple[Policy, ...]) -> Identity:
        """Return the identity of temporary credentials made with this one's key."""
        return replace(self.with_bounds(bounds), access_key=access_key, session=session)


ANONYMOUS_IDENTITY: Final = Identity("", "anonymous", "")
"""The identity of an unsigned request."""


class RemoteRecord(NamedTuple):
    """The record of an object, or of one of its versions, that this node does not hold."""

    bucket: str
    key: str
    version: str | None
    record: Record


class RequestContext(NamedTuple):
    """What policies may ask about a request, besides its operation.

    `headers` have lower-case names and include those hoisted into a presigned query. `signature` names the
    algorithm (empty: none), and `signed` is its time in SigV4's form. `form`: the request comes from an HTML
    form. `tls`: the version of a secure connection, such as `1.3`. `remote_record`: the object that the
    request reads, if another node holds it.
    """

    source_ip: str = ""
    secure: bool = False
    presigned: bool = False
    headers: Mapping[str, str] = MappingProxyType({})
    signature: str = ""
    signed: str = ""
    form: bool = False
    tls: str = ""
    remote_record: RemoteRecord | None = None

    def find_record(self, find: FindRecord, bucket: str, key: str, version: str | None) -> Record | None:
        """Returns `remote_record` if it is the one looked for, otherwise what `find` returns."""
        remote = self.remote_record
        if remote is not None and remote[:3] == (bucket, key, version):
            return remote.record
        return find(bucket, key, version)


NO_CONTEXT: Final = RequestContext()


class Caller(msgspec.Struct, frozen=True):
    """An identity and its request context, for code that authorizes key by key."""

    identity: Identity
    context: RequestContext = NO_CONTEXT
