"""A client connection: an asyncio protocol that parses requests and answers them in order.

Input that cannot be parsed gets an S3 error, and the connection closes. Requests are answered one at a time
in the order in which they came, each in a task with a context of its own. A connection holds a bounded number
of requests and a bounded part of a body; the client is not read from while they are full.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

from meshd.server.body_stream import NO_BODY, BodyStream, MalformedBodyError
from meshd.server.client_transport import ClientTransport
from meshd.server.connection_limits import IdleTimer
from meshd.server.http_parser import MalformedRequestError, RequestParser
from meshd.server.lingering_close import LingeringClose
from meshd.server.request import MeshRequest
from meshd.server.response import error_for_failure, final_error
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.server.connection_limits import ConnectionLimiter
    from meshd.server.http_parser import ParsedHead
    from meshd.server.response import RequestHandler
    from meshd.server.response_body import PendingResponse
    from meshd.util.clock import Clock

log = logging.getLogger(__name__)
_FIRST_WORD = 0.5  # seconds for a client's first request when the node stops
_MAX_QUEUED: Final = 32  # requests that wait while one is answered


class ConnectionServer(Protocol):
    """What a connection uses of its server (`meshd.server.http_server.MeshServer`)."""

    handler: RequestHandler
    clock: Clock
    guard: ConnectionLimiter
    keepalive_timeout: float

    def connection_made(self, connection: Connection) -> None:
        """Called when a client has connected."""

    def connection_lost(self, connection: Connection) -> None:
        """Called when a client is gone."""


class Connection(ClientTransport):
    """One client connection. `fast_path` gets input that may be one whole request; it returns the response's
    bytes (empty if they are sent in another way), or None to have the input parsed."""

    __slots__ = (
        "_body",
        "_broken",
        "_closed",
        "_context",
        "_continued",
        "_current",
        "_ended",
        "_fast_path",
        "_half_closed",
        "_hold_body",
        "_idle_timer",
        "_lingering",
        "_parser",
        "_passed",
        "_server",
        "_task",
        "_unparsed",
        "_waiting",
        "head_since",
        "last_received",
    )

    def __init__(
        self,
        server: ConnectionServer,
        loop: asyncio.AbstractEventLoop,
        fast_path: Callable[[Connection, bytes], bytes | None] | None = None,
    ) -> None:
        super().__init__(server.guard, loop)
        self._server, self._fast_path = server, fast_path
        self._context = contextvars.copy_context()
        self._parser = RequestParser(self, server.guard.max_head_bytes)
        self._waiting: deque[MeshRequest | MalformedRequestError] = deque()
        self._unparsed = b""  # input after the maximum number of queued requests
        self._body: BodyStream | None = None  # of the latest request
        self._closed = False  # whether the connection ends after its present requests
        self._broken = False  # whether further input cannot be parsed and is dropped
        self._hold_body = False  # whether too much of a body waits
        self._current: MeshRequest | MalformedRequestError | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False  # whether no further request is begun
        self._half_closed = False
        self._idle_timer = IdleTimer(loop, server.keepalive_timeout, self._idle_too_long)
        self.last_received = 0.0
        """When the client last sent data, on the loop's clock."""
        self.head_since = 0.0
        """When the first bytes of an incomplete request head arrived; 0 if there is none."""
        self._lingering: LingeringClose | None = None
        self._passed: PendingResponse | None = None
        self._continued = False  # whether the request that is being parsed got `100 Continue`

    def __repr__(self) -> str:
        return f"<Connection of {self.remote or 'nobody'}, {self._request_count} requests>"

    # --- called by the transport --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open_transport(cast("asyncio.Transport", transport))
        self._server.connection_made(self)
        metrics.http_connections.inc()
        self.last_received = self._loop.time()
        self._idle_timer.restart()
        if not self._limiter.admit_connection(self):
            self._say("ServiceUnavailable", "This node has too many connections; try again later.")
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        metrics.http_connections.dec()
        self._limiter.forget_connection(self)
        if self._lingering is not None:
            self._lingering.client_closed()
        self._ended = True
        self.transport_lost()
        self._waiting.clear()
        self._unparsed = b""
        self._idle_timer.cancel()
        if isinstance(self._current, MeshRequest):
            self._current.content.fail(ConnectionResetError("the client closed the connection"))
        self._server.connection_lost(self)

    # --- state and control --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or queued."""
        return self._task is None and not self._waiting and not self._ended and self._passed is None

    @property
    def is_evictable(self) -> bool:
        """Whether its client has all its responses; it may still be sending a refused body."""
        return self.is_idle or self._lingering is not None

    @property
    def has_pending_request(self) -> bool:
        """Whether bytes of a request have arrived that the event loop will deliver."""
        return self._lingering is None and self.has_unread_bytes

    def close(self) -> None:
        """Close it after the responses to the present requests."""
        self._closed = True
        if self.is_idle:
            self.force_close()

    def force_close(self) -> None:
        """Close it once the client has read what is buffered. The transport is kept, since a client that
        reads nothing would keep the connection open forever."""
        self._ended = True
        self.close_transport()

    async def shutdown(self, patience: float) -> None:
        """Begin nothing more, wait for the running response, then cut it off. Takes at most three times
        `patience` seconds."""
        self._ended = True
        task, current = self._task, self._current
        if task is not None:
            await asyncio.wait({task}, timeout=patience)
            if not task.done() and isinstance(current, MeshRequest):
                current.content.fail(ConnectionResetError("this node is shutting down"))
                await asyncio.wait({task}, timeout=patience)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=patience)
        self.force_close()

    def time_out(self) -> None:
        """Close a connection whose request head does not end in time."""
        self._say("RequestTimeout", "The request's head did not arrive in time.")
        self.head_since = 0.0
        self.force_close()

    def _say(self, code: str, message: str) -> None:
        """Send an error that belongs to no particular request."""
        if self.transport is not None:
            self.transport.write(final_error(S3Error(code, message), self._server.clock))

    @property
    def is_last_request(self) -> bool:
        """Whether the request being answered is the client's last one."""
        return self._half_closed and not self._has_input

    @property
    def is_closing(self) -> bool:
        """Whether the connection closes after the present responses."""
        return self._ended or self._closed

    @property
    def _has_input(self) -> bool:
        return bool(self._waiting or self._unparsed)

    # --- requests -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.last_received = self._loop.time()
        if self._broken:
            if self._lingering is not None:
                self._lingering.data_arrived()
        elif self._passed is not None:
            self._passed.hold_input(data)
        elif self._fast_path is None or not self._answered_at_once(self._fast_path, data):
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse input, without the fast path."""
        if self._ended:
            return
        data = self._unparsed + data if self._unparsed else data
        try:
            left = self._parser.feed(data)
        except MalformedRequestError as error:
            # The meaning of further bytes is unknown: the body that they belong to is incomplete.
            left, self._broken = b"", True
            if self._body is not None and not self._body.complete:
                self._body.fail(MalformedBodyError(str(error)))
            self._on_request(error)  # the error is answered in its turn
        self._unparsed = b"" if self._closed else left
        self._hold_or_resume()
        if self._task is not None:
            self.head_since = 0.0
        elif not self.head_since:
            self.head_since = self.last_received

    def _hold_client(self, hold: bool) -> None:
        """Called by the body: too much of it waits, or no longer does."""
        self._hold_body = hold
        self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        """Read from the client only while there is room for its data."""
        self.hold_reading(hold=(self._hold_body or bool(self._unparsed)) and not self._broken)

    @property
    def takes_requests(self) -> bool:
        """Whether the parser may begin another request."""
        return len(self._waiting) < _MAX_QUEUED and not self._closed

    def on_request(self, head: ParsedHead) -> None:
        """Take a request from the parser; its body may still arrive."""
        self._body = BodyStream(self._hold_client) if head.has_body else NO_BODY
        self._on_request(MeshRequest(self, head, self._body, continued=self._continued))

    def on_body(self, data: bytes) -> None:
        """Take bytes of the latest request's body."""
        assert self._body is not None
        self._body.feed(data)

    def on_body_end(self) -> None:
        """Note that the latest request is complete."""
        assert self._body is not None
        self._body.end()

    def _on_request(self, request: MeshRequest | MalformedRequestError) -> None:
        """Answer a request, or have it wait for those before it."""
        self._request_count += 1
        if self._task is None:
            self._begin(request)
        else:
            self._waiting.append(request)

    def _begin(self, request: MeshRequest | MalformedRequestError) -> None:
        self._current = request
        self._task = self._loop.create_task(self._start_answering(request), context=self._context.copy())

    async def _start_answering(self, request: MeshRequest | MalformedRequestError) -> None:
        """Answer one request, then begin the next one."""
        keep = False
        try:
            if self.transport is not None and not self.transport.is_closing():
                keep = await self._answer(request)
        except ConnectionError:
            pass  # the client is gone
        except Exception:
            log.exception("finishing a request failed")
        finally:
            self._on_answered(keep)

    def _on_answered(self, keep: bool) -> None:
        self._task = self._current = None
        if self._ended:
            return
        if not keep or ((self._closed or self._half_closed) and not self._has_input):
            self._ended = True  # close one turn later: unread input would reset the connection
            self._loop.call_soon(self.force_close)
            return
        self._idle_timer.restart()
        if self._waiting:
            self._begin(self._waiting.popleft())
        if self._unparsed and len(self._waiting) <= _MAX_QUEUED // 2:
            self._parse(b"")

    async def _answer(self, request: MeshRequest | MalformedRequestError) -> bool:
        """Answer a request; return whether the connection may serve another one. Input that was not wanted,
        or could not be parsed, is read and dropped after the response. Raises ConnectionError."""
        if isinstance(request, MalformedRequestError):
            self._refuse(request)
            await self._linger(None)
            return False
        try:
            reply = await self._server.handler(request)
            await reply.prepare(request)
        except ConnectionError:
            raise
        except Exception as error:
            if request.response_started:
                raise
            log.exception("a request failed")
            self._refuse(error)
            if not request.content.complete:
                await self._linger(request.content)
            return False
        keep, body = reply.keep_alive, request.content
        if self._ended:
            return False
        if self._broken and not keep:
            await self._linger(None)
        elif not body.complete:
            await self._linger(body)
        body.discard()
        return keep and body.complete

    def _refuse(self, error: Exception) -> None:
        """Answer a request that could not be parsed, or whose handler failed."""
        failure, status = error_for_failure(error)
        self.queue_response(final_error(failure, self._server.clock, status))
        metrics.http_requests.labels("Malformed", str(status)).inc()

    def _answered_at_once(self, fast_path: Callable[[Connection, bytes], bytes | None], data: bytes) -> bool:
        """Whether `data` was exactly one request, and its response has been written."""
        transport = self.transport
        if self._task is not None or self._waiting or self._ended or self._passed is not None:
            return False  # see `is_idle`
        if self._half_closed or self._closed or not self._parser.at_boundary:
            return False
        if transport is None or transport.get_write_buffer_size() or self._limiter.under_pressure:
            return False
        answer = fast_path(self, data)
        if answer is None:
            return False
        if answer:
            self.queue_response(answer)
        self._request_count += 1
        self._idle_timer.postpone(self.last_received)
        return True

    # --- responses without a task ---------------------------------------------------------------------------

    def leave_to(self, response: PendingResponse, on_lost: Callable[[], None]) -> None:
        """Have `response` answer the client's only request; further input waits until it calls
        `pending_ended`. `on_lost`: called if the client disconnects before that."""
        self._passed, self.on_lost = response, on_lost

    def pending_ended(self, passed: PendingResponse) -> None:
        """Called by a pending response: it was sent, or none came and its request is parsed the ordinary
        way."""
        self._passed = self.on_lost = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not passed.response_started:
            self._continued = passed.continued
            self._parse(passed.data)
            self._continued = False
        elif passed.closes_connection or (passed.is_last and not passed.held):
            self.force_close()
            return
        self._idle_timer.restart()
        if passed.held:
            self.data_received(passed.held)
        if self._half_closed and not self.eof_received():
            self.force_close()

    # --- closing ------------------------------------------------------------------------------------------

    def _idle_too_long(self) -> None:
        """Close the connection: the time for another request is over."""
        if self._passed is not None:
            self._idle_timer.restart()
        elif self.is_idle:
            self.force_close()

    def close_when_idle(self) -> None:
        """Close the connection if it is idle. If it is answering its last request, and that was received in
        full, close it afterwards."""
        request = self._current
        if self._passed is not None:
            self._passed.is_last = True
        elif self._task is None:
            if self._request_count or self._loop.time() - self.last_received > _FIRST_WORD:
                self.force_close()
        elif self._lingering is not None:
            self._lingering.shorten()
        elif isinstance(request, MeshRequest) and request.content.complete and not self._waiting:
            self.close()

    def eof_received(self) -> bool | None:
        """Answer a client that has closed its side: with IncompleteBody if that was within a body. The other
        side stays open until the responses are written (`finish_response`); not with TLS, which has none."""
        self.input_closed()
        if self.secure:
            return None
        if self._broken:
            self._half_closed = True
            if self._lingering is not None:
                self._lingering.client_closed()
            return True
        if self._passed is not None:
            self._half_closed = self._passed.is_last = True
            self._passed.input_ended()
            return True
        body = self._body
        if body is None or self._task is None:
            return None
        self._half_closed = True
        if not body.complete:
            body.truncate()
        if not self._has_input:  # close after this response, which may be written already
            self._closed = True
        return True

    async def _linger(self, body: BodyStream | None) -> None:
        """Drop the rest of a body. Without `body`, tell the client that nothing more comes, and drop its
        input until it closes."""
        if body is None:
            if self._half_closed:
                return
            if self.transport is not None and not self.secure:
                self.transport.write_eof()
        self._lingering = LingeringClose(body, self._limiter.linger_seconds)
        try:
            await self._lingering.drain_input()
        finally:
            self._lingering = None
