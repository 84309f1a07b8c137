"""Requests of the page, signed with the key of its session.

A request is rewritten in place: its target, the few headers that may pass, and a signature of version 4. The
S3 endpoint, the native routes and other nodes then handle it like the request of any other client.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, cast

from meshd.server.body_stream import NO_BODY
from meshd.server.http_parser import ParsedHead
from meshd.server.request import MeshRequest
from meshd.server.request_body import RequestBody, reserve_body_memory
from meshwire.errors import S3Error
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import UNSIGNED_PAYLOAD, sign
from meshwire.sigv4.signer import EMPTY_SHA256

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.identities.console_sessions import ConsoleSession
    from meshd.config import HttpSettings
    from meshd.server.client_transport import ClientTransport
    from meshd.server.request import RequestOrigin
    from meshd.util.clock import Clock

_PASSED: Final = frozenset(
    {
        "accept",
        "connection",
        "content-length",
        "content-md5",
        "content-type",
        "host",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-unmodified-since",
        "range",
        "transfer-encoding",
        "user-agent",
    }
)
_SIGNATURE: Final = ("x-amz-date", "x-amz-content-sha256", "x-amz-security-token")
_NO_BODY: Final = "GET", "HEAD"
REFUSED: Final = ("/-/console", "/-/peer/", "/-/sts")
"""Targets that pages may not request: the console itself, calls between nodes, and new credentials."""


def _passes(name: str) -> bool:
    return name in _PASSED or (name.startswith("x-amz-") and name not in _SIGNATURE)


class SessionSigner:
    """Signs requests for sessions. One per process; `region`: that of signatures and new buckets."""

    def __init__(self, clock: Clock, http: HttpSettings, region: str) -> None:
        self._clock, self._http, self._region = clock, http, region

    async def sign(self, request: MeshRequest, target: str, session: ConsoleSession) -> None:
        """Make a page's request one for `target`, signed by the session's key.

        The body of a native request is read and covered by the signature, as the administration API requires;
        that of an S3 request streams. Raises S3Error AccessDenied, MaxMessageLengthExceeded.
        """
        if target.startswith(REFUSED):
            raise S3Error("AccessDenied", "Pages of the console may not request this. Use another client.")
        payload = EMPTY_SHA256 if request.method in _NO_BODY else UNSIGNED_PAYLOAD
        if target.startswith("/-/") and request.body_exists:
            payload = await self._buffered_body(request)
        kept = {name: value for name, value in request.headers.items() if _passes(name)}
        added = self._signature(request.method, target, kept, session, payload)
        raw = [pair for pair in request.raw_headers if _passes(pair[0].lower().decode("latin-1"))]
        request.raw_path, request.headers = target, kept | added
        request.raw_headers = [*raw, *((name.encode(), value.encode()) for name, value in added.items())]
        request.head_size += sum(len(name) + len(value) for name, value in added.items())

    def made(self, target: str, origin: RequestOrigin, host: str, session: ConsoleSession) -> MeshRequest:
        """Return a signed GET of `target` on behalf of a session, to be answered without a connection."""
        headers = {"host": host}
        headers |= self._signature("GET", target, headers, session, EMPTY_SHA256)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        head = ParsedHead("GET", target, "1.1", headers, raw, 0, True, None, False)
        return MeshRequest(cast("ClientTransport", origin), head, NO_BODY)

    def _signature(
        self, method: str, target: str, headers: Mapping[str, str], session: ConsoleSession, payload: str
    ) -> dict[str, str]:
        path, _, query = target.partition("?")
        return sign(
            RequestHead(method, path, query, headers),
            session.credential,
            region=self._region,
            timestamp=self._clock.now_ms() // 1000,
            payload_hash=payload,
        )

    async def _buffered_body(self, request: MeshRequest) -> str:
        """Read the body, leave it to be read again, and return its digest."""
        limit, pieces = self._http.max_xml_bytes, list[bytes]()
        head = RequestHead(request.method, "/", "", {})
        with reserve_body_memory(request.content_length, limit):
            body = RequestBody(request, head, self._http.body_timeout)
            async for piece in body.iter_raw():
                pieces.append(piece)
                if sum(map(len, pieces)) > limit:
                    raise S3Error("MaxMessageLengthExceeded")
        request.held_body = b"".join(pieces)
        return hashlib.sha256(request.held_body).hexdigest()
