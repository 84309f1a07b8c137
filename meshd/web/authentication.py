"""From a request's head to who signed it.

Law: the raw target as it was sent, never a normalised one; the secret is used here and goes no further.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.service.authorization.access import ANYONE, RequestContext
from meshd.web.hops import Hop
from meshd.web.hosts import Hosts
from meshwire.s3.errors import S3Error
from meshwire.s3.fields import with_hoisted
from meshwire.s3.forms import signs_policy
from meshwire.s3.mechanisms import read_mechanism
from meshwire.s3.parsing import RequestHead
from meshwire.s3.queries import read_query
from meshwire.sigv2 import OldClaim, read_old_claim, verify_old
from meshwire.sigv4 import V4_ONLY, Claim, read_claim, verify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Identity
    from meshd.service.identities.temporary import Sessions
    from meshd.web.connections import Connection
    from meshd.web.settling import Trace
    from meshwire.s3.forms import FormClaim
    from meshwire.sigv4 import Verified


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Without a signature it is ANYONE, and `claim` and `verified` are None; `verified` alone is None with
    version 2, for no chunk can chain onto its signature. `then`: when it was found, in seconds since 1970;
    `tables`: the state of the tables of identities by which it was."""

    identity: Identity
    claim: Claim | OldClaim | None
    verified: Verified | None
    then: int = 0
    tables: object = None


_NOT_IN_THE_HEADER = (
    "This server takes signature version 2 in presigned URLs and forms, but not in the Authorization header. "
    "Please use AWS4-HMAC-SHA256 (signature version s3v4 in most clients), or have the server started with "
    "--sigv2 all."
)
_NO_SECRET = "of no key"
VERSION_2, VERSION_4 = "AWS", "AWS4-HMAC-SHA256"  # as s3:signatureversion names them
PATH_STYLE = Hosts()
ANONYMOUS = Authenticated(ANYONE, None, None)


def request_head(request: web.BaseRequest, max_bytes: int, hosts: Hosts = PATH_STYLE) -> RequestHead:
    """The head as `meshwire` reads it. Raises S3Error RequestHeaderSectionTooLarge above `max_bytes`."""
    raw_path, _, raw_query = _origin_form(request.raw_path).partition("?")
    headers: dict[str, str] = {}
    size = len(raw_path) + len(raw_query)
    for name, value in request.headers.items():
        lower = name.lower()
        size += len(lower) + len(value)
        headers[lower] = f"{headers[lower]},{value}" if lower in headers else value
    if size > max_bytes:
        raise S3Error("RequestHeaderSectionTooLarge")
    bucket = hosts.bucket_of(headers.get("host", ""))
    return RequestHead(request.method, raw_path, raw_query, headers, bucket)


def _origin_form(target: str) -> str:
    """RFC 9112 §3.2.2: a server accepts the absolute form, too."""
    if target.startswith("/"):
        return target
    _, scheme, rest = target.partition("://")
    return "/" + rest.partition("/")[2] if scheme else target


def request_context(
    request: web.BaseRequest | Connection | Hop, head: RequestHead, signer: Authenticated
) -> RequestContext:
    """What policies may ask about the connection (that of the client, where another node was asked: a hop)
    and the headers."""
    claim, secure = signer.claim, request.secure
    presigned = claim is not None and claim.presigned
    return RequestContext(
        request.remote or "",
        secure,
        presigned,
        _hoisted(head) if presigned else head.headers,
        "" if claim is None else VERSION_2 if isinstance(claim, OldClaim) else VERSION_4,
        claim.timestamp if isinstance(claim, Claim) else "",
        tls=_tls_version(request) if secure else "",
    )


def _hoisted(head: RequestHead) -> Mapping[str, str]:
    """The headers of a presigned URL, as `parse_request` reads them."""
    query = read_query(head.raw_query)
    return with_hoisted(head.headers, query, read_mechanism(head.headers, query))


def _tls_version(request: web.BaseRequest | Connection | Hop) -> str:
    """As conditions compare it: `1.3`."""
    if isinstance(request, Hop):
        return request.tls
    connection = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    version = None if connection is None else connection.version()
    return "" if version is None else version.removeprefix("TLSv")


def _verify(claim: Claim | OldClaim, head: RequestHead, secret_key: str, now: int) -> Verified | None:
    """None for version 2."""
    if isinstance(claim, OldClaim):
        verify_old(claim, head, secret_key, now)
        return None
    return verify(claim, head, secret_key, now)


class Authenticator:
    """Verifies signatures; `sigv2`: see `HttpSettings`. One per process."""

    def __init__(self, sessions: Sessions, clock: Clock, *, sigv2: str = "presigned") -> None:
        self._sessions, self._clock, self._sigv2 = sessions, clock, sigv2

    def authenticate(self, head: RequestHead, trace: Trace) -> Authenticated:
        """Who signed `head`; `trace` is told. Raises S3Error for everything that is not a valid signature or
        no signature at all."""
        claim = read_claim(head) or self._read_old(head)
        if claim is None:
            return ANONYMOUS
        trace.access_key = claim.access_key
        signer = self._verified(claim, head, self._clock.now_ms() // 1000)
        trace.identity = signer.identity
        self._sessions.proved(signer.identity)
        return signer

    def again(self, head: RequestHead, signer: Authenticated) -> Authenticated:
        """Who signed `head` by now: its body took its time, and what was disabled, revoked or changed
        meanwhile carries out nothing more. Raises S3Error as `authenticate`."""
        claim = signer.claim
        if claim is None or signer.tables is self._sessions.tables:
            return signer
        return self._verified(claim, head, signer.then)

    def _verified(self, claim: Claim | OldClaim, head: RequestHead, now: int) -> Authenticated:
        tables = self._sessions.tables
        try:
            identity, secret_key = self._sessions.find(claim.access_key, claim.session_token)
        except S3Error:
            with suppress(S3Error):  # an unknown key costs the same time as a wrong signature
                _verify(claim, head, _NO_SECRET, now)
            raise
        return Authenticated(identity, claim, _verify(claim, head, secret_key, now), now, tables)

    def authenticate_form(self, claim: FormClaim, trace: Trace) -> Identity:
        """Who signed an upload form's policy; `trace` is told. Raises S3Error."""
        trace.access_key = claim.access_key
        if claim.scope is None and self._sigv2 == "off":
            raise S3Error("InvalidRequest", V4_ONLY)
        try:
            identity, secret_key = self._sessions.find(claim.access_key, claim.session_token)
        except S3Error:
            signs_policy(claim, _NO_SECRET)  # see `_verified`
            raise
        if not signs_policy(claim, secret_key):
            extra = {"AWSAccessKeyId": claim.access_key[:128], "SignatureProvided": claim.signature[:128]}
            raise S3Error("SignatureDoesNotMatch", extra=extra)
        trace.identity = identity
        self._sessions.proved(identity)
        return identity

    def _read_old(self, head: RequestHead) -> OldClaim | None:
        claim = read_old_claim(head)
        if claim is None or self._sigv2 == "all":
            return claim
        if self._sigv2 == "off":
            raise S3Error("InvalidRequest", V4_ONLY)
        if not claim.presigned:
            raise S3Error("InvalidRequest", _NOT_IN_THE_HEADER)
        return claim
