"""From a request's head to who signed it.

Law: the raw target as it was sent, never a normalised one; the secret is used here and goes no further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.service.access import ANYONE, Identity, RequestContext
from meshwire.s3.errors import S3Error
from meshwire.s3.parsing import RequestHead
from meshwire.sigv4 import read_claim, verify

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.access import Access
    from meshwire.sigv4 import Claim, Verified


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Without a signature it is ANYONE, and `claim` and `verified` are None."""

    identity: Identity
    claim: Claim | None
    verified: Verified | None


ANONYMOUS = Authenticated(ANYONE, None, None)


def request_head(request: web.BaseRequest, max_bytes: int) -> RequestHead:
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
    return RequestHead(request.method, raw_path, raw_query, headers)


def _origin_form(target: str) -> str:
    """RFC 9112 §3.2.2: a server accepts the absolute form, too."""
    if target.startswith("/"):
        return target
    _, scheme, rest = target.partition("://")
    return "/" + rest.partition("/")[2] if scheme else target


def request_context(request: web.BaseRequest, head: RequestHead, signer: Authenticated) -> RequestContext:
    """What policies may ask about the connection and the headers."""
    presigned = signer.claim is not None and signer.claim.presigned
    return RequestContext(request.remote or "", request.secure, presigned, head.headers)


class Authenticator:
    """Verifies signatures. One per process."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access, self._clock = access, clock

    def authenticate(self, head: RequestHead) -> Authenticated:
        """Who signed `head`. Raises S3Error for everything that is not a valid signature or no signature at
        all."""
        claim = read_claim(head)
        if claim is None:
            return ANONYMOUS
        signer = self._access.signer(claim.access_key)
        if claim.session_token is not None:
            raise S3Error(
                "InvalidToken", "This server issues no session tokens; sign with an access key alone."
            )
        verified = verify(claim, head, signer.key.secret_key, self._clock.now_ms() // 1000)
        return Authenticated(Identity.of(signer), claim, verified)
