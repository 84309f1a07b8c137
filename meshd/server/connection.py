"""A client connection: an asyncio protocol that parses requests and answers them in order.

Law: input that cannot be parsed gets an S3 error, and the connection closes. Requests are answered one at a
time in the order in which they came, each in a task with a context of its own. Invariant: a connection holds
a bounded number of requests and a bounded part of a body; the client waits when they are full.
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

_MAX_QUEUED: Final = 32  # requests that wait behind the one that is answered
_FIRST_WORD = 0.5  # seconds that a client has for its first request when the node stops
_ENCRYPTED_BACKLOG = 128 << 10  # bytes kept for a slow client before they are encrypted


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
        """None once the connection is closed, or is to be when its client has read what waits for it."""
        self.remote = ""
        """The client's address."""
        self.secure = False
        """Whether the client speaks TLS."""
        self._parser = RequestParser(self, server.guard.max_head_bytes)
        self._queue: deque[MeshRequest | MalformedRequestError] = deque()
        self._unparsed = b""  # what came behind as many requests as are held
        self._current: MeshRequest | MalformedRequestError | None = None
        self._task: asyncio.Task[None] | None = None
        self._request_count = 0
        self._body: BodyStream | None = None
        """Of the latest request."""
        self._closing = False  # whether the connection ends after the requests that it has
        self._ended = False  # whether nothing more is begun
        self._broken = False  # whether what comes cannot be understood any more, and is dropped
        self._half_closed = False
        self._hold_body = self._reading_paused = self._writing_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._keepalive_handle: asyncio.TimerHandle | None = None
        self._next_keepalive_close_time = 0.0
        self._encrypted = False
        self._flushing: asyncio.Transport | None = None
        self.last_received = 0.0
        """When the client last sent something, on the loop's clock."""
        self.head_since = 0.0
        """When the first bytes of a request head came whose end is missing; 0 when there is none."""
        self.moved = 0
        """Counts what was sent past the transport's own queue: progress of a long answer."""
        self._unread_then = (0.0, 0, 0, 0)
        self._wrote_in = -1
        self._at_once: DirectSender | None = None
        self.truncated_body: BodyStream | None = None
        self._lingering: LingeringClose | None = None
        self._passed: PendingResponse | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client is gone, by whatever waits for another node on its behalf."""

    def __repr__(self) -> str:
        return f"<Connection of {self.remote or 'nobody'}, {self._request_count} requests>"

    # --- the transport's side -----------------------------------------------------------------------------

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
        """Wait until the client has taken most of what waits for it. Raises ConnectionResetError when it is
        gone."""
        if self._writing_paused and self.transport is not None:
            if self._drain_waiter is None or self._drain_waiter.done():
                self._drain_waiter = self._loop.create_future()
            await self._drain_waiter
        if self.transport is None:
            raise ConnectionResetError("the client closed the connection")

    # --- what others ask, and have done -------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered or waits for it."""
        return self._task is None and not self._queue and not self._ended and self._passed is None

    @property
    def is_evictable(self) -> bool:
        """Whether its client has all its answers; it may still be sending what was refused."""
        return self.is_idle or self._lingering is not None

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that wait in this process for the client to take them."""
        transport = self.transport or self._flushing
        return 0 if transport is None else transport.get_write_buffer_size()

    def close(self) -> None:
        """End it after the answers to the requests that are here."""
        self._closing = True
        if self.is_idle:
            self.force_close()

    def force_close(self) -> None:
        """End it once the client has taken what waits for it. The transport is kept: a client that takes
        nothing would keep the connection for ever."""
        self._ended = True
        transport, self.transport = self.transport, None
        if transport is not None:
            self._flushing = transport
            transport.close()

    async def shutdown(self, patience: float) -> None:
        """Begin nothing more, wait for the answer under way, then cut it. Takes at most thrice `patience`
        seconds."""
        self._ended = True
        task, current = self._task, self._current
        if task is not None:
            await asyncio.wait({task}, timeout=patience)
            if not task.done() and isinstance(current, MeshRequest):
                current.content.fail(ConnectionResetError("this node stops"))
                await asyncio.wait({task}, timeout=patience)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=patience)
        self.force_close()

    def wrote(self, size: int) -> None:
        """An answer of `size` bytes was queued on the transport."""
        self._wrote_in = self._limiter.flush_count
        self._limiter.response_queued(self, size)

    def send_direct(self, head: bytes, span: Span, rest: BodyResumer) -> bool:
        """Send a head and a range of a file past the transport, in this moment; False if nothing was sent.
        What the kernel did not take after all is queued; what cannot be read comes from `rest`, later."""
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
        """What sends past the transport, when that can be done in this moment."""
        transport = self.transport
        # uvloop counts what it has queued in this turn of the loop nowhere: it must not be overtaken.
        if transport is None or self._encrypted or self._wrote_in == self._limiter.flush_count:
            return None
        if self._at_once is None:
            if DirectSender.open_count >= DirectSender.MAX_OPEN:
                return None
            self._at_once = DirectSender(transport)
        return self._at_once

    @property
    def pressed(self) -> bool:
        """Whether answers should not be kept in memory for their clients just now."""
        return self._limiter.under_pressure

    def is_stalled(self, now: float, seconds: float, least: int) -> bool:
        """Whether in the last `seconds` the client took less than `least` bytes of what waits for it."""
        transport = self.transport or self._flushing
        unread = 0 if transport is None else unsent_bytes_of(transport)
        since, then, moved, answers = self._unread_then
        fresh = not since or moved != self.moved or answers != self._request_count
        if not unread or fresh or (now - since > seconds and then - unread >= least):
            self._unread_then = (now if unread else 0.0, unread, self.moved, self._request_count)
            return False
        return now - since > seconds

    def time_out(self) -> None:
        """End a connection whose request head does not come to an end."""
        self._say("RequestTimeout", "The request's head did not arrive in time.")
        self.head_since = 0.0
        self.force_close()

    def abort_stalled(self) -> None:
        """Cut a connection whose client does not take its answer."""
        transport = self.transport or self._flushing
        if transport is not None:
            transport.abort()

    def _say(self, code: str, message: str) -> None:
        """An error that answers no request in particular."""
        if self.transport is not None:
            rendered = render_error(S3Error(code, message), new_request_id(), "")
            now = self._server.clock.now_ms() // 1000
            head = head_bytes(rendered.status, rendered.headers, now, connection="close")
            self.transport.write(head + rendered.body)

    @property
    def at_its_last(self) -> bool:
        """Whether the request being answered is the last one this client will have sent."""
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
        """The ordinary way."""
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
        """From the parser: a request whose body may still come."""
        self._body = BodyStream(self._hold_client) if head.has_body else NO_BODY
        self._enqueue(MeshRequest(self, head, self._body))

    def on_body(self, data: bytes) -> None:
        """From the parser: bytes of the latest request's body."""
        assert self._body is not None
        self._body.feed(data)

    def on_body_end(self) -> None:
        """From the parser: the latest request is complete."""
        assert self._body is not None
        self._body.end()

    def _break_off(self, error: MalformedRequestError) -> None:
        """Nobody knows what the bytes from here on are. The body that they belong to is incomplete; the error
        is answered in its turn."""
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
        """From the body: too much of it waits, or no longer does."""
        self._hold_body = hold
        self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        """Read from the client while there is room for what it sends."""
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
        """Answer one request, then have the next one begun."""
        keep = False
        try:
            if self.transport is not None and not self.transport.is_closing():
                keep = await self._answer(request)
        except ConnectionError:
            pass  # nobody is there to be told
        except Exception:
            log.exception("a request's end failed")
        finally:
            self._answered(keep)

    def _answered(self, keep: bool) -> None:
        self._task = self._current = None
        if self._ended:
            return
        last = (self._closing or self._half_closed) and not self._queue and not self._unparsed
        if not keep or last:
            self._ended = True  # one turn later: what has arrived is read first, for unread input resets it
            self._loop.call_soon(self.force_close)
            return
        self._keep_alive()
        if self._queue:
            self._begin(self._queue.popleft())
        if self._unparsed and len(self._queue) <= _MAX_QUEUED // 2:
            self._parse(b"")

    async def _answer(self, request: MeshRequest | MalformedRequestError) -> bool:
        """Whether the connection may serve another request. What the client sends that nobody wanted, or
        understood, is read and dropped after the answer. Raises ConnectionError."""
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
        """Answer what could not be parsed, or whose handler failed."""
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
        """Whether `data` was one request, the only one, and its answer is written."""
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

    # --- answers of other nodes, without a task -----------------------------------------------------------

    def proxy_to_peer(
        self, wire: HttpConnection, data: bytes, sent: bytes, trace: RequestTrace, *, head_only: bool
    ) -> None:
        """Ask another node with `sent`, and hand its answer on. If none comes, `data` takes the ordinary way,
        as it came from the client."""
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

    # --- the connection's end -----------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        """Give the client its time for another request."""
        due = self._loop.time() + self._server.keepalive_timeout
        self._next_keepalive_close_time = due
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(due, self._process_keepalive)

    def _process_keepalive(self) -> None:
        """The time for another request may be over."""
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
        """Close it if it is idle; if it answers the last of the requests that are here, in whole, have it
        close afterwards."""
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
        """A client that ends its side still gets its answers: IncompleteBody if it ended in the middle of a
        body. For that the other side stays open until they are written (`finish_response` closes it). Over
        TLS, where there is no half of a connection, it is gone."""
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
        if not self._queue and not self._unparsed:  # end after this answer, which may be written already
            self._closing = True
        return True

    async def _linger(self, body: BodyStream | None) -> None:
        """Without a `body` until the client ends, who is told that nothing comes any more."""
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
    """Makes the connections of one worker, and ends them. `handler` answers a request, and has written the
    reply that it returns or leaves that to the connection; it raises ConnectionError when the client is
    gone."""

    def __init__(
        self,
        handler: Callable[[MeshRequest], Awaitable[Reply]],
        *,
        clock: Clock,
        guard: ConnectionLimiter,
        keepalive_timeout: float,
        hot: FastPath | None = None,
    ) -> None:
        """Call it in the running loop."""
        self.handler, self.clock, self.guard, self.hot = handler, clock, guard, hot
        self.keepalive_timeout = keepalive_timeout
        """Seconds for which an idle connection is kept."""
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self.on_connection_lost: Callable[[], None] | None = None
        """Called when one has ended."""
        guard.start()

    def __repr__(self) -> str:
        return f"<MeshServer, {len(self._connections)} connections>"

    def __call__(self) -> Connection:
        """The protocol factory of `loop.create_server`."""
        return Connection(self, self._loop)

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return list(self._connections)

    @property
    def connection_count(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def connection_made(self, connection: Connection) -> None:
        """A client has connected."""
        self._connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        """A client is gone."""
        self._connections.discard(connection)
        if self.on_connection_lost is not None:
            self.on_connection_lost()

    def pre_shutdown(self) -> None:
        """Close the idle connections, and the others after their answers."""
        for connection in self.connections:
            connection.close()

    async def shutdown(self, patience: float) -> None:
        """End all connections: see `Connection.shutdown`."""
        self.guard.stop()
        await asyncio.gather(*[connection.shutdown(patience) for connection in self.connections])
