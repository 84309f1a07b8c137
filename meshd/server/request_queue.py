"""The requests of one connection as they arrive: parsed, in order, and held back while there is no room.

A connection holds a bounded number of requests and a bounded part of a body; the client is not read from
while they are full. After input that cannot be parsed, nothing further is parsed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from meshd.server.body_stream import NO_BODY, BodyStream, MalformedBodyError
from meshd.server.http_parser import MalformedRequestError, RequestParser
from meshd.server.request import MeshRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.server.client_transport import ClientTransport
    from meshd.server.http_parser import ParsedHead

_MAX_QUEUED: Final = 32  # requests that wait while one is answered


class RequestQueue:
    """Parses the input of `connection`. `arrived` gets each request, in order, when its head has arrived, and
    the error that ends the input; what it does not begin to answer it appends to `waiting`."""

    __slots__ = (
        "_arrived",
        "_connection",
        "_hold_body",
        "_parser",
        "_reading_paused",
        "_unparsed",
        "body",
        "broken",
        "closed",
        "waiting",
    )

    def __init__(
        self,
        connection: ClientTransport,
        arrived: Callable[[MeshRequest | MalformedRequestError], None],
        max_head_bytes: int,
    ) -> None:
        self._connection, self._arrived = connection, arrived
        self._parser = RequestParser(self, max_head_bytes)
        self.waiting: deque[MeshRequest | MalformedRequestError] = deque()
        self._unparsed = b""  # input after the maximum number of queued requests
        self.body: BodyStream | None = None
        """The body of the latest request."""
        self.closed = False
        """Whether the connection ends after its present requests."""
        self.broken = False
        """Whether further input cannot be parsed and is dropped."""
        self._hold_body = self._reading_paused = False

    def __repr__(self) -> str:
        return f"<RequestQueue, {len(self.waiting)} waiting{', broken' if self.broken else ''}>"

    @property
    def is_empty(self) -> bool:
        """Whether no request waits and no input is unparsed."""
        return not self.waiting and not self._unparsed

    @property
    def at_boundary(self) -> bool:
        """Whether the next byte begins a request that will be answered."""
        return self._parser.at_boundary and not self.closed

    @property
    def can_parse_more(self) -> bool:
        """Whether there is unparsed input, and room for its requests again."""
        return bool(self._unparsed) and len(self.waiting) <= _MAX_QUEUED // 2

    def feed(self, data: bytes) -> None:
        """Parse `data`, after what has not been parsed yet."""
        if self._unparsed:
            data = self._unparsed + data
        try:
            left = self._parser.feed(data)
        except MalformedRequestError as error:
            left = b""
            self._break_off(error)
        self._unparsed = b"" if self.closed else left
        self._hold_or_resume()

    def clear(self) -> None:
        """Drop everything: the client is gone."""
        self.waiting.clear()
        self._unparsed = b""

    # --- called by the parser -----------------------------------------------------------------------------

    @property
    def takes_requests(self) -> bool:
        """Whether the parser may begin another request."""
        return len(self.waiting) < _MAX_QUEUED and not self.closed

    def on_request(self, head: ParsedHead) -> None:
        """Take a request whose body may still arrive."""
        self.body = BodyStream(self._hold_client) if head.has_body else NO_BODY
        self._arrived(MeshRequest(self._connection, head, self.body))

    def on_body(self, data: bytes) -> None:
        """Take bytes of the latest request's body."""
        assert self.body is not None
        self.body.feed(data)

    def on_body_end(self) -> None:
        """Note that the latest request is complete."""
        assert self.body is not None
        self.body.end()

    # --- holding the client back --------------------------------------------------------------------------

    def _break_off(self, error: MalformedRequestError) -> None:
        """Stop parsing, since the meaning of further bytes is unknown. The body that they belong to is
        incomplete; the error is answered in its turn."""
        self.broken = True
        if self.body is not None and not self.body.complete:
            self.body.fail(MalformedBodyError(str(error)))
        self._arrived(error)

    def _hold_client(self, hold: bool) -> None:
        """Called by the body: too much of it waits, or no longer does."""
        self._hold_body = hold
        self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        """Read from the client only while there is room for its data."""
        transport = self._connection.transport
        pause = (self._hold_body or bool(self._unparsed)) and not self.broken
        if pause == self._reading_paused or transport is None or transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()
