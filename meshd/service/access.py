"""Who may do what: root everything, a bucket's owner everything in it, nobody else anything.

Law: decides from tables alone, before a byte of a body is read. Invariant: an operation that names a bucket
is admitted only if the bucket exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from meshwire.policies import Question, decide, parse_policy
from meshwire.s3.errors import S3Error
from meshwire.s3.operations import CopyObject, CreateBucket, ListBuckets, UploadPartCopy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.identities import IdentityTable, Signer
    from meshwire.policies import Policy
    from meshwire.s3.operations import Operation


@dataclass(frozen=True, slots=True)
class Session:
    """What makes an identity temporary: the key it was made with, when it ends (seconds since 1970), its name
    and its policies as text."""

    parent: str
    expires: int
    name: str = ""
    policies: tuple[str, ...] = ()


EVERYTHING: Final = parse_policy(
    '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}',
    kind="identity",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who signed the request. Carries no secret.

    `policies` are the user's: they add rights to those of ownership, and may deny. `bounds` are the key's and
    the temporary credential's: each of them must allow what is done.
    """

    user_id: str
    display_name: str
    access_key: str
    root: bool = False
    policies: tuple[Policy, ...] = ()
    bounds: tuple[Policy, ...] = ()
    session: Session | None = None

    @classmethod
    def of(cls, signer: Signer) -> Identity:
        """The identity of a permanent key."""
        user, key = signer.user, signer.key
        full = cls(user.user_id, user.display_name, key.access_key, user.root, signer.policies)
        return full.bound(signer.bounds)

    def bound(self, bounds: tuple[Policy, ...]) -> Identity:
        """This identity within more bounds. Root within bounds is no longer root, but may do whatever these
        allow."""
        if not bounds:
            return self
        policies = (*self.policies, EVERYTHING) if self.root else self.policies
        return replace(self, root=False, policies=policies, bounds=self.bounds + bounds)

    def during(self, session: Session, access_key: str, bounds: tuple[Policy, ...]) -> Identity:
        """The identity of temporary credentials made with this one's key."""
        return replace(self.bound(bounds), access_key=access_key, session=session)


ANYONE: Final = Identity("", "anonymous", "")
"""Who did not sign at all."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What policies may ask of a request beside its operation. `headers` are lower-case."""

    source_ip: str = ""
    secure: bool = False
    presigned: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


_NO_CONTEXT: Final = RequestContext()


class Access:
    """Admits or refuses; about a microsecond a question."""

    def __init__(self, identities: IdentityTable, buckets: BucketTable) -> None:
        self._identities = identities
        self._buckets = buckets

    def signer(self, access_key: str) -> Signer:
        """Who signs with an access key. Raises S3Error InvalidAccessKeyId, for a disabled one too."""
        signer = self._identities.find(access_key)
        if signer is None:
            raise S3Error("InvalidAccessKeyId", extra={"AWSAccessKeyId": access_key[:128]})
        return signer

    def admit(self, identity: Identity, operation: Operation, context: RequestContext = _NO_CONTEXT) -> None:
        """Return if `identity` may run `operation`. Raises S3Error AccessDenied, NoSuchBucket."""
        if isinstance(operation, ListBuckets | CreateBucket):
            if identity is ANYONE:
                raise S3Error("AccessDenied")
            return
        self.admit_bucket(identity, operation.bucket)
        if isinstance(operation, CopyObject | UploadPartCopy) and operation.source.bucket != operation.bucket:
            self.admit_bucket(identity, operation.source.bucket)

    def allows(
        self,
        identity: Identity,
        action: str,
        bucket: str,
        key: str = "",
        context: RequestContext = _NO_CONTEXT,
        extra: Mapping[str, str] | None = None,
    ) -> bool:
        """Whether `identity` may do `action` (`s3:GetObject`) to a bucket or a key of it. `extra` are facts
        by the lower-case name of their condition key."""
        resource = f"arn:aws:s3:::{bucket}/{key}" if key else f"arn:aws:s3:::{bucket}"
        question = Question(action, resource, identity.user_id, extra or {})
        if any(decide((bound,), question) != "allow" for bound in identity.bounds):
            return False
        found = self._buckets.get(bucket)
        if identity.root or found is None:
            return identity.root
        verdict = decide(identity.policies, question)
        if verdict == "deny":
            return False
        return verdict == "allow" or (identity is not ANYONE and identity.user_id == found.owner)

    def admit_bucket(self, identity: Identity, name: str) -> Bucket:
        """The bucket, if `identity` may use it. Raises S3Error NoSuchBucket, AccessDenied."""
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})
        if identity is ANYONE or not (identity.root or identity.user_id == bucket.owner):
            raise S3Error("AccessDenied")
        return bucket
