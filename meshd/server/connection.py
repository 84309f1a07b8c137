"""A client connection: an asyncio protocol that parses requests and answers them in order.

Input that cannot be parsed gets an S3 error, and the connection closes. Requests are answered one at a time
in the order in which they came, each in a task with a context of its own. A connection holds a bounded number
of requests and a bounded part of a body; the client waits when they are full.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from meshd.server.body_stream import NO_BODY, BodyStream, MalformedBodyError
from meshd.server.connection_limits import LingeringClose, malformed_request_error
from meshd.server.http_parser import MalformedRequestError, RequestParser
from meshd.server.proxy.response_relay import ProxiedResponse
from meshd.server.request import MeshRequest
from meshd.server.response import head_bytes, new_request_id
from meshd.server.response_body import ResumedResponse, is_encrypted
from meshd.server.sendfile import DirectSender, unsent_bytes_of
from meshd.telemetry import metrics
from meshwire.errors import S3Error
from meshwire.s3.responses import render_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.rpc.http_connection import HttpConnection
    from meshd.server.connection_limits import ConnectionLimiter
    from meshd.server.http_parser import ParsedHead
    from meshd.server.request_trace import RequestTrace
    from meshd.server.response import Reply
    from meshd.server.response_body import BodyResumer, PendingResponse
    from meshd.server.s3.fast_path import FastPath
    from meshd.store.records import Span
    from meshd.util.clock import Clock

log = logging.getLogger(__name__)

_MAX_QUEUED: Final = 32  # requests that wait while one is answered
_FIRST_WORD = 0.5  # seconds for a client's first request when the node stops
_ENCRYPTED_BACKLOG = 128 << 10  # bytes buffered for a slow client before encryption


class Connection(asyncio.Protocol):
    """One client connection."""

    __slots__ = (
        "_at_once",
        "_body",
        "_broken",
        "_closing",
        "_context",
        "_current",
        "_drain_waiter",
        "_encrypted",
        "_ended",
        "_flushing",
        "_half_closed",
        "_hold_body",
        "_hot",
        "_keepalive_handle",
        "_limiter",
        "_lingering",
        "_loop",
        "_next_keepalive_close_time",
        "_parser",
        "_passed",
        "_queue",
        "_reading_paused",
        "_request_count",
        "_server",
        "_task",
        "_unparsed",
        "_unread_then",
        "_writing_paused",
        "_wrote_in",
        "head_since",
        "last_received",
        "moved",
        "on_lost",
        "remote",
        "secure",
        "transport",
        "truncated_body",
    )

    def __init__(self, server: MeshServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self._limiter, self._hot = server.guard, server.hot
        self._context = contextvars.copy_context()
        self.transport: asyncio.Transport | None = None
        """None once the connection is closed, or closes as soon as its client has read what is buffered for
        it."""
        self.remote = ""
        """The client's address."""
        self.secure = False
        """Whether the client speaks TLS."""
        self._parser = RequestParser(self, server.guard.max_head_bytes)
        self._queue: deque[MeshRequest | MalformedRequestError] = deque()
        self._unparsed = b""  # input after the maximum number of queued requests
        self._current: MeshRequest | MalformedRequestError | None = None
        self._task: asyncio.Task[None] | None = None
        self._request_count = 0
        self._body: BodyStream | None = None
        """The body of the latest request."""
        self._closing = False  # whether the connection ends after its present requests
        self._ended = False  # whether no further request is begun
        self._broken = False  # whether further input cannot be parsed and is dropped
        self._half_closed = False
        self._hold_body = self._reading_paused = self._writing_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._keepalive_handle: asyncio.TimerHandle | None = None
        self._next_keepalive_close_time = 0.0
        self._encrypted = False
        self._flushing: asyncio.Transport | None = None
        self.last_received = 0.0
        """When the client last sent data, on the loop's clock."""
        self.head_since = 0.0
        """When the first bytes of an incomplete request head arrived; 0 if there is none."""
        self.moved = 0
        """Counts the bytes sent past the transport's own queue: the progress of a long response."""
        self._unread_then = (0.0, 0, 0, 0)
        self._wrote_in = -1
        self._at_once: DirectSender | None = None
        self.truncated_body: BodyStream | None = None
        self._lingering: LingeringClose | None = None
        self._passed: PendingResponse | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client is gone; set by code that waits for another node on its behalf."""

    def __repr__(self) -> str:
        return f"<Connection of {self.remote or 'nobody'}, {self._request_count} requests>"

    # --- called by the transport --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = made = cast("asyncio.Transport", transport)
        peer = made.get_extra_info("peername")
        self.remote = str(peer[0]) if isinstance(peer, (list, tuple)) and peer else str(peer or "")
        sock = made.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.connection_made(self)
        metrics.http_connections.inc()
        if is_encrypted(made):
            self._encrypted = self.secure = True
            made.set_write_buffer_limits(high=_ENCRYPTED_BACKLOG)
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
        if self._at_once is not None:
            self._at_once.close()
        if self._lingering is not None:
            self._lingering.client_closed()
        self._ended, self.transport, self._flushing = True, None, None
        self._queue.clear()
        self._unparsed = b""
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        if isinstance(self._current, MeshRequest):
            self._current.content.fail(ConnectionResetError("the client closed the connection"))
        self.resume_writing()
        self._server.connection_lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    async def drain(self) -> None:
        """Wait until the client has received most of what is buffered. Raises ConnectionResetError if it is
        gone."""
        if self._writing_paused and self.transport is not None:
            if self._drain_waiter is None or self._drain_waiter.done():
                self._drain_waiter = self._loop.create_future()
            await self._drain_waiter
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")

    # --- state and control --------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or queued."""
        return self._task is None and not self._queue and not self._ended and self._passed is None

    @property
    def is_evictable(self) -> bool:
        """Whether its client has all its responses; it may still be sending a refused body."""
        return self.is_idle or self._lingering is not None

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that this process buffers for the client."""
        transport = self.transport or self._flushing
        return 0 if transport is None else transport.get_write_buffer_size()

    def close(self) -> None:
        """Close it after the responses to the present requests."""
        self._closing = True
        if self.is_idle:
            self.force_close()

    def force_close(self) -> None:
        """Close it once the client has read what is buffered. The transport is kept, since a client that
        reads nothing would keep the connection open forever."""
        self._ended = True
        transport, self.transport = self.transport, None
        if transport is not None:
            self._flushing = transport
            transport.close()

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

    def wrote(self, size: int) -> None:
        """Record that a response of `size` bytes was queued on the transport."""
        self._wrote_in = self._limiter.flush_count
        self._limiter.response_queued(self, size)

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
            self._passed = mending = ResumedResponse(self, rest, torn, self._came_back)
            self.on_lost = mending.cancel
        return True

    def past_the_queue(self) -> DirectSender | None:
        """Return the sender past the transport, if it can be used at this moment."""
        transport = self.transport
        # uvloop does not report what was queued in this turn of the loop: that must not be overtaken.
        if transport is None or self._encrypted or self._wrote_in == self._limiter.flush_count:
            return None
        if self._at_once is None:
            if DirectSender.open_count >= DirectSender.MAX_OPEN:
                return None
            self._at_once = DirectSender(transport)
        return self._at_once

    @property
    def pressed(self) -> bool:
        """Whether responses should not be buffered in memory at present."""
        return self._limiter.under_pressure

    def is_stalled(self, now: float, seconds: float, least: int) -> bool:
        """Whether in the last `seconds` the client read fewer than `least` bytes of what is buffered for
        it."""
        transport = self.transport or self._flushing
        unread = 0 if transport is None else unsent_bytes_of(transport)
        since, then, moved, answers = self._unread_then
        fresh = not since or moved != self.moved or answers != self._request_count
        if not unread or fresh or (now - since > seconds and then - unread >= least):
            self._unread_then = (now if unread else 0.0, unread, self.moved, self._request_count)
            return False
        return now - since > seconds

    def time_out(self) -> None:
        """Close a connection whose request head does not end in time."""
        self._say("RequestTimeout", "The request's head did not arrive in time.")
        self.head_since = 0.0
        self.force_close()

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not read its response."""
        transport = self.transport or self._flushing
        if transport is not None:
            transport.abort()

    def _say(self, code: str, message: str) -> None:
        """Send an error that belongs to no particular request."""
        if self.transport is not None:
            rendered = render_error(S3Error(code, message), new_request_id(), "")
            now = self._server.clock.now_ms() // 1000
            head = head_bytes(rendered.status, rendered.headers, now, connection="close")
            self.transport.write(head + rendered.body)

    @property
    def at_its_last(self) -> bool:
        """Whether the request being answered is the client's last one."""
        return self._half_closed and not self._queue and not self._unparsed

    # --- requests -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.last_received = self._loop.time()
        if self._broken:
            if self._lingering is not None:
                self._lingering.data_arrived()
        elif self._passed is not None:
            self._passed.hold_input(data)
        elif self._hot is None or not self._answered_at_once(self._hot, data):
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse input, without the fast path."""
        if self._ended:
            return
        if self._unparsed:
            data = self._unparsed + data
        try:
            left = self._parser.feed(data)
        except MalformedRequestError as error:
            left = b""
            self._break_off(error)
        self._unparsed = b"" if self._closing else left
        self._hold_or_resume()
        if self._task is not None:
            self.head_since = 0.0
        elif not self.head_since:
            self.head_since = self.last_received

    @property
    def takes_requests(self) -> bool:
        """Whether the parser may begin another request."""
        return len(self._queue) < _MAX_QUEUED and not self._closing

    def on_request(self, head: ParsedHead) -> None:
        """Called by the parser: a request whose body may still arrive."""
        self._body = BodyStream(self._hold_client) if head.has_body else NO_BODY
        self._enqueue(MeshRequest(self, head, self._body))

    def on_body(self, data: bytes) -> None:
        """Called by the parser: bytes of the latest request's body."""
        assert self._body is not None
        self._body.feed(data)

    def on_body_end(self) -> None:
        """Called by the parser: the latest request is complete."""
        assert self._body is not None
        self._body.end()

    def _break_off(self, error: MalformedRequestError) -> None:
        """Stop parsing, since the meaning of further bytes is unknown. The body that they belong to is
        incomplete; the error is answered in its turn."""
        self._broken = True
        if self._body is not None and not self._body.complete:
            self._body.fail(MalformedBodyError(str(error)))
        self._enqueue(error)

    def _enqueue(self, request: MeshRequest | MalformedRequestError) -> None:
        self._request_count += 1
        if self._task is None:
            self._begin(request)
        else:
            self._queue.append(request)

    def _hold_client(self, hold: bool) -> None:
        """Called by the body: too much of it waits, or no longer does."""
        self._hold_body = hold
        self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        """Read from the client only while there is room for its data."""
        transport, pause = self.transport, (self._hold_body or bool(self._unparsed)) and not self._broken
        if pause == self._reading_paused or transport is None or transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()

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
        last = (self._closing or self._half_closed) and not self._queue and not self._unparsed
        if not keep or last:
            self._ended = True  # close one turn later: unread input would reset the connection
            self._loop.call_soon(self.force_close)
            return
        self._keep_alive()
        if self._queue:
            self._begin(self._queue.popleft())
        if self._unparsed and len(self._queue) <= _MAX_QUEUED // 2:
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
        told, status = malformed_request_error(error)
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")
        rendered = render_error(told, new_request_id(), "")
        now = self._server.clock.now_ms() // 1000
        data = head_bytes(status, rendered.headers, now, connection="close") + rendered.body
        self.transport.write(data)
        self.wrote(len(data))
        metrics.http_requests.labels("Malformed", str(status)).inc()

    def _answered_at_once(self, hot: FastPath, data: bytes) -> bool:
        """Whether `data` was exactly one request, and its response has been written."""
        if not self.is_idle or self._closing or self._half_closed or not self._parser.at_boundary:
            return False
        transport = self.transport
        if transport is None or transport.get_write_buffer_size() or self.pressed:
            return False
        answer = hot.try_respond(self, data)
        if answer is None:
            return False
        if answer:
            transport.write(answer)
            self.wrote(len(answer))
        self._request_count += 1
        self._next_keepalive_close_time = self.last_received + self._server.keepalive_timeout
        return True

    # --- responses of other nodes, without a task ---------------------------------------------------------

    def proxy_to_peer(
        self, wire: HttpConnection, data: bytes, sent: bytes, trace: RequestTrace, *, head_only: bool
    ) -> None:
        """Send `sent` to another node and relay its response. If none comes, `data`, the client's input, is
        parsed the ordinary way."""
        self._passed = passed = ProxiedResponse(self, wire, data, trace, self._came_back)
        self.on_lost = passed.relay.cancel
        passed.start(sent, head_only=head_only)

    def _came_back(self, passed: PendingResponse) -> None:
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
        elif isinstance(request, MeshRequest) and request.content.complete and not self._queue:
            self.close()

    def eof_received(self) -> bool | None:
        """Answer a client that has closed its side: with IncompleteBody if it ended in the middle of a body.
        The other side stays open until the responses are written (`finish_response` closes it). A TLS
        connection cannot be half-closed: the client is gone."""
        if self._encrypted:
            return None
        if self._broken:
            self._half_closed = True
            if self._lingering is not None:
                self._lingering.client_closed()
            return True
        if self._passed is not None:
            self._half_closed = self._passed.is_last = True
            return True
        body = self._body
        if body is None or self._task is None:
            return None
        self._half_closed = True
        if not body.complete:
            self.truncated_body = body
            body.end()
        if not self._queue and not self._unparsed:  # close after this response, which may be written already
            self._closing = True
        return True

    async def _linger(self, body: BodyStream | None) -> None:
        """Drop the rest of a body. Without `body`, tell the client that nothing more comes, and drop its
        input until it closes."""
        if body is None:
            if self._half_closed:
                return
            if self.transport is not None and not self._encrypted:
                self.transport.write_eof()
        self._lingering = LingeringClose(body, self._limiter.linger_seconds)
        try:
            await self._lingering.drain_input()
        finally:
            self._lingering = None


class MeshServer:
    """Creates and closes the connections of one worker. `handler` answers a request: it has written the reply
    that it returns, or leaves that to the connection; it raises ConnectionError when the client is gone."""

    def __init__(
        self,
        handler: Callable[[MeshRequest], Awaitable[Reply]],
        *,
        clock: Clock,
        guard: ConnectionLimiter,
        keepalive_timeout: float,
        hot: FastPath | None = None,
    ) -> None:
        """Create it in the running loop."""
        self.handler, self.clock, self.guard, self.hot = handler, clock, guard, hot
        self.keepalive_timeout = keepalive_timeout
        """Seconds for which an idle connection is kept."""
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self.on_connection_lost: Callable[[], None] | None = None
        """Called when a connection has ended."""
        guard.start()

    def __repr__(self) -> str:
        return f"<MeshServer, {len(self._connections)} connections>"

    def __call__(self) -> Connection:
        """The protocol factory of `loop.create_server`."""
        return Connection(self, self._loop)

    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        return list(self._connections)

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def connection_made(self, connection: Connection) -> None:
        """Called by a connection: a client has connected."""
        self._connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        """Called by a connection: a client is gone."""
        self._connections.discard(connection)
        if self.on_connection_lost is not None:
            self.on_connection_lost()

    def pre_shutdown(self) -> None:
        """Close the idle connections, and the others after their answers."""
        for connection in self.connections:
            connection.close()

    async def shutdown(self, patience: float) -> None:
        """End all connections; see `Connection.shutdown`."""
        self.guard.stop()
        await asyncio.gather(*[connection.shutdown(patience) for connection in self.connections])
