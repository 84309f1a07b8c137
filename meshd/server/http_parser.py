"""HTTP/1.1 request parser: llhttp (through httptools), with the limits and checks that llhttp leaves out.

Bytes that two servers could read in two ways are refused, never repaired. A receiver gets each request's
head, then its body's bytes, then its end; after an error it gets nothing more. The parser holds no request:
it stops between two requests when the receiver takes no more of them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Protocol

import httptools

MAX_FIELD_BYTES: Final = 16 << 10
"""Limit of one request line or header field, which may hold a long key or token; the head has a limit too."""
MAX_HEADERS: Final = 128
_HEAD_SLICE: Final = 4 << 10  # bytes given to llhttp while a head's end has not arrived
_CHUNK_SLICE: Final = 16 << 10  # and in a chunked body, after which requests may follow
_HEAD_END: Final = b"\r\n\r\n"
_ABSOLUTE_TARGET: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]+)")
# If one of these were repeated, one server would read the first and another the last value.
_SINGLETONS: Final = frozenset(
    {
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "etag",
        "host",
        "max-forwards",
        "server",
        "transfer-encoding",
        "user-agent",
    }
)


class MalformedRequestError(Exception):
    """Input that is not HTTP as this server reads it. `too_large`: a line, or the head, exceeds its limit.
    The reason quotes nothing of the input."""

    def __init__(self, reason: str, *, too_large: bool = False) -> None:
        super().__init__(reason)
        self.too_large = too_large


class ParsedHead(NamedTuple):
    """A request's head. `target` is that of the request line. `headers` maps lower-case names to values,
    those of repeated fields joined with `,`; `raw_headers` are the fields as sent. `size` is the bytes of
    names and values. `content_length` is None without that header."""

    method: str
    target: str
    http_version: str
    headers: dict[str, str]
    raw_headers: list[tuple[bytes, bytes]]
    size: int
    keep_alive: bool
    content_length: int | None
    chunked: bool

    @property
    def has_body(self) -> bool:
        """Whether body bytes follow."""
        return self.chunked or bool(self.content_length)


class RequestReceiver(Protocol):
    """Receives what the parser finds."""

    @property
    def takes_requests(self) -> bool:
        """Whether another request may begin."""

    def on_request(self, head: ParsedHead) -> None:
        """Called when a head is complete."""

    def on_body(self, data: bytes) -> None:
        """Called with bytes of the latest request's body, without the framing of chunks."""

    def on_body_end(self) -> None:
        """Called when the latest request is complete."""


class RequestParser:
    """Parses the input of one client. `max_head_bytes` limits a head whose end has not arrived, and what a
    chunked body may hold between two pieces of data (extensions, trailers)."""

    __slots__ = (
        "_body_left",
        "_chunked",
        "_headers",
        "_in_head",
        "_line",
        "_max_head_bytes",
        "_muted",
        "_overhead",
        "_parser",
        "_raw_headers",
        "_receiver",
        "_resume_head",
        "_size",
        "_target",
    )

    def __init__(self, receiver: RequestReceiver, max_head_bytes: int) -> None:
        self._receiver, self._max_head_bytes = receiver, max_head_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._in_head, self._chunked = True, False
        self._body_left = 0
        self._overhead = 0  # bytes of the head, or of a chunked body's framing, since the last progress
        self._line = 0  # bytes of a line whose end has not arrived
        self._resume_head = b""
        self._muted = False
        self._target, self._size = b"", 0
        self._headers: dict[str, str] = {}
        self._raw_headers: list[tuple[bytes, bytes]] = []

    def __repr__(self) -> str:
        return f"<RequestParser, {'head' if self._in_head else 'body'}, {self._overhead} bytes of it>"

    @property
    def at_boundary(self) -> bool:
        """Whether the next byte begins a request."""
        return self._in_head and not self._overhead

    def feed(self, data: bytes) -> bytes:
        """Parse `data`; return the bytes that are left if the receiver takes no more requests. Raises
        MalformedRequestError; the parser is unusable afterwards."""
        start, size = 0, len(data)
        while start < size:
            if self._in_head:
                if not self._receiver.takes_requests:
                    return data[start:]
                found = data.find(_HEAD_END, start, start + _HEAD_SLICE)
                end = self._partial_head(data, start) if found < 0 else found + len(_HEAD_END)
            else:
                end = min(start + (_CHUNK_SLICE if self._chunked else self._body_left), size)
            start = self._execute(data, start, end)
        return b""

    def _partial_head(self, data: bytes, start: int) -> int:
        """Return where the next slice of a head ends whose end has not arrived. Raises MalformedRequestError
        for a line that is too long, since llhttp accepts a field of any length."""
        end = min(start + _HEAD_SLICE, len(data))
        line = data.rfind(b"\n", start, end)
        self._line = self._line + end - start if line < 0 else end - line - 1
        if self._line > MAX_FIELD_BYTES:
            raise MalformedRequestError("a line is too long", too_large=True)
        return end

    def _execute(self, data: bytes, start: int, end: int) -> int:
        """Pass a slice of `data` to llhttp; return where it stopped."""
        self._overhead += end - start
        try:
            self._parser.feed_data(data if end - start == len(data) else memoryview(data)[start:end])
        except httptools.HttpParserUpgrade as stopped:
            end = start + int(stopped.args[0])
            self._ignore_upgrade()
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            raise cause if isinstance(cause, MalformedRequestError) else error from None
        except httptools.HttpParserError as error:
            raise MalformedRequestError(str(error)) from None
        if self._overhead > self._max_head_bytes:
            raise MalformedRequestError("the head is too long", too_large=True)
        return end

    def _ignore_upgrade(self) -> None:
        """Continue in HTTP/1.1 (RFC 9110 §7.8). llhttp stops after the head of a request for an upgrade and
        does not read its body, so a new parser continues after a head with the same framing."""
        if not self._resume_head:
            return
        self._parser, self._muted = httptools.HttpRequestParser(self), True
        self._parser.feed_data(self._resume_head)
        self._resume_head, self._muted = b"", False

    # --- called by httptools ------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        if self._muted:
            return
        self._target += url
        if len(self._target) > MAX_FIELD_BYTES:
            raise MalformedRequestError("the request line is too long", too_large=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self._muted:  # a trailer: ignored
            return
        size = len(name) + len(value)
        if size > MAX_FIELD_BYTES:
            raise MalformedRequestError("a header is too long", too_large=True)
        self._size += size
        value = value.rstrip(b" \t")
        self._raw_headers.append((name, value))
        if len(self._raw_headers) > MAX_HEADERS:
            raise MalformedRequestError("there are too many headers")
        lower, text = name.lower().decode("latin-1"), value.decode("utf-8", "surrogateescape")
        before = self._headers.get(lower)
        if before is not None:
            if lower in _SINGLETONS:
                raise MalformedRequestError(f"{lower} is given twice")
            text = f"{before},{text}"
        self._headers[lower] = text

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        parser, headers = self._parser, self._headers
        method, version = parser.get_method().decode(), parser.get_http_version()
        if version == "1.1" and "host" not in headers:
            raise MalformedRequestError("there is no Host header")
        length = headers.get("content-length")
        coding = headers.get("transfer-encoding")
        # A body that is compressed for the transfer, too (`gzip, chunked`), would be stored compressed.
        if coding is not None and coding.lower() != "chunked":
            raise MalformedRequestError("the body's transfer coding is not chunked")
        head = ParsedHead(
            method,
            _checked_target(method, self._target, headers.get("host")),
            version,
            headers,
            self._raw_headers,
            self._size,
            parser.should_keep_alive(),
            None if length is None else int(length),
            coding is not None,
        )
        if head.has_body and parser.should_upgrade():
            framing = (
                "Transfer-Encoding: chunked" if head.chunked else f"Content-Length: {head.content_length}"
            )
            closing = "" if head.keep_alive else "Connection: close\r\n"
            self._resume_head = f"POST / HTTP/1.1\r\n{closing}{framing}\r\n\r\n".encode()
        self._in_head, self._chunked = False, head.chunked
        self._body_left, self._overhead, self._line = head.content_length or 0, 0, 0
        self._target, self._size, self._headers, self._raw_headers = b"", 0, {}, []
        self._receiver.on_request(head)

    def on_body(self, data: bytes) -> None:
        self._overhead = 0
        self._body_left -= len(data)
        self._receiver.on_body(data)

    def on_message_complete(self) -> None:
        if self._resume_head:  # the body has not begun
            return
        self._in_head, self._chunked = True, False
        self._overhead = 0
        self._receiver.on_body_end()


def _checked_target(method: str, raw: bytes, host: str | None) -> str:
    """Return the target. RFC 9112 §3.2 allows the origin form, the absolute form, which must name the same
    host as the Host header, and `OPTIONS *`; CONNECT is not supported."""
    target = raw.decode("utf-8", "surrogateescape")
    if method == "CONNECT":
        raise MalformedRequestError("CONNECT is not supported")
    if target.startswith("/") or (target == "*" and method == "OPTIONS"):
        return target
    absolute = _ABSOLUTE_TARGET.match(target)
    if absolute is not None:
        if host is not None and absolute[1].lower() != host.lower():
            raise MalformedRequestError("the request target and the Host header name different hosts")
        return target
    raise MalformedRequestError("the request target has no path")
