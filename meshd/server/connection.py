"""A client connection: an asyncio protocol that parses requests and answers them in order.

Input that cannot be parsed gets an S3 error, and the connection closes. Requests are answered one at a time
in the order in which they came, each in a task with a context of its own. A connection holds a bounded number
of requests and a bounded part of a body; the client waits when they are full.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

from meshd.server.client_transport import ClientTransport
from meshd.server.connection_limits import LingeringClose, malformed_request_error
from meshd.server.http_parser import MalformedRequestError
from meshd.server.request import MeshRequest
from meshd.server.request_queue import RequestQueue
from meshd.server.response import final_error
from meshd.server.response_body import ResumedResponse
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from meshd.server.body_stream import BodyStream
    from meshd.server.connection_limits import ConnectionLimiter
    from meshd.server.response import Reply
    from meshd.server.response_body import BodyResumer, PendingResponse
    from meshd.store.records import Span
    from meshd.util.clock import Clock

log = logging.getLogger(__name__)

_FIRST_WORD = 0.5  # seconds for a client's first request when the node stops


RequestHandler = Callable[[MeshRequest], Awaitable["Reply"]]


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
        "_context",
        "_current",
        "_ended",
        "_fast_path",
        "_half_closed",
        "_keepalive_handle",
        "_lingering",
        "_next_keepalive_close_time",
        "_passed",
        "_requests",
        "_server",
        "_task",
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
        self._requests = RequestQueue(self, self._arrived, server.guard.max_head_bytes)
        self._current: MeshRequest | MalformedRequestError | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False  # whether no further request is begun
        self._half_closed = False
        self._keepalive_handle: asyncio.TimerHandle | None = None
        self._next_keepalive_close_time = 0.0
        self.last_received = 0.0
        """When the client last sent data, on the loop's clock."""
        self.head_since = 0.0
        """When the first bytes of an incomplete request head arrived; 0 if there is none."""
        self._lingering: LingeringClose | None = None
        self._passed: PendingResponse | None = None

    def __repr__(self) -> str:
        return f"<Connection of {self.remote or 'nobody'}, {self._request_count} requests>"

    # --- called by the transport --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open_transport(cast("asyncio.Transport", transport))
        self._server.connection_made(self)
        metrics.http_connections.inc()
        self.last_received = self._loop.time()
        self._keep_alive()
        if not self._limiter.admit_connection(self):
            self._say("ServiceUnavailable", "This node has too many connections; try again later.")
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        metrics.http_connections.dec()
        self._limiter.forget_connection(self)
        when_lost, self.on_lost = self.on_lost, None
        if when_lost is not None:
            when_lost()
        if self._lingering is not None:
            self._lingering.client_closed()
        self._ended = True
        self.transport_lost()
        self._requests.clear()
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        if isinstance(self._current, MeshRequest):
            self._current.content.fail(ConnectionResetError("the client closed the connection"))
        self._server.connection_lost(self)

    # --- state and control --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or queued."""
        return self._task is None and not self._requests.waiting and not self._ended and self._passed is None

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
        self._requests.closed = True
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

    def send_direct(self, head: bytes, span: Span, rest: BodyResumer) -> bool:
        """Send a head and a range of a file at once, past the transport; False if nothing was sent. What the
        kernel did not accept is queued; what cannot be read is sent later from `rest`."""
        transport, at_once = self.transport, self.past_the_queue()
        if transport is None or at_once is None:
            return False
        sent = at_once.send_now(head, span)
        if sent is None:
            return False
        left, torn = sent
        if left:
            transport.write(left)
            self.wrote(len(left))
        if torn is not None:
            resumed = ResumedResponse(self, rest, torn, self.pending_ended)
            self.leave_to(resumed, resumed.cancel)
        return True

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
        return self._half_closed and self._requests.is_empty

    @property
    def is_closing(self) -> bool:
        """Whether the connection closes after the present responses."""
        return self._ended or self._requests.closed

    # --- requests -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.last_received = self._loop.time()
        if self._requests.broken:
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
        self._requests.feed(data)
        if self._task is not None:
            self.head_since = 0.0
        elif not self.head_since:
            self.head_since = self.last_received

    def _arrived(self, request: MeshRequest | MalformedRequestError) -> None:
        """Answer a request, or have it wait for those before it."""
        self._request_count += 1
        if self._task is None:
            self._begin(request)
        else:
            self._requests.waiting.append(request)

    def _begin(self, request: MeshRequest | MalformedRequestError) -> None:
        self._current = request
        answering = self._start_answering(request)
        self._task = self._loop.create_task(answering, context=self._context.copy())

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
            self._answered(keep)

    def _answered(self, keep: bool) -> None:
        self._task = self._current = None
        if self._ended:
            return
        last = (self._requests.closed or self._half_closed) and self._requests.is_empty
        if not keep or last:
            self._ended = True  # close one turn later: unread input would reset the connection
            self._loop.call_soon(self.force_close)
            return
        self._keep_alive()
        if self._requests.waiting:
            self._begin(self._requests.waiting.popleft())
        if self._requests.can_parse_more:
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
        if self._requests.broken and not keep:
            await self._linger(None)
        elif not body.complete:
            await self._linger(body)
        body.discard()
        return keep and body.complete

    def _refuse(self, error: Exception) -> None:
        """Answer a request that could not be parsed, or whose handler failed."""
        told, status = malformed_request_error(error)
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")
        data = final_error(told, self._server.clock, status)
        self.transport.write(data)
        self.wrote(len(data))
        metrics.http_requests.labels("Malformed", str(status)).inc()

    def _answered_at_once(self, fast_path: Callable[[Connection, bytes], bytes | None], data: bytes) -> bool:
        """Whether `data` was exactly one request, and its response has been written."""
        if not self.is_idle or self._half_closed or not self._requests.at_boundary:
            return False
        transport = self.transport
        if transport is None or transport.get_write_buffer_size() or self._limiter.under_pressure:
            return False
        answer = fast_path(self, data)
        if answer is None:
            return False
        if answer:
            transport.write(answer)
            self.wrote(len(answer))
        self._request_count += 1
        self._next_keepalive_close_time = self.last_received + self._server.keepalive_timeout
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
            self._parse(passed.data)
        elif passed.closes_connection or (passed.is_last and not passed.held):
            self.force_close()
            return
        self._keep_alive()
        if passed.held:
            self.data_received(passed.held)
        if self._half_closed and not self.eof_received():
            self.force_close()

    # --- closing ------------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        """Restart the time that the client has for another request."""
        due = self._loop.time() + self._server.keepalive_timeout
        self._next_keepalive_close_time = due
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(due, self._process_keepalive)

    def _process_keepalive(self) -> None:
        """Close the connection if the time for another request is over."""
        self._keepalive_handle = None
        if self._ended:
            return
        if self._passed is not None:
            self._keep_alive()
        elif self._loop.time() < self._next_keepalive_close_time:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )
        elif self.is_idle:
            self.force_close()

    def close_when_idle(self) -> None:
        """Close it if it is idle; if it is answering the last present request, received in full, close it
        afterwards."""
        request = self._current
        if self._passed is not None:
            self._passed.is_last = True
        elif self._task is None:
            if self._request_count or self._loop.time() - self.last_received > _FIRST_WORD:
                self.force_close()
        elif self._lingering is not None:
            self._lingering.shorten()
        elif isinstance(request, MeshRequest) and request.content.complete and not self._requests.waiting:
            self.close()

    def eof_received(self) -> bool | None:
        """Answer a client that has closed its side: with IncompleteBody if it ended in the middle of a body.
        The other side stays open until the responses are written (`finish_response` closes it). A TLS
        connection cannot be half-closed: the client is gone."""
        if self.secure:
            return None
        if self._requests.broken:
            self._half_closed = True
            if self._lingering is not None:
                self._lingering.client_closed()
            return True
        if self._passed is not None:
            self._half_closed = self._passed.is_last = True
            return True
        body = self._requests.body
        if body is None or self._task is None:
            return None
        self._half_closed = True
        if not body.complete:
            body.truncate()
        if self._requests.is_empty:  # close after this response, which may be written already
            self._requests.closed = True
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
