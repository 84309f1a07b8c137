"""HTTP responses as bytes: the status line and headers, joined with a small body into one write.

A header value with a line break is never sent. A reply is written once. A response that leaves request body
bytes unread either drops a few of them or closes the connection; it never waits for many.
"""

from __future__ import annotations

import re
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from meshd.rpc.peer_client import MAP_HEADER
from meshd.server.http_parser import MalformedRequestError
from meshd.server.request import CLIENT_GONE, new_request_id
from meshwire.errors import S3Error
from meshwire.http_values.dates import format_http
from meshwire.s3.responses import render_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.server.request import MeshRequest, RequestTrace
    from meshd.util.clock import Clock

    RequestHandler = Callable[[MeshRequest], Awaitable["Reply"]]

Header = tuple[str, str]

_UNSAFE = re.compile(r"[\0-\x08\n-\x1f\x7f]")
_JOIN_LIMIT = 128 << 10
# A smaller unread body is read and dropped to keep the connection; a larger one closes it.
_DRAINABLE = 64 << 10


@lru_cache(maxsize=256)
def _status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\nServer: meshd\r\n"


@lru_cache(maxsize=4)
def _date_line(seconds: int) -> str:
    return f"Date: {format_http(seconds)}\r\n"


def head_bytes(status: int, headers: Iterable[Header], now: int, *, connection: str = "") -> bytes:
    """Return status line and headers. `now` is in seconds since the epoch; `connection` is `close`,
    `keep-alive` or empty."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    if connection:
        lines.append(f"Connection: {connection}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        text = "".join(_UNSAFE.sub(" ", line[:-2]) + "\r\n" for line in lines)
    return f"{_status_line(status)}{_date_line(now)}{text}\r\n".encode("utf-8", "surrogateescape")


def map_headers(mesh: ClusterView) -> list[Header]:
    """Return the header that tells the SDK the version of the cluster map; none on a single node."""
    return [] if mesh.single_node else [(MAP_HEADER, str(mesh.current_map().version))]


def final_error(error: S3Error, clock: Clock, status: int | None = None) -> bytes:
    """Return a whole response after which the connection closes; `status` replaces the error's own."""
    rendered = render_error(error, new_request_id(), "")
    now = clock.now_ms() // 1000
    return head_bytes(status or rendered.status, rendered.headers, now, connection="close") + rendered.body


def error_for_failure(error: Exception) -> tuple[S3Error, int]:
    """Return (error, status) for a request that could not be parsed, or whose handler failed."""
    if not isinstance(error, MalformedRequestError):
        return S3Error("InternalError"), 500
    if error.too_large:  # RFC 6585 §5; S3's own table has 400 for this code
        return S3Error("RequestHeaderSectionTooLarge"), 431
    return S3Error("BadRequest", f"An error occurred when parsing the HTTP request: {error}."), 400


def connection_header(request: MeshRequest, keep_alive: bool) -> str:
    """Return the value of the Connection header (RFC 9112 §9.3); empty if the version's default applies."""
    if keep_alive:
        return "keep-alive" if request.http_version == "1.0" else ""
    return "close"


class Reply:
    """A whole response; head and body are one write. `prepare` writes it, once."""

    def __init__(self, status: int, headers: list[Header], body: bytes, now: int) -> None:
        """`now` in seconds since the epoch."""
        self._status, self._fields, self._bytes, self._now = status, headers, body, now
        self._keep_alive: bool | None = None
        self._written = False

    def __repr__(self) -> str:
        return f"<Reply {self._status}, {len(self._bytes)} bytes{', written' if self._written else ''}>"

    @property
    def body(self) -> bytes:
        """The whole body; empty for a response that was streamed."""
        return self._bytes

    @property
    def body_length(self) -> int:
        return len(self._bytes)

    def add_headers(self, *headers: Header) -> None:
        """Add headers to a reply that has not been written."""
        self._fields = [*self._fields, *headers]

    def add_retry_after(self, mesh: ClusterView) -> None:
        """Tell in every 503 when it is worth repeating the request."""
        if self._status == 503 and not self._written and not any(_is_retry_after(f) for f in self._fields):
            self._fields = [*self._fields, ("Retry-After", str(mesh.retry_after))]

    @property
    def status(self) -> int:
        return self._status

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may serve another request; known once the reply is written."""
        return bool(self._keep_alive)

    def force_close(self) -> None:
        """Close the connection after the reply."""
        self._keep_alive = False

    async def prepare(self, request: MeshRequest) -> None:
        """Write the reply, unless it is written. Raises ConnectionResetError if the client is gone."""
        if self._written:
            return
        self._written = True
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        if request.method == "HEAD":
            self._bytes = b""
        connection = connection_header(request, self._keep_alive)
        write_head(
            request, head_bytes(self._status, self._fields, self._now, connection=connection), self._bytes
        )
        await request.drain()


def _is_retry_after(field: Header) -> bool:
    return field[0].lower() == "retry-after"


class StreamedReply(Reply):
    """Stands for a response that has been streamed already."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status, [], b"", 0)
        self._written, self._keep_alive = True, keep_alive


def write_head(request: MeshRequest, head: bytes, body: bytes = b"") -> None:
    """Queue head and body on the connection. Raises ConnectionResetError if the client is gone."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client closed the connection")
    request.response_started = True
    if len(body) <= _JOIN_LIMIT:
        transport.write(head + body)
    else:
        transport.write(head)
        transport.write(body)
    request.connection.wrote(len(head) + len(body))


async def send_reply(
    request: MeshRequest, trace: RequestTrace, making: Awaitable[Reply], mesh: ClusterView
) -> Reply:
    """Await the reply to a request, write it, and end the trace with its status, or with CLIENT_GONE if
    either fails."""
    try:
        reply = await making
        reply.add_retry_after(mesh)
        await finish_response(request, reply)
    except BaseException:
        trace.finish(CLIENT_GONE)
        raise
    trace.sent += reply.body_length
    trace.finish(reply.status)
    return reply


async def finish_response(request: MeshRequest, reply: Reply) -> None:
    """Write `reply`, and close the connection after it if further input could not be parsed.

    A client that still waits for `100 Continue` may or may not send its body (RFC 9110 §10.1.1), so it is
    unknown where its next request would begin. That connection is closed, as is one with much of a body
    unread.
    """
    if must_close_connection(request):
        reply.force_close()
    await reply.prepare(request)


def must_close_connection(request: MeshRequest) -> bool:
    """Whether the connection must be closed after the response; see `finish_response`."""
    waiting = "expect" in request.headers and not request.continued
    return waiting or request.is_last or _unread(request)


def _unread(request: MeshRequest) -> bool:
    """Whether more of the body is unread than is worth reading."""
    if request.content.complete:
        return False
    length = request.content_length
    return length is None or length - request.content.received > _DRAINABLE
