"""Authentication and authorization of a request: one sequence for every endpoint.

A request is authenticated, then charged to its tenant, then authorized, in this order, before any of its
body is read. A request whose body took long to arrive is checked again, against the state at that time.
Connection limits apply first (`connection_limits`). The origin of a forwarded request is its client's
connection. Signatures are verified over the raw target as sent, never over a normalized one, and the secret
key does not leave this module. Only subdomains of configured domains name a bucket; any other host (an
address, a load balancer's name) is path style.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from meshd.auth.identity import ANONYMOUS_IDENTITY, RequestContext
from meshd.util.tenant_limits import set_tenant
from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding
from meshwire.s3.operations import Preflight
from meshwire.s3.request_head import read_auth_mechanism, read_query
from meshwire.s3.request_headers import with_presigned_headers
from meshwire.sigv4 import SIGV4_REQUIRED_MESSAGE, Claim, read_claim, verify
from meshwire.sigv4.post_object import verify_policy_signature
from meshwire.sigv4.sigv2 import SigV2Claim, read_sigv2_claim, verify_sigv2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.auth.identity import Identity, RemoteRecord
    from meshd.server.proxy.hops import Hop
    from meshd.server.request import MeshRequest, RequestOrigin, RequestTrace
    from meshd.server.request_body import RequestBody
    from meshd.store.records import Record, WriteContext
    from meshd.util.clock import Clock
    from meshwire.s3.operations import Operation
    from meshwire.s3.parse_request import RequestHead
    from meshwire.sigv4 import Verified
    from meshwire.sigv4.post_object import FormClaim


class VirtualHosts:
    """Maps hosts to buckets: the subdomains of `domains`, such as `s3.example.com`, are buckets."""

    def __init__(self, domains: Iterable[str] = ()) -> None:
        # The longest first: if both are domains, `s3.example.com` is not a bucket of `example.com`.
        self._domains = tuple(sorted(domains, key=len, reverse=True))

    def __repr__(self) -> str:
        return f"<VirtualHosts below {', '.join(self._domains) or 'no domain'}>"

    def bucket_of(self, host: str) -> str:
        """Return the bucket of a Host header, unchecked; empty for path style. The port is ignored."""
        if not self._domains or not host:
            return ""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.rstrip(".").lower()
        for domain in self._domains:
            if name == domain:
                return ""
            if name.endswith(domain) and name[-len(domain) - 1] == ".":
                return name[: -len(domain) - 1]
        return ""


class VerifiedSigner(NamedTuple):
    """A verified signer. Without a signature it is ANONYMOUS, and `claim` and `verified` are None. With
    version 2, `verified` is None, since chunks cannot chain onto its signature. `verified_at` is in seconds
    since 1970; `identity_tables` is the state of the identity tables at that time."""

    identity: Identity
    claim: Claim | SigV2Claim | None
    verified: Verified | None
    verified_at: int = 0
    identity_tables: object = None


_SIGV2_HEADER_REFUSED = (
    "This server accepts signature version 2 in presigned URLs and forms, but not in the Authorization "
    "header. Please use AWS4-HMAC-SHA256 (signature version s3v4 in most clients), or start the server with "
    "--sigv2 all."
)
_NO_SECRET = "of no key"
SIGV2_NAME, SIGV4_NAME = "AWS", "AWS4-HMAC-SHA256"  # as s3:signatureversion names them
ANONYMOUS = VerifiedSigner(ANONYMOUS_IDENTITY, None, None)


def request_context(origin: RequestOrigin, head: RequestHead, signer: VerifiedSigner) -> RequestContext:
    """Return the facts for policies about the connection (of the client, if a hop) and the headers."""
    claim, secure = signer.claim, origin.secure
    presigned = claim is not None and claim.presigned
    return RequestContext(
        origin.remote or "",
        secure,
        presigned,
        _hoisted_headers(head) if presigned else head.headers,
        "" if claim is None else SIGV2_NAME if isinstance(claim, SigV2Claim) else SIGV4_NAME,
        claim.timestamp if isinstance(claim, Claim) else "",
        tls=origin.tls if secure else "",
    )


def _hoisted_headers(head: RequestHead) -> Mapping[str, str]:
    """Return the headers of a presigned URL, as `parse_request` reads them."""
    query = read_query(head.raw_query)
    return with_presigned_headers(head.headers, query, read_auth_mechanism(head.headers, query))


def _verify(claim: Claim | SigV2Claim, head: RequestHead, secret_key: str, now: int) -> Verified | None:
    """Verify a signature; returns None for version 2."""
    if isinstance(claim, SigV2Claim):
        verify_sigv2(claim, head, secret_key, now)
        return None
    return verify(claim, head, secret_key, now)


class Authenticator:
    """Verifies signatures. One per process. `sigv2`: see `HttpSettings`."""

    def __init__(self, sessions: CredentialService, clock: Clock, *, sigv2: str = "presigned") -> None:
        self._sessions, self._clock, self._sigv2 = sessions, clock, sigv2

    def authenticate(
        self, head: RequestHead, trace: RequestTrace, *, service: str = "s3", payload_hash: str = ""
    ) -> VerifiedSigner:
        """Return the signer of `head` and record it in `trace`. `service`, `payload_hash`: see `read_claim`.
        Raises S3Error for everything but a valid signature or none at all."""
        claim = read_claim(head, service=service, payload_hash=payload_hash) or self._read_old(head)
        if claim is None:
            return ANONYMOUS
        trace.access_key = claim.access_key
        signer = self._verified(claim, head, self._clock.now_ms() // 1000)
        trace.identity = signer.identity
        self._sessions.record_use(signer.identity)
        return signer

    def reauthenticate(self, head: RequestHead, signer: VerifiedSigner) -> VerifiedSigner:
        """Return the signer of `head` after its body has arrived, so that a key that was disabled, revoked or
        changed meanwhile has no effect. Raises S3Error as `authenticate` does."""
        claim = signer.claim
        if claim is None or signer.identity_tables is self._sessions.table_state:
            return signer
        return self._verified(claim, head, signer.verified_at)

    def _verified(self, claim: Claim | SigV2Claim, head: RequestHead, now: int) -> VerifiedSigner:
        tables = self._sessions.table_state
        try:
            identity, secret_key = self._sessions.resolve(claim.access_key, claim.session_token)
        except S3Error:
            with suppress(S3Error):  # an unknown key costs the same time as a wrong signature
                _verify(claim, head, _NO_SECRET, now)
            raise
        if isinstance(claim, Claim):
            verified: Verified | None = verify(claim, head, secret_key, now)
        else:
            verified = _verify(claim, head, secret_key, now)
        return VerifiedSigner(identity, claim, verified, now, tables)

    def authenticate_form(self, claim: FormClaim, trace: RequestTrace) -> Identity:
        """Return the signer of an upload form's policy and record it in `trace`. Raises S3Error."""
        trace.access_key = claim.access_key
        if claim.scope is None and self._sigv2 == "off":
            raise S3Error("InvalidRequest", SIGV4_REQUIRED_MESSAGE)
        try:
            identity, secret_key = self._sessions.resolve(claim.access_key, claim.session_token)
        except S3Error:
            verify_policy_signature(claim, _NO_SECRET)  # see `_verified`
            raise
        if not verify_policy_signature(claim, secret_key):
            extra = {"AWSAccessKeyId": claim.access_key[:128], "SignatureProvided": claim.signature[:128]}
            raise S3Error("SignatureDoesNotMatch", extra=extra)
        trace.identity = identity
        self._sessions.record_use(identity)
        return identity

    def _read_old(self, head: RequestHead) -> SigV2Claim | None:
        claim = read_sigv2_claim(head)
        if claim is None or self._sigv2 == "all":
            return claim
        if self._sigv2 == "off":
            raise S3Error("InvalidRequest", SIGV4_REQUIRED_MESSAGE)
        if not claim.presigned:
            raise S3Error("InvalidRequest", _SIGV2_HEADER_REFUSED)
        return claim


class Identified(NamedTuple):
    """The signer, and the facts about the request for policies."""

    signer: VerifiedSigner
    context: RequestContext


class Admitted(NamedTuple):
    """The operation, its signer, and the facts about the request for policies."""

    operation: Operation
    signer: VerifiedSigner
    context: RequestContext


class RequestAdmission:
    """Admits requests, or raises S3Error. One instance per process."""

    def __init__(self, authenticator: Authenticator, access: Authorizer) -> None:
        self._authenticator, self._access = authenticator, access

    def identify(self, head: RequestHead, origin: RequestOrigin, trace: RequestTrace) -> Identified:
        """Authenticate the request from `origin`, and account it to its tenant. Authorizes nothing."""
        signer = self._authenticator.authenticate(head, trace)
        set_tenant(signer.identity.account)
        return Identified(signer, request_context(origin, head, signer))

    def admit(
        self,
        head: RequestHead,
        operation: Operation,
        origin: RequestOrigin,
        trace: RequestTrace,
        resolve: Callable[[Operation], Operation] | None = None,
        remote_record: RemoteRecord | None = None,
    ) -> Admitted:
        """Identify, then authorize. `resolve` determines what the operation means, which only an
        authenticated client may learn. `remote_record` is the object that it reads, if another node holds
        it."""
        # Browsers do not sign preflights: the bucket's CORS rules decide.
        if isinstance(operation, Preflight):
            return Admitted(operation, ANONYMOUS, request_context(origin, head, ANONYMOUS))
        signer, context = self.identify(head, origin, trace)
        if remote_record is not None:
            context = context._replace(remote_record=remote_record)
        if resolve is not None:
            operation = trace.target = resolve(operation)
        self._access.authorize(signer.identity, operation, context)
        return Admitted(operation, signer, context)

    def readmit(
        self,
        head: RequestHead,
        operation: Operation | None,
        signer: VerifiedSigner,
        context: RequestContext,
    ) -> VerifiedSigner:
        """Admit a request again after its body has arrived, perhaps over hours: keys and policies may have
        changed. Without an `operation` it is only authenticated."""
        signer = self._authenticator.reauthenticate(head, signer)
        if operation is not None:
            self._access.authorize(signer.identity, operation, context)
        return signer


class S3Call:
    """One admitted request: its signer, its operation, and its unread body. `admitted` is the operation as
    requested; `born`: see `VersionLookup.bucket_created`, of its bucket at that time. `hop` is what the node
    that forwarded it reports. `write_context` goes with every write that it causes."""

    __slots__ = (
        "admitted",
        "body",
        "born",
        "context",
        "head",
        "hop",
        "operation",
        "remote_source",
        "request",
        "signer",
        "trace",
        "write_context",
    )

    def __init__(
        self,
        head: RequestHead,
        operation: Operation,
        signer: VerifiedSigner,
        body: RequestBody,
        context: RequestContext,
        trace: RequestTrace,
        request: MeshRequest,
        write_context: WriteContext,
        far: Record | None = None,
        hop: Hop | None = None,
    ) -> None:
        self.request, self.remote_source, self.hop = request, far, hop
        self.head, self.signer, self.body = head, signer, body
        self.operation = self.admitted = operation
        self.born = 0
        self.context, self.trace, self.write_context = context, trace, write_context

    @property
    def identity(self) -> Identity:
        """The identity of the signer."""
        return self.signer.identity

    def url(self, bucket: str, key: str) -> str:
        """Return the object's URL, by the name under which this node was addressed."""
        scheme = "https" if self.context.secure else "http"
        folder = "" if self.head.host_bucket else f"/{bucket}"
        return (
            f"{scheme}://{self.head.headers.get('host', '')}{folder}/{percent_encoding.encode(key, safe='/')}"
        )

    def __repr__(self) -> str:
        return f"<S3Call {type(self.operation).__name__} by {self.identity.user_id}>"
